"""Tokens per second of examples/tensor_parallel.py, and the share of time in collectives.

    python benchmarks/tensor_parallel.py --output benchmarks/tensor_parallel.json

A rank has a thread and, if there are enough, a core of its own. The modes run alternately in the
same processes, on the same weights:

    one           the whole model on rank 0; the other ranks sleep
    bound         the shares of all ranks without collectives, which no communication can exceed
    phalanx       plain tensors, dist.all_reduce
    prepared      the same with phalanx.prepare
    gloo          the same as phalanx, on Gloo
    dtensor       PyTorch's DTensor at every step, on Phalanx
    dtensor_gloo  the same on Gloo

A round generates some tokens in each mode, at batch size 1. The results are medians over the rounds
with the quartiles: the speed of the slowest rank, its ratio to that of `one` in the same round, and
the share of time in collectives. Transfer is the part of that time after the last rank has arrived,
that is, the shortest time of any rank in each call; "a call" is its median. The rest of the time
in collectives is waiting for slower ranks.

A rank reads its weights from memory for each token. So each round also measures how fast rank 0
reads matrices, by products with a vector, and how fast all ranks do at the same time.
"""

import argparse
import copy
import gc
import json
import os
import shlex
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import phalanx
from phalanx.bench.machine import available_memory, machine, versions
from phalanx.bench.results import Timing

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import llama
import tensor_parallel as example

MODELS = {
    # The example's own.
    "125m": llama.Config(),
    # Eight of the 22 layers of TinyLlama-1.1B.
    "484m": llama.Config(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=32
    ),
}
MODES = ("one", "bound", "phalanx", "prepared", "gloo", "dtensor", "dtensor_gloo")
SHARES = ("collectives", "transfer")
PROMPT = list(range(1, 9))
READ_BYTES = 512 * 2**20


class NoCollectives(example.Collectives):
    """Results of the right shape without communication."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the part of this rank."""
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the part of this rank for every rank."""
        return part.expand(dist.get_world_size(), *part.shape)


class Switch:
    """Collectives that can be replaced, so that modes share a model."""

    current: example.Collectives

    def sum(self, *arguments: Any) -> Tensor:
        """Call the method of the current collectives."""
        return self.current.sum(*arguments)

    def gather(self, *arguments: Any) -> Tensor:
        """Call the method of the current collectives."""
        return self.current.gather(*arguments)


class Rank:
    """The models of one rank, for all modes."""

    def __init__(self, model: str, dtype: torch.dtype, modes: tuple[str, ...]) -> None:
        config, weights = MODELS[model], llama.random_weights(seed=1)
        groups = {name: dist.new_group(backend=name) for name in ("phalanx", "gloo")}
        meshes = {name: DeviceMesh.from_group(group, "cpu") for name, group in groups.items()}
        self.switch = Switch()
        self.collectives = {
            "bound": NoCollectives(),
            "phalanx": example.Collectives(groups["phalanx"]),
            "prepared": example.PreparedCollectives(groups["phalanx"]),
            "gloo": example.Collectives(groups["gloo"]),
        }
        self.models: dict[str, llama.Llama] = {}
        if "one" in modes and dist.get_rank() == 0:
            self.models["one"] = example.build(config, weights, dtype, None)
        split = example.build(config, weights, dtype, meshes["phalanx"])
        self.models["dtensor"] = split
        if "dtensor_gloo" in modes:
            self.models["dtensor_gloo"] = copy_to_mesh(split, meshes["gloo"])
        # A copy of the modules, with the same parameters.
        local = copy.deepcopy(split, {id(each): each for each in split.parameters()})
        example.use_local_tensors(local, self.switch)
        self.models.update(dict.fromkeys(self.collectives, local))
        count = READ_BYTES // (2048 * 2048 * dtype.itemsize)
        self.matrices = [torch.randn(2048, 2048).to(dtype) for _ in range(count)]
        self.vector = torch.randn(1, 2048).to(dtype)

    def generate(self, mode: str, tokens: int) -> tuple[float, list[float]]:
        """Return the seconds for a token, and those of each collective."""
        times: list[float] = []
        if mode in self.collectives:
            self.switch.current = self.collectives[mode]
            times = self.collectives[mode].times
        generator = None
        if mode in self.models:
            generator = example.Generator(self.models[mode], PROMPT, len(PROMPT) + tokens + 1)
        if generator:
            generator.step()
        dist.barrier()
        times.clear()
        gc.disable()
        start = time.perf_counter()
        for _ in range(tokens if generator else 0):
            generator.step()
        taken = (time.perf_counter() - start) / tokens
        gc.enable()
        dist.barrier()
        return taken, [] if mode == "bound" else times

    def read(self, alone: bool) -> float:
        """Return the bytes per second of all ranks; if alone, of rank 0."""
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0 or not alone:
            for matrix in self.matrices:
                torch.nn.functional.linear(self.vector, matrix)
        taken = time.perf_counter() - start
        dist.barrier()
        ranks = 1 if alone else dist.get_world_size()
        return READ_BYTES * ranks / max(gather(taken))


def copy_to_mesh(model: llama.Llama, mesh: DeviceMesh) -> llama.Llama:
    """Return the same model on another mesh; it has the same memory."""
    copied = example.build_empty(model.config, mesh)
    for name, parameter in model.named_parameters():
        value: Tensor = parameter
        if isinstance(parameter, DTensor):
            placements = parameter.placements
            value = DTensor.from_local(parameter.to_local(), mesh, placements, run_check=False)
        example.set_parameter(copied, name, value)
    return copied


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(
    model: str, dtype: str, modes: tuple[str, ...], rounds: int, tokens: int
) -> dict[str, dict[str, list[float]]]:
    """Run all modes in turns; return the figures of each mode by name and round."""
    with phalanx.init("gloo", timeout=timedelta(minutes=5)) as session:
        example.use_one_core(session)
        rank = Rank(model, getattr(torch, dtype), modes)
        figures: dict[str, dict[str, list[float]]] = {
            mode: {name: [] for name in ("seconds", *SHARES, "call_seconds")} for mode in modes
        }
        figures["read"] = {"one": [], "all": []}
        for number in range(-1, rounds):
            results = {}
            for offset in range(len(modes)):
                mode = modes[(number + offset) % len(modes)]
                results[mode] = gather(rank.generate(mode, tokens))
            speeds = {"one": rank.read(alone=True), "all": rank.read(alone=False)}
            if number < 0:  # the first round warms up
                continue
            for name, speed in speeds.items():
                figures["read"][name].append(speed)
            for mode, of_ranks in results.items():
                seconds = max(taken for taken, _ in of_ranks)
                figures[mode]["seconds"].append(seconds)
                calls = [times for _, times in of_ranks]
                if calls[0]:
                    total = sum(map(sum, calls)) / len(calls)
                    transfers = [min(times) for times in zip(*calls, strict=True)]
                    figures[mode]["collectives"].append(total / tokens / seconds)
                    figures[mode]["transfer"].append(sum(transfers) / tokens / seconds)
                    figures[mode]["call_seconds"].append(statistics.median(transfers))
        return figures


def summarize(figures: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return the medians and quartiles of the figures of `measure`."""
    read = figures.pop("read")
    summary: dict[str, Any] = {
        "bytes_per_second": {name: vars(Timing.of(speeds)) for name, speeds in read.items()}
    }
    for mode, lists in figures.items():
        ratios = zip(figures["one"]["seconds"], lists["seconds"], strict=True)
        summary[mode] = {
            "tokens_per_second": vars(Timing.of([1 / each for each in lists["seconds"]])),
            "speedup": vars(Timing.of([one / each for one, each in ratios])),
        }
        for name in (*SHARES, "call_seconds"):
            if lists[name]:
                summary[mode][name] = vars(Timing.of(lists[name]))
    return summary


