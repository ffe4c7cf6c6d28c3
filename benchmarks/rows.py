"""Compare reads of a table in shared memory with the same operations on a plain local tensor.

python benchmarks/rows.py --widths 16,64,128 --readers 1,2 --output benchmarks/rows.json

One process creates the table, others map it; with `--writer` another process updates random rows
continuously. Every round runs these operations in a new order, with new indices each time, in all
readers concurrently:

- gather: `EmbeddingTable.gather` into an existing tensor; `torch.index_select(out=)` from a plain
  tensor of the same size, which each reader creates for itself; a loop in C that only prefetches
  and copies rows of that tensor: the limit of the memory.
- gather into a new tensor: `EmbeddingTable.gather`, `torch.nn.functional.embedding`.
- pool, bags of five: `EmbeddingTable.pool`, `torch.nn.functional.embedding_bag`, and a loop in C
  that only sums.
- with `--update`, by the first reader alone: `EmbeddingTable.update`, `torch.optim.SparseAdam`,
  with the gradients of a tenth of the rows.

All operations use one thread, which is each reader's share of the cores. A round lasts from a
barrier until the last reader has finished; the results are medians with quartiles. Tables are far
larger than the caches (512 MiB without `--mebibytes`). If the machine provides large pages, the C
loop also reads from them; a plain tensor does not use them.
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
from phalanx.embedding import SGD, Adam, EmbeddingTable

BAG = 5
# The compared operations: Phalanx, then alternatives; the last is the limit.
GATHER = ("gather", "index_select", "C loop", "C loop, large pages")
GATHER_NEW = ("gather, new tensor", "embedding")
POOL = ("pool", "embedding_bag", "C loop of sums", "C loop of sums, large pages")
UPDATE = ("update", "SparseAdam")
# The number of rows of an update of the writer.
WRITTEN_ROWS = 1000

SOURCE = """
#include <string.h>
enum { AHEAD = 16 };
static inline void prefetch(const char* row, long bytes) {
  for (long at = 0; at < bytes && at < 512; at += 64) __builtin_prefetch(row + at);
}
void gather(const char* table, long bytes, const long* rows, long count, char* out) {
  for (long i = 0; i < count; ++i) {
    if (i + AHEAD < count) prefetch(table + rows[i + AHEAD] * bytes, bytes);
    memcpy(out + i * bytes, table + rows[i] * bytes, bytes);
  }
}
void sums(const float* table, long width, const long* rows, long count, long bag, float* out) {
  for (long i = 0; i < count; i += bag, out += width) {
    memset(out, 0, width * sizeof *out);
    for (long k = i; k < i + bag; ++k) {
      if (k + AHEAD < count)
        prefetch((const char*)(table + rows[k + AHEAD] * width), width * sizeof *out);
      const float* restrict row = table + rows[k] * width;
      float* restrict sum = out;
      for (long j = 0; j < width; ++j) sum[j] += row[j];
    }
  }
}
"""


def compile_loops(folder: str) -> ctypes.CDLL:
    source, library = Path(folder, "rows.c"), Path(folder, "rows.so")
    source.write_text(SOURCE)
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Rounds:
    """Runs of a reader, timed together with those of the other readers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.seconds: dict[str, list[float]] = {}

    def _time(self, run: Callable[[], object]) -> float:
        dist.barrier(self.group)
        start = time.perf_counter()
        run()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.group)
        return seconds.item()

    def measure(
        self, runs: dict[str, Callable[[], object]], rounds: int, draw: Callable[[], None]
    ) -> None:
        """Run all runs in every round, in a new order, each after a call of `draw`."""
        for number in range(rounds + 1):
            for name in random.Random(number).sample([*runs], len(runs)):
                draw()
                seconds = self._time(runs[name])
                if number > 0:  # the first round is a warm-up
                    self.seconds.setdefault(name, []).append(seconds)


def copy_to_large_pages(plain: Tensor) -> Tensor | None:
    """Return a copy in large pages, or None if the machine does not provide them."""
    if "always" not in (state := Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()):
        return None
    if "[never]" in state:
        return None
    size = plain.numel() * plain.element_size()
    memory = mmap.mmap(-1, size + (1 << 21), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=plain.dtype, count=plain.numel()).view(plain.shape)
    return copy.copy_(plain)


def write_until(table: EmbeddingTable, stop: Path) -> None:
    gradients = torch.randn(WRITTEN_ROWS, table.width)
    while not stop.exists():
        rows = torch.randint(0, table.rows, (WRITTEN_ROWS,))
        table.update(rows, gradients)


def measure(
    shape: tuple[int, int], count: int, rounds: int, writer: bool, updates: bool
) -> dict[str, tuple[float, ...]]:
    """Return the quartiles of the slowest reader's seconds; runs on every rank."""
    torch.set_num_threads(1)
    rows, width = shape
    with phalanx.init("phalanx"), tempfile.TemporaryDirectory() as folder:
        rank, size = dist.get_rank(), dist.get_world_size()
        first = rank == 0
        created = EmbeddingTable(rows, width, Adam() if updates else SGD(1e-9)) if first else None
        payload = [(created.handle, folder) if created else None]
        dist.broadcast_object_list(payload)
        assert payload[0] is not None
        table = created or EmbeddingTable.open(payload[0][0])
        stop = Path(payload[0][1], "stop")
        readers = dist.new_group(range(size - writer))
        seconds = {}
        if writer and rank == size - 1:
            write_until(table, stop)
        else:
            seconds = read(table, count, Rounds(readers), rounds, compile_loops(folder), updates)
            dist.barrier(readers)
            if first:
                stop.touch()
        dist.barrier()
    return {name: tuple(statistics.quantiles(values, n=4)) for name, values in seconds.items()}


