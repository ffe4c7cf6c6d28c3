"""The cost of an all-reduce in a compiled function: prepared operation or functional collective.

    phalanx run --nproc-per-node 2 benchmarks/compiled_prepared.py

Inductor compiles functions with one and with nine all-reduces of 1 KiB. An eighth of the difference
of their times is the cost of an all-reduce; the rest of a call, such as the guards, is in both.

    prepared             runs of an operation, in the memory that was prepared
    prepared, written    the function writes the tensor before each run: the compiler keeps the
                         values in memory of its own, and the operation is prepared there
    functional           torch.distributed._functional_collectives.all_reduce
    functional, written  the same after the same computation
    eager prepared       runs of an operation without a compiler
    eager plain          dist.all_reduce without a compiler

All ways run in turns in the same processes. The results are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import phalanx
from phalanx.bench.machine import machine, versions

COUNTS = 1, 9
AVG = dist.ReduceOp.AVG

Function = Callable[[], object]


def with_operation(tensor: torch.Tensor, count: int) -> tuple[Function, Function]:
    """Return functions with `count` runs, without and with a write before each."""
    operation = phalanx.prepare(dist.all_reduce, tensor, op=AVG)

    def run() -> None:
        for _ in range(count):
            operation()

    def write_and_run() -> None:
        for _ in range(count):
            tensor.mul_(0.5)
            operation()

    return run, write_and_run


def with_collectives(tensor: torch.Tensor, count: int) -> tuple[Function, Function]:
    """Return the same functions with functional collectives."""

    def run() -> None:
        total = tensor
        for _ in range(count):
            total = functional.all_reduce(total, "avg", dist.group.WORLD)
        tensor.copy_(total)

    def write_and_run() -> None:
        total = tensor
        for _ in range(count):
            total = functional.all_reduce(total * 0.5, "avg", dist.group.WORLD)
        tensor.copy_(total)

    return run, write_and_run


def make_functions(tensor: torch.Tensor, count: int) -> dict[str, Function]:
    """Return a function with `count` all-reduces for each way."""

    def plain() -> None:
        for _ in range(count):
            dist.all_reduce(tensor, op=AVG)

    names = "prepared", "prepared, written", "functional", "functional, written"
    functions = *with_operation(tensor, count), *with_collectives(tensor, count)
    compiled = [torch.compile(each, fullgraph=True) for each in functions]
    eager = {"eager prepared": functions[0], "eager plain": plain}
    return {**dict(zip(names, compiled, strict=True)), **eager}


def time_calls(function: Function, calls: int) -> float:
    """Return the time of a call in microseconds."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=300, help="per round")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    runs: dict[str, list[float]] = defaultdict(list)
    functions: dict[str, list[float]] = defaultdict(list)
    with phalanx.init() as session:
        torch.set_num_threads(1)
        few, many = (make_functions(torch.ones(256), count) for count in COUNTS)
        for number in range(-1, options.rounds):  # the first round compiles
            for name in few:
                one, more = (time_calls(each[name], options.calls) for each in (few, many))
                if number >= 0:
                    functions[name].append(one)
                    runs[name].append((more - one) / (COUNTS[1] - COUNTS[0]))
    if session.rank != 0:
        return
    for name, values in runs.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        call = statistics.median(functions[name])
        print(
            f"{name}: {median:.2f} us per all-reduce (quartiles {lower:.2f} and {upper:.2f}); "
            f"a call of the function with one {call:.1f} us"
        )
    if options.output:
        record = {
            "machine": machine(),
            "versions": versions(),
            "ranks": session.world_size,
            "rounds": options.rounds,
            "calls": options.calls,
            "microseconds": {name: [round(t, 3) for t in each] for name, each in runs.items()},
            "function_microseconds": {
                name: [round(t, 3) for t in each] for name, each in functions.items()
            },
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
