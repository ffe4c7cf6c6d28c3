"""Rows out of a table in shared memory, beside the same done locally on a plain tensor.

python benchmarks/rows.py --widths 16,64,128 --readers 1,2 --json benchmarks/rows.json

One process has the table, others map it; with `--writer` one more makes updates of random rows all
the time. In every round, in another order, with indices that are new each time, all readers at the
same time:

- gather: `Table.gather` into a tensor that is there; `torch.index_select(out=)` out of a plain
  tensor of the same size, which each reader has made by itself; a loop in C out of that tensor that
  does nothing but ask for rows ahead and copy them: the limit of the memory.
- gather with a new tensor each time: `Table.gather`, `torch.nn.functional.embedding`.
- pool, bags of five: `Table.pool`, `torch.nn.functional.embedding_bag`, and the loop in C that only
  adds up.
- with `--update`, by the first reader alone: `Table.update`, `torch.optim.SparseAdam`, with the
  gradients of a tenth of the rows.

All with one thread, which is what each of several readers has of the cores. A round counts from a
barrier until the last reader is done; figures are medians with quartiles. Tables are far larger
than the caches (512 MiB without `--mebibytes`). Where the machine gives them, the C loop is run
out of large pages too, which a plain tensor hasn't.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import phalanx
from phalanx.bench.machine import machine, versions
from phalanx.embedding import SGD, Adam, Table

BAG = 5
# What is compared: ours, then rivals; the last is the limit.
GATHER = ("gather", "index_select", "C loop", "C loop, large pages")
FRESH = ("gather, new tensor", "embedding")
POOL = ("pool", "embedding_bag", "C loop of sums", "C loop of sums, large pages")
UPDATE = ("update", "SparseAdam")
# Rows that the writer updates at a time.
WRITTEN = 1000

SOURCE = """
#include <string.h>
enum { AHEAD = 16 };
static inline void ask(const char* row, long bytes) {
  for (long at = 0; at < bytes && at < 512; at += 64) __builtin_prefetch(row + at);
}
void gather(const char* table, long bytes, const long* rows, long count, char* out) {
  for (long i = 0; i < count; ++i) {
    if (i + AHEAD < count) ask(table + rows[i + AHEAD] * bytes, bytes);
    memcpy(out + i * bytes, table + rows[i] * bytes, bytes);
  }
}
void sums(const float* table, long width, const long* rows, long count, long bag, float* out) {
  for (long i = 0; i < count; i += bag, out += width) {
    memset(out, 0, width * sizeof *out);
    for (long k = i; k < i + bag; ++k) {
      if (k + AHEAD < count)
        ask((const char*)(table + rows[k + AHEAD] * width), width * sizeof *out);
      const float* restrict row = table + rows[k] * width;
      float* restrict sum = out;
      for (long j = 0; j < width; ++j) sum[j] += row[j];
    }
  }
}
"""


def compiled(folder: str) -> ctypes.CDLL:
    source, library = Path(folder, "rows.c"), Path(folder, "rows.so")
    source.write_text(SOURCE)
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Rounds:
    """Runs of a reader, timed together with those of the others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.taken: dict[str, list[float]] = {}

    def _timed(self, run: Callable[[], object]) -> float:
        dist.barrier(self.group)
        start = time.perf_counter()
        run()
        taken = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=self.group)
        return taken.item()

    def measure(
        self, runs: dict[str, Callable[[], object]], rounds: int, draw: Callable[[], None]
    ) -> None:
        """Run all of them in every round, in another order, each after a call of `draw`."""
        for number in range(rounds + 1):
            for name in random.Random(number).sample([*runs], len(runs)):
                draw()
                seconds = self._timed(runs[name])
                if number > 0:  # the first one warms up
                    self.taken.setdefault(name, []).append(seconds)


def large_pages(plain: Tensor) -> Tensor | None:
    """A copy in large pages, if the machine has them for whoever asks."""
    if "always" not in (state := Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()):
        return None
    if "[never]" in state:
        return None
    size = plain.numel() * plain.element_size()
    memory = mmap.mmap(-1, size + (1 << 21), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=plain.dtype, count=plain.numel()).view(plain.shape)
    return copy.copy_(plain)


def write_until(table: Table, stop: Path) -> None:
    gradients = torch.randn(WRITTEN, table.width)
    while not stop.exists():
        rows = torch.randint(0, table.rows, (WRITTEN,))
        table.update(rows, gradients)


def measure(
    shape: tuple[int, int], count: int, rounds: int, writer: bool, updates: bool
) -> dict[str, tuple[float, ...]]:
    """Quartiles of the seconds that the slowest reader needs; run on every rank."""
    torch.set_num_threads(1)
    rows, width = shape
    with phalanx.init("phalanx"), tempfile.TemporaryDirectory() as folder:
        rank, size = dist.get_rank(), dist.get_world_size()
        first = rank == 0
        made = Table(rows, width, Adam() if updates else SGD(1e-9)) if first else None
        told = [(made.handle, folder) if made else None]
        dist.broadcast_object_list(told)
        assert told[0] is not None
        table = made or Table.open(told[0][0])
        stop = Path(told[0][1], "stop")
        readers = dist.new_group(range(size - writer))
        taken = {}
        if writer and rank == size - 1:
            write_until(table, stop)
        else:
            taken = read(table, count, Rounds(readers), rounds, compiled(folder), updates)
            dist.barrier(readers)
            if first:
                stop.touch()
        dist.barrier()
    return {name: tuple(statistics.quantiles(values, n=4)) for name, values in taken.items()}