def count_bytes(model: str, dtype: str) -> tuple[int, int]:
    """Return the bytes of all weights, and of those that are read for a token."""
    parameters = list(example.build_empty(MODELS[model], None).named_parameters())
    width = getattr(torch, dtype).itemsize
    read = sum(each.numel() for name, each in parameters if not name.startswith("embed"))
    return sum(each.numel() for _, each in parameters) * width, read * width


def check_memory(model: str, dtype: str, ranks: int) -> None:
    """Exit if the models do not fit into the available memory."""
    weights, read = count_bytes(model, dtype)
    # The whole model, the shares, and on each rank the embedding and the matrices to read.
    needed = weights + read + ranks * (weights - read + READ_BYTES)
    available = available_memory()
    if available < 1.2 * needed:
        sys.exit(
            f"{model} with {ranks} ranks needs {1.2 * needed / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are available: give others by --models"
        )


def show(model: str, dtype: str, ranks: int, summary: dict[str, Any]) -> None:
    """Print a table of the results."""
    cores = len(os.sched_getaffinity(0))
    place = "on a core each" if ranks <= cores else f"which share {cores} cores"
    read = count_bytes(model, dtype)[1] / 1e9
    print(f"\n{model}, {dtype}, {read:.2f} GB read for a token; {ranks} ranks, {place}")
    speeds = {name: each["median"] / 1e9 for name, each in summary["bytes_per_second"].items()}
    print(
        f"memory: one rank alone reads {speeds['one']:.1f} GB/s, {ranks} at once "
        f"{speeds['all']:.1f} GB/s, {speeds['all'] / speeds['one']:.2f} times as much"
    )
    columns = f"{'tokens/s':>21}  {'times one':>18}  {'in collectives':>14}  {'transfer':>8}"
    print(f"{'':>12}  {columns}  {'a call':>9}")
    for mode in (name for name in MODES if name in summary):
        row = summary[mode]
        speed, speedup = row["tokens_per_second"], row["speedup"]
        line = f"{mode:>12}  {speed['median']:6.2f} ({speed['low']:.2f} - {speed['high']:.2f})"
        line = f"{line:<35}  {speedup['median']:.2f} ({speedup['low']:.2f} - {speedup['high']:.2f})"
        if "transfer" in row:
            line += f"  {row['collectives']['median']:14.1%}  {row['transfer']['median']:8.1%}"
            line += f"  {row['call_seconds']['median'] * 1e6:6.1f} us"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "2,4" if len(os.sched_getaffinity(0)) >= 4 else "2"
    parser.add_argument("--nproc-per-node", default=default, help="ranks (%(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--modes", default=",".join(MODES), help="one and others (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8, help="of each mode in a round")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    modes = tuple(options.modes.split(","))
    if "one" not in modes:
        parser.error(f"--modes {options.modes} given, expected one among them, to compare with")
    facts = {**machine(), **versions()}
    print("tensor parallelism; " + ", ".join(f"{k} {facts[k]}" for k in facts), flush=True)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": facts,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "results": [],
    }
    for model in options.models.split(","):
        for ranks in map(int, options.nproc_per_node.split(",")):
            arguments = model, options.dtype, modes, options.rounds, options.tokens
            check_memory(model, options.dtype, ranks)
            summary = summarize(phalanx.launch(measure, ranks, arguments)[0])
            show(model, options.dtype, ranks, summary)
            shape = {"model": model, "config": asdict(MODELS[model]), "dtype": options.dtype}
            document["results"].append({**shape, "ranks": ranks, **summary})
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
