"""all_reduce and reduce: every dtype, operator, size, root and world size, against numpy.

Integers and sums of floats must be right to the last bit, in rank order; all floats must also be
near the float64 result.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

WORLD_SIZES = (1, 2, 3, 4)


def inputs_of(dtype: str, size: int, seed: int, world_size: int) -> list[Tensor]:
    return [cases.data(dtype, size, seed, rank, size) for rank in range(world_size)]


def check(result: Tensor, inputs: list[Tensor], op: str, what: str) -> None:
    cases.check_bits(result, cases.folded(op, inputs), what)
    if result.is_floating_point() or result.is_complex():
        cases.check_close(result, *cases.exact(op, inputs), what)


def all_reduce_all(dtype: str, seed: int) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for size in (*cases.SIZES, cases.LARGE):
        own = cases.data(dtype, size, seed, rank, size)
        # One rank compares with the oracle; the test compares the ranks with each other.
        inputs = inputs_of(dtype, size, seed, world_size) if rank == 0 else []
        for op in cases.operators(dtype) if size < cases.LARGE else ("SUM",):
            what = f"all_reduce {op} of {dtype}[{size}], {world_size} ranks"
            tensor = own.clone()
            assert dist.all_reduce(tensor, cases.reduce_op(op)) is None
            if rank == 0:
                check(tensor, inputs, op, what)
            again = own.clone()
            work = dist.all_reduce(again, cases.reduce_op(op), async_op=True)
            assert work is not None
            work.wait()
            cases.check_bits(again, tensor, f"{what}, asynchronous")
            results.append(tensor)
    return cases.digest(results)


def reduce_all(dtype: str, seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, size in enumerate(cases.SIZES):
        root = number % world_size
        own = cases.data(dtype, size, seed, rank, size)
        inputs = inputs_of(dtype, size, seed, world_size) if rank == root else []
        for op in cases.operators(dtype):
            tensor = own.clone()
            work = dist.reduce(tensor, root, cases.reduce_op(op), async_op=bool(number % 2))
            if work is not None:
                work.wait()
            what = f"reduce {op} of {dtype}[{size}] to {root}, {world_size} ranks"
            if rank == root:
                check(tensor, inputs, op, what)
            else:
                cases.check_bits(tensor, own, f"{what}: the input of rank {rank}")


def reduce_to_each_root(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (5, 70_000):
        inputs = inputs_of("float32", size, seed, world_size)
        for root in range(world_size):
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root)
            expected = cases.folded("SUM", inputs) if rank == root else inputs[rank]
            cases.check_bits(tensor, expected, f"reduce to {root} on rank {rank}")


@pytest.mark.sampled(20)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_all_reduce(ranks: RankServer, dtype: str, world_size: int) -> None:
    digests = ranks.run(world_size, all_reduce_all, dtype, fresh_seed())
    assert len(set(digests)) == 1, "ranks got different bits"


@pytest.mark.sampled(20)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_reduce(ranks: RankServer, dtype: str, world_size: int) -> None:
    ranks.run(world_size, reduce_all, dtype, fresh_seed())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_to_each_root(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, reduce_to_each_root, fresh_seed())


def test_the_oracle_covers_what_the_core_supports() -> None:
    """The operators tested here are exactly those that the core supports."""
    for dtype in cases.DTYPES:
        known = set(cases.operators(dtype))
        if dtype in cases.COMPLEX:
            known.add("PRODUCT")  # reaches the group only through its method, see below
        core = {op for op in cases.FOLD if cases.supported_by_core(dtype, op)}
        assert core == known, dtype


def complex_product(dtype: str, seed: int) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.PRODUCT
    results = []
    for size in (1, 1000, 70_000):
        inputs = inputs_of(dtype, size, seed, world_size)
        tensor = inputs[rank].clone()
        dist.group.WORLD.allreduce([tensor], options).wait()
        result, tolerance = cases.exact("PRODUCT", inputs)
        cases.check_close(tensor, result, 2 * tolerance, f"product of {dtype}[{size}]")
        results.append(tensor)
    return cases.digest(results)


@pytest.mark.parametrize("dtype", cases.COMPLEX)
def test_complex_product_by_the_groups_method(ranks: RankServer, dtype: str) -> None:
    digests = ranks.run(3, complex_product, dtype, fresh_seed())
    assert len(set(digests)) == 1


def premultiplied(dtype: str, seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kinds = [lambda factor: factor]
    if dtype != "bfloat16":  # not in numpy, which creates the factor
        kinds.append(lambda factor: torch.tensor([factor], dtype=cases.DTYPES[dtype]))
    for size in (1, 1000, 70_000):
        inputs = inputs_of(dtype, size, seed, world_size)
        # Powers of two: the products are exact, so the sum must be exact too.
        scaled = [tensor * 2.0 ** (number - 1) for number, tensor in enumerate(inputs)]
        for kind in kinds:
            op = dist._make_nccl_premul_sum(kind(2.0 ** (rank - 1)))
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, op)
            what = f"PREMUL_SUM of {dtype}[{size}]"
            cases.check_bits(tensor, cases.folded("SUM", scaled), what)
            tensor = inputs[rank].clone()
            dist.reduce(tensor, 0, op)
            expected = cases.folded("SUM", scaled) if rank == 0 else inputs[rank]
            cases.check_bits(tensor, expected, f"{what}, reduce")


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_premul_sum(ranks: RankServer, dtype: str, world_size: int) -> None:
    ranks.run(world_size, premultiplied, dtype, fresh_seed())


def special_values() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The sum of each host is rounded, so that of the largest float16 values may be infinite.
    large = 2.0 if cases.has_several_hosts() else 65504.0
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0, large])
    columns = torch.cartesian_prod(*[special] * world_size).reshape(-1, world_size)
    for dtype in cases.FLOATS:
        values = columns.to(cases.DTYPES[dtype]).double()
        for op, fold in (("MIN", torch.minimum), ("MAX", torch.maximum), ("SUM", torch.add)):
            tensor = values[:, rank].clone().to(cases.DTYPES[dtype])
            dist.all_reduce(tensor, cases.reduce_op(op))
            expected = values[:, 0]
            for peer in range(1, world_size):
                expected = fold(expected, values[:, peer])
            expected = expected.to(cases.DTYPES[dtype])
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world_size", (2, 3))
def test_nan_and_infinity(ranks: RankServer, world_size: int) -> None:
    """NaN wins over every number in MIN and MAX, as in `torch.minimum`; on every rank."""
    ranks.run(world_size, special_values)


def random_sizes(seed: int) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = np.random.default_rng(seed).integers(1, 400_000, 25).tolist()
    results = []
    for size in sizes:
        tensor = cases.data("float32", size, seed, rank, size)
        dist.all_reduce(tensor)
        if rank == size % world_size:
            inputs = inputs_of("float32", size, seed, world_size)
            check(tensor, inputs, "SUM", f"all_reduce of {size} float32")
        results.append(tensor)
    return cases.digest(results)


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_random_sizes(ranks: RankServer, world_size: int) -> None:
    assert len(set(ranks.run(world_size, random_sizes, fresh_seed()))) == 1


def averages_of_integers(dtype: str, seed: int) -> None:
    """Average integers in every form; results are rounded towards zero, as on NCCL."""
    rank, size = dist.get_rank(), dist.get_world_size()
    average = dist.ReduceOp.AVG
    generator = np.random.default_rng(seed)
    low = 0 if dtype == "uint8" else -20
    everyone = generator.integers(low, 30, (size, size * 1001))
    expected = np.fix(everyone.sum(0) / size).astype(dtype)
    part = expected.reshape(size, -1)[rank]

    def mine() -> Tensor:
        return torch.from_numpy(everyone[rank].astype(dtype))

    strided = torch.zeros(size * 1001, 2, dtype=getattr(torch, dtype))[:, 0]
    for tensor in (mine(), strided.copy_(mine())):
        work = dist.all_reduce(tensor, average, async_op=tensor is strided)
        if work is not None:
            work.wait()
        assert np.array_equal(tensor.numpy(), expected)
    tensor = mine()
    dist.reduce(tensor, size - 1, average)
    wanted = expected if rank == size - 1 else everyone[rank].astype(dtype)
    assert np.array_equal(tensor.numpy(), wanted)
    results = [torch.full((1001,), 7, dtype=strided.dtype) for _ in range(2)]
    dist.reduce_scatter(results[0], [*mine().split(1001)], average)
    dist.reduce_scatter_tensor(results[1], mine(), average)
    for result in results:
        assert np.array_equal(result.numpy(), part)
    tensors = [mine(), mine()]
    dist.all_reduce_coalesced(tensors, average)
    for tensor in tensors:
        assert np.array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("world_size", (1, 3))
def test_averages_of_integers(ranks: RankServer, world_size: int) -> None:
    seed = fresh_seed()
    for dtype in ("uint8", "int8", "int16", "int32", "int64"):
        ranks.run(world_size, averages_of_integers, dtype, seed)