def read(
    table: Table, count: int, timed: Rounds, rounds: int, loops: ctypes.CDLL, updates: bool
) -> dict[str, list[float]]:
    rows, width = table.rows, table.width
    plain = torch.empty(rows, width).copy_(table.view())
    out, sums = torch.empty(count, width), torch.empty(count // BAG, width)
    bags = torch.arange(0, count, BAG)
    drawn = [torch.empty(0, dtype=torch.int64)]

    def draw() -> None:
        drawn[0] = torch.randint(0, rows, (count,))

    def copy(source: Tensor) -> None:
        loops.gather(*map(ctypes.c_void_p, (source.data_ptr(), 4 * width)), *told(out))

    def add(source: Tensor) -> None:
        loops.sums(*map(ctypes.c_void_p, (source.data_ptr(), width)), *told(sums, BAG))

    def told(to: Tensor, *more: int) -> list[ctypes.c_void_p]:
        return [*map(ctypes.c_void_p, (drawn[0].data_ptr(), count, *more, to.data_ptr()))]

    runs: dict[str, Callable[[], object]] = {
        "gather": lambda: table.gather(drawn[0], out=out),
        "index_select": lambda: torch.index_select(plain, 0, drawn[0], out=out),
        "C loop": lambda: copy(plain),
        "gather, new tensor": lambda: table.gather(drawn[0]),
        "embedding": lambda: functional.embedding(drawn[0], plain),
        "pool": lambda: table.pool(drawn[0], bags, mode="sum"),
        "embedding_bag": lambda: functional.embedding_bag(drawn[0], plain, bags, mode="sum"),
        "C loop of sums": lambda: add(plain),
    }
    if (large := large_pages(plain)) is not None:
        runs["C loop, large pages"] = lambda: copy(large)
        runs["C loop of sums, large pages"] = lambda: add(large)
    draw()
    check(runs, drawn[0], plain, (out, sums))
    timed.measure(runs, rounds, draw)
    if updates:
        timed.measure(optimizers(table, plain, drawn, dist.get_rank() == 0), rounds, draw)
    return timed.taken


def check(
    runs: dict[str, Callable[[], object]], drawn: Tensor, plain: Tensor, outs: tuple[Tensor, Tensor]
) -> None:
    """See that what is compared does the same; the writer's steps are too small to be seen."""
    gathered = plain[drawn]
    pooled = gathered.view(len(drawn) // BAG, BAG, -1).sum(1)
    for name, run in runs.items():
        found = run()
        if name.startswith("C loop"):
            found = outs["sums" in name]
        assert isinstance(found, Tensor)
        right = gathered if len(found) == len(drawn) else pooled
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4, msg=f"{name} is wrong")


def optimizers(
    table: Table, plain: Tensor, drawn: list[Tensor], first: bool
) -> dict[str, Callable[[], object]]:
    parameter = nn.Parameter(plain)
    optimizer = torch.optim.SparseAdam([parameter])

    def some() -> tuple[Tensor, Tensor]:
        rows = drawn[0][: len(drawn[0]) // 10].unique()
        return rows, gradient[: len(rows)]

    gradient = torch.randn(len(drawn[0]) // 10, table.width)

    def sparse_adam() -> None:
        rows, gradients = some()
        parameter.grad = torch.sparse_coo_tensor(rows[None], gradients, plain.shape)
        parameter.grad._coalesced_(True)
        optimizer.step()

    return {
        "update": lambda: table.update(*some()) if first else None,
        "SparseAdam": lambda: sparse_adam() if first else None,
    }


def report(results: dict[str, tuple[float, ...]], volume: int) -> None:
    for names in (GATHER, FRESH, POOL, UPDATE):
        for name in names:
            if name not in results:
                continue
            low, median, high = results[name]
            line = f"  {name:28} {median * 1e3:8.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"
            if names is not UPDATE:
                line += f" {volume / median / 1e9:6.2f} GB/s of rows"
            if name != names[0]:
                line += f", ours has {results[name][1] / results[names[0]][1]:.0%} of its speed"
            print(line, flush=True)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Gather, pool and update rows in shared memory.")
    parser.add_argument("--widths", default="16,64,128", help="float32 elements of a row")
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the table (512)")
    parser.add_argument("--count", type=int, default=100_000, help="rows of a lookup (100000)")
    parser.add_argument("--readers", default="1,2", help="processes, for each a run (1,2)")
    parser.add_argument("--rounds", type=int, default=21, help="how often each is measured (21)")
    parser.add_argument("--writer", action="store_true", help="again, with a process that writes")
    parser.add_argument("--update", action="store_true", help="the optimizers too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    document = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    document |= {"versions": versions(), "figures": []}
    count = options.count // BAG * BAG
    for width in numbers(options.widths):
        rows = (options.mebibytes << 20) // (4 * width)
        for readers in numbers(options.readers):
            for writer in (False, True)[: 1 + options.writer]:
                arguments = ((rows, width), count, options.rounds, writer, options.update)
                results = phalanx.launch(measure, readers + writer, arguments)[0]
                setting = {"rows": rows, "width": width, "readers": readers, "writer": writer}
                document["figures"].append({**setting, "seconds": results})
                print(
                    f"{readers} readers{' beside a writer' if writer else ''}, {count} of {rows} "
                    f"rows of {4 * width} bytes each"
                )
                report(results, readers * count * 4 * width)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
