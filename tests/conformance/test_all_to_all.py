"""all_to_all of lists and of single tensors, with equal parts and parts that differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

WORLD_SIZES = (1, 2, 3, 4)
# Elements of a part: from none to several chunks, around the limit of inline payloads.
SIZES = (0, 1, 3, 500, 1024, 2000, 4096, 4097, 32_768, 70_001)


class Check:
    """An exchange in which each source sends `counts[source][target]` rows of `width` elements."""

    def __init__(
        self,
        dtype: str,
        counts: list[list[int]],
        seed: int,
        width: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.group, self.width = dist.get_rank(group), group, width
        self.counts = counts
        self.rows = [cases.data(dtype, (sum(c), width), seed, p) for p, c in enumerate(counts)]
        self.splits = (self.column(), counts[self.rank])
        self.given = self.rows[self.rank]
        self.expected = [
            rows.split(to)[self.rank] for rows, to in zip(self.rows, counts, strict=True)
        ]
        self.what = f"of {dtype}{counts} times {width} on rank {self.rank}"

    def column(self) -> list[int]:
        return [line[self.rank] for line in self.counts]

    def lists(self, async_op: bool) -> None:
        inputs = [part.clone() for part in self.given.split(self.splits[1])]
        outputs = [cases.poisoned(part) for part in self.expected]
        finish(dist.all_to_all(outputs, inputs, self.group, async_op), async_op)
        for output, part in zip(outputs, self.expected, strict=True):
            cases.check_bits(output, part, f"all_to_all {self.what}")
        cases.check_bits(torch.cat(inputs), self.given, f"input of all_to_all {self.what}")

    def single(self, async_op: bool, splits: bool = True) -> None:
        expected, given = torch.cat(self.expected), self.given.clone()
        output = cases.poisoned(expected)
        sizes = self.splits if splits else (None, None)
        work = dist.all_to_all_single(output, given, *sizes, self.group, async_op)
        finish(work, async_op)
        cases.check_bits(output, expected, f"all_to_all_single {self.what}")
        cases.check_bits(given, self.given, f"input of all_to_all_single {self.what}")


def finish(work: dist.Work | None, async_op: bool) -> None:
    assert (work is not None) == async_op
    if work is not None:
        work.wait()


def equal(size: int, ranks: int) -> list[list[int]]:
    return [[size] * ranks for _ in range(ranks)]


def every_dtype(seed: int) -> None:
    world_size = dist.get_world_size()
    for number, dtype in enumerate(cases.DTYPES):
        for turn, size in enumerate(SIZES[number % 2 :: 2]):
            check = Check(dtype, equal(size, world_size), seed, 1 + turn % 3)
            check.lists(async_op=bool(turn % 2))
            check.single(async_op=not turn % 2, splits=turn % 3 == 0)


def uneven(seed: int) -> None:
    random = cases.np.random.default_rng(seed)
    world_size = dist.get_world_size()
    shape = (world_size, world_size)
    matrices = [
        random.integers(0, 3, shape),  # small, with many zeros
        random.integers(0, 3, shape) * random.integers(0, 2000, shape),
        random.integers(0, 2, shape) * random.integers(60_000, 140_000, shape),
        random.permutation([100_000] + [0] * (world_size**2 - 1)).reshape(shape),  # one rank sends
        cases.np.zeros(shape, int),
    ]
    for number, matrix in enumerate(matrices):
        for dtype in ("int32", "bool", "complex128"):
            check = Check(dtype, matrix.tolist(), seed, 1 + number % 2)
            check.lists(async_op=bool(number % 2))
            check.single(async_op=not number % 2)


def layouts(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for rows in (3, 3000):
        check = Check("float32", equal(rows, world_size), seed, 4)
        expected = torch.cat(check.expected)
        wide = torch.full((world_size * rows, 9), float("nan"))
        columns = check.given.t().contiguous().t()
        assert not columns.is_contiguous()
        dist.all_to_all_single(wide[:, 1:9:2], columns)
        cases.check_bits(wide[:, 1:9:2], expected, "single, strided")
        assert wide[:, ::2].isnan().all()
        inputs = [part.t() for part in check.given.t().contiguous().split(rows, 1)]
        outputs = [torch.full((rows, 8), float("nan"))[:, ::2] for _ in range(world_size)]
        dist.all_to_all(outputs, inputs)
        for output, part in zip(outputs, check.expected, strict=True):
            cases.check_bits(output, part, "list, strided")
    # Rows are along the first dimension, for any number of dimensions.
    cube = torch.arange(world_size * 2 * 3 * 5).reshape(world_size * 2, 3, 5) + 1000 * rank
    output = torch.zeros_like(cube)
    dist.all_to_all_single(output, cube)
    parts = [cube - 1000 * rank + 1000 * peer for peer in range(world_size)]
    assert torch.equal(output, torch.cat([part.split(2)[rank] for part in parts]))
    # In place, with equal parts.
    dist.all_to_all_single(cube, cube)
    assert torch.equal(cube, output)


def in_place(seed: int) -> None:
    """Use one tensor as input and output, with different parts before and after."""
    for unit in (1, 100_000):
        check = Check(
            "int64", [[0, 2 * unit, unit], [unit, 0, 2 * unit], [2 * unit, unit, 0]], seed
        )
        for async_op in (False, True):
            tensor = check.given.clone()
            finish(dist.all_to_all_single(tensor, tensor, *check.splits, None, async_op), async_op)
            cases.check_bits(tensor, torch.cat(check.expected), f"in place, {check.what}")


def test_in_place(ranks: RankServer) -> None:
    ranks.run(3, in_place, fresh_seed())


def in_sub_groups(seed: int) -> None:
    for members in ([0, 2, 3], [1, 3], [2]):
        group, size = dist.new_group(members), len(members)
        if dist.get_rank() in members:
            counts = [[10 * source + target for target in range(size)] for source in range(size)]
            for check in (
                Check("float32", counts, seed, 1, group),
                Check("float32", equal(30_000, size), seed, 1, group),
            ):
                check.lists(async_op=True)
                check.single(async_op=False)


def futures(seed: int) -> None:
    check = Check("int64", equal(1000, dist.get_world_size()), seed)
    outputs: list[Tensor] = [cases.poisoned(part) for part in check.expected]
    work = dist.all_to_all(outputs, list(check.given.split(1000)), async_op=True)
    value = work.get_future().then(lambda future: torch.cat(future.value())).wait()
    assert torch.equal(value, torch.cat(check.expected))
    assert [id(tensor) for tensor in work.result()] == [id(tensor) for tensor in outputs]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("program", [every_dtype, uneven, layouts], ids=lambda f: f.__name__)
def test_all_to_all(ranks: RankServer, program: Callable[[int], None], world_size: int) -> None:
    ranks.run(world_size, program, fresh_seed())


def test_in_sub_groups(ranks: RankServer) -> None:
    ranks.run(4, in_sub_groups, fresh_seed())


def test_futures(ranks: RankServer) -> None:
    ranks.run(3, futures, fresh_seed())