def read(
    table: EmbeddingTable,
    count: int,
    timer: Rounds,
    rounds: int,
    loops: ctypes.CDLL,
    updates: bool,
) -> dict[str, list[float]]:
    rows, width = table.rows, table.width
    plain = torch.empty(rows, width).copy_(table.view())
    out, sums = torch.empty(count, width), torch.empty(count // BAG, width)
    bags = torch.arange(0, count, BAG)
    indices = [torch.empty(0, dtype=torch.int64)]

    def draw() -> None:
        indices[0] = torch.randint(0, rows, (count,))

    def copy(source: Tensor) -> None:
        loops.gather(*map(ctypes.c_void_p, (source.data_ptr(), 4 * width)), *pointers(out))

    def sum_bags(source: Tensor) -> None:
        loops.sums(*map(ctypes.c_void_p, (source.data_ptr(), width)), *pointers(sums, BAG))

    def pointers(to: Tensor, *more: int) -> list[ctypes.c_void_p]:
        return [*map(ctypes.c_void_p, (indices[0].data_ptr(), count, *more, to.data_ptr()))]

    runs: dict[str, Callable[[], object]] = {
        "gather": lambda: table.gather(indices[0], out=out),
        "index_select": lambda: torch.index_select(plain, 0, indices[0], out=out),
        "C loop": lambda: copy(plain),
        "gather, new tensor": lambda: table.gather(indices[0]),
        "embedding": lambda: functional.embedding(indices[0], plain),
        "pool": lambda: table.pool(indices[0], bags, mode="sum"),
        "embedding_bag": lambda: functional.embedding_bag(indices[0], plain, bags, mode="sum"),
        "C loop of sums": lambda: sum_bags(plain),
    }
    if (large_pages := copy_to_large_pages(plain)) is not None:
        runs["C loop, large pages"] = lambda: copy(large_pages)
        runs["C loop of sums, large pages"] = lambda: sum_bags(large_pages)
    draw()
    check(runs, indices[0], plain, (out, sums))
    timer.measure(runs, rounds, draw)
    if updates:
        timer.measure(optimizers(table, plain, indices, dist.get_rank() == 0), rounds, draw)
    return timer.seconds


def check(
    runs: dict[str, Callable[[], object]],
    indices: Tensor,
    plain: Tensor,
    outs: tuple[Tensor, Tensor],
) -> None:
    """Check that all operations have the same result; the writer's steps are negligibly small."""
    gathered = plain[indices]
    pooled = gathered.view(len(indices) // BAG, BAG, -1).sum(1)
    for name, run in runs.items():
        result = run()
        if name.startswith("C loop"):
            result = outs["sums" in name]
        assert isinstance(result, Tensor)
        expected = gathered if len(result) == len(indices) else pooled
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, msg=f"{name} is wrong")


def optimizers(
    table: EmbeddingTable, plain: Tensor, indices: list[Tensor], first: bool
) -> dict[str, Callable[[], object]]:
    parameter = nn.Parameter(plain)
    optimizer = torch.optim.SparseAdam([parameter])

    def take_batch() -> tuple[Tensor, Tensor]:
        rows = indices[0][: len(indices[0]) // 10].unique()
        return rows, gradient[: len(rows)]

    gradient = torch.randn(len(indices[0]) // 10, table.width)

    def sparse_adam() -> None:
        rows, gradients = take_batch()
        parameter.grad = torch.sparse_coo_tensor(rows[None], gradients, plain.shape)
        parameter.grad._coalesced_(True)
        optimizer.step()

    return {
        "update": lambda: table.update(*take_batch()) if first else None,
        "SparseAdam": lambda: sparse_adam() if first else None,
    }


def report(results: dict[str, tuple[float, ...]], volume: int) -> None:
    for names in (GATHER, GATHER_NEW, POOL, UPDATE):
        for name in names:
            if name not in results:
                continue
            low, median, high = results[name]
            line = f"  {name:28} {median * 1e3:8.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f})"
            if names is not UPDATE:
                line += f" {volume / median / 1e9:6.2f} GB/s of rows"
            if name != names[0]:
                line += f", Phalanx has {results[name][1] / results[names[0]][1]:.0%} of its speed"
            print(line, flush=True)


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Gather, pool and update rows in shared memory.")
    parser.add_argument("--widths", default="16,64,128", help="float32 elements of a row")
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the table (512)")
    parser.add_argument("--count", type=int, default=100_000, help="rows of a lookup (100000)")
    parser.add_argument("--readers", default="1,2", help="numbers of reading processes (1,2)")
    parser.add_argument("--rounds", type=int, default=21, help="number of rounds (21)")
    parser.add_argument("--writer", action="store_true", help="also measure with a writing process")
    parser.add_argument("--update", action="store_true", help="also measure updates")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    document = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    document |= {"versions": versions(), "figures": []}
    count = options.count // BAG * BAG
    for width in parse_numbers(options.widths):
        rows = (options.mebibytes << 20) // (4 * width)
        for readers in parse_numbers(options.readers):
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
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
