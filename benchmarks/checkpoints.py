"""The time for which a checkpoint pauses training, compared with the disk's own speed.

python benchmarks/checkpoints.py --nproc-per-node 2 --directory DIRECTORY --output
benchmarks/checkpoints.json

The state is that of a model with AdamW: three float32 per parameter. Every round measures, in
random
order: rank 0 writing the bytes to one file in large blocks and flushing it (`disk`), the same with
early writeback (`disk early`), a checkpoint by rank 0 (`save`), a checkpoint shared by all ranks
(`sharded`), each replacing the previous one, and `torch.save` to a flushed file. Each is timed from
a barrier until the last rank continues. All bytes change between rounds. Ratios are relative to the
faster of the two `disk` variants. At the end the checkpoints are loaded and compared.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.train import Checkpointer

BLOCK = 4 * 2**20
EARLY = 32 * 2**20
SYSTEMS = ("disk", "disk early", "save", "sharded", "torch.save")


def make_trained_model(million: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of square layers, and its AdamW optimizer after the first step."""
    torch.manual_seed(0)
    width = 1024
    layers = max(1, round(million * 1e6 / (width * (width + 1))))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, optimizer


def find_tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for item in items for tensor in find_tensors(item)]


def write_raw(path: Path, content: memoryview, early: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    start_writing = ctypes.CDLL(None).sync_file_range
    start_writing.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    try:
        for start in range(0, len(content), BLOCK):
            os.write(descriptor, content[start : start + BLOCK])
            if early and (start + BLOCK) % EARLY == 0:
                start_writing(descriptor, start + BLOCK - EARLY, EARLY, 2)  # SYNC_FILE_RANGE_WRITE
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_pickled(path: Path, state: Any) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def time_run(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(million: float, rounds: int, directory: str) -> dict[str, Any]:
    """Run on every rank; return the seconds of every round by system."""
    with phalanx.init():
        first = dist.get_rank() == 0
        model, optimizer = make_trained_model(million)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        tensors = find_tensors(state)
        length = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        content = torch.empty(length // 4, dtype=torch.int32).random_() if first else torch.empty(0)
        array: Any = content.numpy()
        raw = memoryview(array).cast("B")
        path = Path(directory) / "file"
        unsharded = Checkpointer(Path(directory) / "whole", keep=1)
        sharded = Checkpointer(Path(directory) / "sharded", keep=1, sharded=True)
        runs: dict[str, Callable[[int], object]] = {
            "disk": lambda _: write_raw(path, raw, False) if first else None,
            "disk early": lambda _: write_raw(path, raw, True) if first else None,
            "save": lambda step: unsharded.save(step, state),
            "sharded": lambda step: sharded.save(step, state),
            "torch.save": lambda _: write_pickled(path, state) if first else None,
        }
        random_order, seconds = random.Random(0), {name: list[float]() for name in SYSTEMS}
        for step in range(rounds + 1):
            for tensor in tensors:
                tensor.add_(1e-3)
            content += 1
            for name in random_order.sample(SYSTEMS, len(SYSTEMS)):
                taken = time_run(lambda name=name, step=step: runs[name](step))
                if step > 0:
                    seconds[name].append(taken)
                if first:
                    clean_up(path)
        start = time.perf_counter()
        check_loaded(unsharded, state)
        loading = time.perf_counter() - start
        check_loaded(sharded, state)
    return {"bytes": length, "seconds": seconds, "loading": loading}


def clean_up(path: Path) -> None:
    """Remove the measured file, and wait for the removal of old checkpoints and for the disk."""
    path.unlink(missing_ok=True)
    while list(path.parent.glob("*/.removing-*")):
        time.sleep(0.01)
    os.sync()


def check_loaded(checkpoints: Checkpointer, state: Any) -> None:
    found = checkpoints.load(like=state)
    pairs = zip(find_tensors(found.state if found else None), find_tensors(state), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        sys.exit("The loaded state differs from the saved state.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure checkpoints relative to the disk's speed."
    )
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks to start (2)")
    parser.add_argument("--million", type=float, default=25, help="parameters in millions (25)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to measure (9)")
    parser.add_argument("--directory", default=".", help="a directory on the disk to measure (.)")
    parser.add_argument("--output", type=Path, help="write the results to this file")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=options.directory)
    try:
        arguments = (options.million, options.rounds, folder)
        result = phalanx.launch(measure, options.nproc_per_node, arguments)[0]
    finally:
        shutil.rmtree(folder)
    seconds = result["seconds"]
    figures: dict[str, dict[str, float]] = {}
    disk = min(("disk", "disk early"), key=lambda name: statistics.median(seconds[name]))
    print(
        f"{result['bytes'] / 1e6:.0f} MB at {options.nproc_per_node} ranks, {options.rounds} rounds"
    )
    for name in SYSTEMS:
        low, median, high = statistics.quantiles(seconds[name], n=4)
        pairs = [a / b for a, b in zip(seconds[name], seconds[disk], strict=True)]
        ratio = median / statistics.median(seconds[disk])
        figures[name] = {"median": median, "low": low, "high": high, "ratio": ratio}
        figures[name]["least"] = min(seconds[name])
        figures[name]["median_of_ratios"] = statistics.median(pairs)
        print(
            f"{name:11} {median:6.3f} s ({low:.3f} to {high:.3f}), {ratio:.2f} times '{disk}', "
            f"{statistics.median(pairs):.2f} round by round"
        )
    print(f"loading     {result['loading']:6.3f} s")
    if options.output:
        record = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
        record |= {"versions": versions(), **result, "figures": figures}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
