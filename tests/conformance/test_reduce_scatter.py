"""reduce_scatter of lists and of single tensors: every dtype and operator, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

WORLD_SIZES = (1, 2, 3, 4)
# Elements of a part: 16 KiB in all, 16 KiB and 256 KiB of one part, and one element more.
SIZES = (0, 1, 3, 1000, 1024, 4096, 4097, 32_768, 65_537)


class Check:
    """The inputs of all ranks, and the expected outputs."""

    def __init__(self, dtype: str, counts: list[int], op: str, seed: int, group: object = None):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.counts, self.op, self.group = counts, cases.reduce_op(op), group
        self.inputs = [cases.data(dtype, sum(counts), seed, peer) for peer in range(self.size)]
        own_parts = [tensor.split(counts)[self.rank] for tensor in self.inputs]
        self.expected = cases.folded(op, own_parts)
        self.what = f"{op} of {dtype}{counts} on rank {self.rank} of {self.size}"

    def parts(self) -> list[Tensor]:
        return [part.clone() for part in self.inputs[self.rank].split(self.counts)]

    def of_list(self, async_op: bool) -> None:
        output, parts = cases.poisoned(self.expected), self.parts()
        self.finish(dist.reduce_scatter(output, parts, self.op, self.group, async_op), async_op)
        cases.check_bits(output, self.expected, f"reduce_scatter {self.what}")
        for part, before in zip(parts, self.parts(), strict=True):
            cases.check_bits(part, before, f"input of reduce_scatter {self.what}")

    def of_single(self, async_op: bool) -> None:
        output, whole = cases.poisoned(self.expected), self.inputs[self.rank].clone()
        work = dist.reduce_scatter_tensor(output, whole, self.op, self.group, async_op)
        self.finish(work, async_op)
        cases.check_bits(output, self.expected, f"reduce_scatter_tensor {self.what}")
        cases.check_bits(whole, self.inputs[self.rank], f"input, {self.what}")

    def in_place(self) -> None:
        """Use this rank's part of the input as output."""
        whole = self.inputs[self.rank].clone()
        parts = list(whole.split(self.counts))
        dist.reduce_scatter_tensor(parts[self.rank], whole, self.op, self.group)
        cases.check_bits(parts[self.rank], self.expected, f"in place, {self.what}")
        for peer, (part, before) in enumerate(zip(parts, self.parts(), strict=True)):
            if peer != self.rank:
                cases.check_bits(part, before, f"input in place, {self.what}")

    def in_place_of_list(self) -> None:
        parts = self.parts()
        dist.reduce_scatter(parts[self.rank], parts, self.op, self.group)
        cases.check_bits(parts[self.rank], self.expected, f"list in place, {self.what}")

    @staticmethod
    def finish(work: dist.Work | None, async_op: bool) -> None:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()


def every_dtype_and_operator(seed: int) -> None:
    world_size = dist.get_world_size()
    for dtype in cases.DTYPES:
        for number, (op, size) in enumerate(pairs(cases.operators(dtype))):
            check = Check(dtype, [size] * world_size, op, seed + number)
            check.of_list(async_op=bool(number % 2))
            check.of_single(async_op=not number % 2)


def pairs(ops: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Pair each operator with a few sizes, and each size with an operator."""
    for number, size in enumerate(SIZES):
        yield ops[number % len(ops)], size
    for op in ops:
        yield op, 5


def forms(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (1, 1000, 70_001):
        check = Check("float32", [size] * world_size, "SUM", seed)
        check.in_place()
        check.in_place_of_list()
    # Parts of any size, even zero, as long as all ranks agree.
    for counts in ([7, 0, 5000, 1][:world_size], [70_000, 3, 0, 9][:world_size]):
        for dtype, op in (("int16", "SUM"), ("bfloat16", "AVG"), ("complex64", "SUM")):
            Check(dtype, counts, op, seed).of_list(async_op=False)
            Check(dtype, counts, op, seed).of_list(async_op=True)
            Check(dtype, counts, op, seed).in_place_of_list()
    # Only the element counts must match the inputs, not the shapes.
    output, matrix = torch.zeros(6, 5), torch.full((world_size * 10, 3), rank + 1.0)
    dist.reduce_scatter_tensor(output, matrix)
    assert (output == sum(range(1, world_size + 1))).all()
    # One tensor per rank, stacked.
    stacked = torch.full((world_size, 4), 2.0)
    dist.reduce_scatter_tensor(output[0, :4], stacked, dist.ReduceOp.PRODUCT)
    assert output[0].tolist() == [2.0**world_size] * 4 + [sum(range(1, world_size + 1))]


def views(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (10, 5000):
        check = Check("float64", [size] * world_size, "SUM", seed)
        sparse = torch.full((size, 3), float("nan"), dtype=torch.float64)
        transposed = check.inputs[rank].reshape(-1, 2).t().contiguous().t()
        assert not transposed.is_contiguous()
        dist.reduce_scatter_tensor(sparse[:, 1], transposed)
        cases.check_bits(sparse[:, 1], check.expected, "single, into a column")
        assert sparse[:, ::2].isnan().all()
        columns = torch.stack(check.parts(), 1)
        dist.reduce_scatter(sparse[:, 0], list(columns.unbind(1)))
        cases.check_bits(sparse[:, 0], check.expected, "list of columns, into a column")
        assert sparse[:, 2].isnan().all()


def premultiplied(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    op = dist._make_nccl_premul_sum(2.0 ** (rank - 1))
    for dtype in (*cases.FLOATS, "complex64"):
        check = Check(dtype, [1001] * world_size, "SUM", seed)
        scaled = [t.split(1001)[rank] * 2.0 ** (n - 1) for n, t in enumerate(check.inputs)]
        check.op, check.expected = op, cases.folded("SUM", scaled)
        check.of_list(async_op=False)
        check.of_single(async_op=True)


def in_sub_groups(seed: int) -> None:
    for members in ([0, 2, 3], [1, 3], [2]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            for size in (1, 5000, 70_000):
                check = Check("int64", [size] * len(members), "SUM", seed, group)
                check.of_list(async_op=False)
                check.of_single(async_op=True)


def futures(seed: int) -> None:
    world_size = dist.get_world_size()
    check = Check("float32", [1000] * world_size, "SUM", seed)
    for call, given in (
        (dist.reduce_scatter, check.parts()),
        (dist.reduce_scatter_tensor, check.inputs[check.rank].clone()),
    ):
        output = cases.poisoned(check.expected)
        work = call(output, given, async_op=True)
        value = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        assert torch.equal(value, 2 * check.expected)
        assert [id(tensor) for tensor in work.result()] == [id(output)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "program", [every_dtype_and_operator, forms, views, premultiplied], ids=lambda f: f.__name__
)
def test_reduce_scatter(ranks: RankServer, program: Callable[[int], None], world_size: int) -> None:
    ranks.run(world_size, program, fresh_seed())


def test_in_sub_groups(ranks: RankServer) -> None:
    ranks.run(4, in_sub_groups, fresh_seed())


def test_futures(ranks: RankServer) -> None:
    ranks.run(3, futures, fresh_seed())
