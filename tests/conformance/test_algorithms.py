"""The all-reduces of `phalanx.parallel` on Phalanx and on Gloo, against numpy.

Rank 0 compares with the oracle: every bit of integers, and of sums in the documented order; all
floats must be near the float64 result. The test compares the ranks with each other.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from phalanx import parallel
from phalanx.errors import UsageError
from phalanx.parallel.algorithms import ALGORITHMS
from tests.conformance import cases
from tests.seeds import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tests.ranks import RankServer

WORLD_SIZES = (1, 2, 3, 4, 5)
# Fewer elements than ranks, as many, and more; some are not divisible by any number of ranks.
SIZES = (0, 1, 2, 3, 4, 5, 7, 1009, 70_001)
ODD = 37


# ---- the oracle: the documented order of each algorithm ----


def in_rank_order(op: str, values: Sequence[Any]) -> Any:
    return reduce(cases.FOLD[op], values)


def in_ring_order(op: str, values: Sequence[Any]) -> Any:
    count, size = len(values), values[0].size
    parts = []
    for part in range(count):
        piece = slice(part * size // count, (part + 1) * size // count)
        ranks = [(part + 1 + step) % count for step in range(count)]
        parts.append(in_rank_order(op, [values[rank][piece] for rank in ranks]))
    return np.concatenate(parts)


def in_tree_order(op: str, values: Sequence[Any]) -> Any:
    """Combine neighbours first: a binomial tree, balanced for a power of two."""
    while len(values) > 1:
        pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
        values = [in_rank_order(op, pair) for pair in pairs]
    return values[0]


def in_halving_order(op: str, values: Sequence[Any]) -> Any:
    core = 1 << (len(values).bit_length() - 1)
    guests = len(values) - core
    pairs = [cases.FOLD[op](values[rank], values[core + rank]) for rank in range(guests)]
    return in_tree_order(op, [*pairs, *values[guests:core]])


ORDERS = {
    "ring_all_reduce_simple": in_rank_order,
    "ring_all_reduce": in_ring_order,
    "halving_doubling_all_reduce": in_halving_order,
    "tree_all_reduce": in_tree_order,
}


def operators(dtype: str) -> tuple[str, ...]:
    return (*cases.operators(dtype), *(("PRODUCT",) if dtype in cases.COMPLEX else ()))


def check(name: str, result: Tensor, inputs: list[Tensor], op: str, what: str) -> None:
    if op == "SUM" and result.dtype is not torch.bfloat16:  # not in numpy
        expected = ORDERS[name](op, [tensor.numpy() for tensor in inputs])
        cases.check_bits(result, torch.from_numpy(expected), what)
    if result.is_floating_point() or result.is_complex():
        expected, tolerance = cases.exact(op, inputs)
        # A complex product is four products and two sums; AVG is rounded once more.
        cases.check_close(result, expected, 4 * tolerance, what)
    else:
        cases.check_bits(result, cases.folded(op, inputs), what)


# ---- functions that the ranks run ----


def groups() -> dict[str, dist.ProcessGroup]:
    world = dist.group.WORLD
    assert world is not None
    return {"phalanx": world, "gloo": dist.new_group(backend="gloo")}


def every_case(seed: int) -> list[str]:
    rank, count = dist.get_rank(), dist.get_world_size()
    plan = [("float32", size, "SUM") for size in SIZES]
    plan += [(dtype, ODD, op) for dtype in cases.DTYPES for op in operators(dtype)]
    results = []
    for backend, group in groups().items():
        for dtype, size, op in plan:
            inputs = [cases.data(dtype, size, seed, r, size) for r in range(count)]
            for name, function in ALGORITHMS.items():
                tensor = inputs[rank].clone()
                assert function(tensor, cases.reduce_op(op), group) is None
                what = f"{name} {op} of {dtype}[{size}], {count} ranks, {backend}"
                if rank == 0:
                    check(name, tensor, inputs, op, what)
                results.append(f"{what}: {cases.digest([tensor])}")
    return results


def sub_groups(seed: int) -> list[str]:
    """Reduce in two groups at the same time; the ranks of one are in descending order."""
    rank = dist.get_rank()
    inputs = [cases.data("float32", 1009, seed, r) for r in range(5)]
    results = []
    for backend in ("phalanx", "gloo"):
        members = [[3, 2, 0], [1, 4]]
        made = [dist.new_group(ranks, backend=backend, sort_ranks=False) for ranks in members]
        mine, other = made if rank in members[0] else made[::-1]
        ranks = dist.get_process_group_ranks(mine)
        for name, function in ALGORITHMS.items():
            tensor = inputs[rank].clone()
            function(tensor, group=mine)
            check(name, tensor, [inputs[r] for r in ranks], "SUM", f"{name}, ranks {ranks}")
            results.append(f"{name} {ranks}: {cases.digest([tensor])}")
            with pytest.raises(UsageError, match=f"^{name}: this rank is not a member"):
                function(tensor, group=other)
    return results


def layouts(seed: int) -> None:
    """Reduce views; the rest of their memory must not be written."""
    rank, count = dist.get_rank(), dist.get_world_size()
    shape = (4, 3, 6)
    whole = [cases.data("float64", shape, seed, r) for r in range(count)]
    complex_ones = [cases.data("complex64", shape, seed, r) for r in range(count)]
    views = {
        "transposed": lambda tensor: tensor.transpose(0, 2),
        "strided": lambda tensor: tensor[1:, ::2, 1:4],
        "a scalar": lambda tensor: tensor[2, 1, 3],
        "conjugated": lambda tensor: tensor.conj(),
        "an imaginary part": lambda tensor: tensor.conj().imag,
    }
    for name, function in ALGORITHMS.items():
        for what, view in views.items():
            inputs = complex_ones if "conj" in view.__code__.co_names else whole
            tensor = inputs[rank].clone()
            assert function(view(tensor)) is None
            values = [view(each).resolve_conj().resolve_neg().contiguous() for each in inputs]
            flat = [each.view(-1).numpy() for each in values]
            expected = inputs[rank].clone()
            view(expected).copy_(torch.from_numpy(ORDERS[name]("SUM", flat)).view(values[0].shape))
            cases.check_bits(tensor, expected, f"{name}, {what}")


def other_tensors(seed: int) -> None:
    """Reduce parameters, inference-mode and shared tensors, and NaN, with a message in progress."""
    import phalanx

    rank, count = dist.get_rank(), dist.get_world_size()
    total = count * (count + 1) / 2
    following, previous = (rank + 1) % count, (rank - 1) % count
    for name, function in ALGORITHMS.items():
        parameter = torch.nn.Parameter(torch.full((5,), rank + 1.0))
        function(parameter, tag=3)
        assert parameter.tolist() == [total] * 5, name
        assert parameter.is_leaf, name
        with torch.inference_mode():
            made = torch.full((5,), rank + 1.0)
        function(made, dist.ReduceOp.AVG)
        assert made.tolist() == [total / count] * 5, name
        shared = phalanx.empty_shared(5).fill_(rank + 1.0)
        function(shared, dist.ReduceOp.MAX)
        assert shared.tolist() == [count] * 5, name
        with_nan = torch.tensor([1.0, float("nan") if rank == 1 else 2.0])
        function(with_nan, dist.ReduceOp.MIN)
        assert with_nan.isnan().tolist() == [False, True], name
        own, arriving = torch.full((5,), 100.0 + rank), torch.zeros(5)
        sent = dist.isend(own, following, tag=7)
        function(parameter, tag=8)
        dist.recv(arriving, previous, tag=7)
        assert sent is not None
        sent.wait()
        assert arriving.tolist() == [100.0 + previous] * 5, name
        assert parameter.tolist() == [total * count] * 5, name


def check_rejected(name: str, message: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        ALGORITHMS[name](*arguments, **options)
    assert str(error.value).startswith(f"{name}: ")


def wrong_arguments() -> None:
    """Make wrong calls on rank 0 only: if it sent anything, the later all-reduces would differ."""
    operator = dist.ReduceOp
    for name, function in ALGORITHMS.items():
        if dist.get_rank() == 0:
            ones = torch.ones(3)
            check_rejected(name, "list given, expected a torch.Tensor", [1.0])
            check_rejected(name, "a tensor of layout torch.sparse_coo given", ones.to_sparse())
            check_rejected(name, "share memory (expand()?)", torch.ones(1).expand(3))
            check_rejected(name, "float8_e4m3fn is not supported", ones.to(torch.float8_e4m3fn))
            check_rejected(name, "BXOR has no meaning for float32 here", ones, operator.BXOR)
            check_rejected(name, "expected one of: SUM, PRODUCT, AVG", ones.cfloat(), operator.MIN)
            check_rejected(name, "AVG has no meaning for int64", ones.long(), operator.AVG)
            premultiplied = dist._make_nccl_premul_sum(2.0)
            check_rejected(name, "PREMUL_SUM has no meaning", ones, premultiplied)
            check_rejected(name, "a group is given as group=...", ones, dist.group.WORLD)
            check_rejected(
                name, "op 'sum' given, expected a torch.distributed.ReduceOp", ones, "sum"
            )
            check_rejected(name, "tag -1 given, expected 0 to 2147483647", ones, tag=-1)
            check_rejected(name, "tag '1' given", ones, tag="1")
        tensor = torch.ones(3)
        function(tensor)
        assert tensor.tolist() == [dist.get_world_size()] * 3, name


# ---- the tests ----


def test_every_algorithm_is_public_and_has_an_oracle() -> None:
    assert set(ALGORITHMS) == set(ORDERS)
    assert {name for name in parallel.__all__ if name in ALGORITHMS} == set(ALGORITHMS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_dtype_operator_and_size(ranks: RankServer, world_size: int) -> None:
    results = ranks.run(world_size, every_case, fresh_seed(), limit=100.0)
    assert len(results[0]) > 400
    for others in results[1:]:
        assert [pair for pair in zip(results[0], others, strict=True) if pair[0] != pair[1]] == []


def test_sub_groups(ranks: RankServer) -> None:
    results = ranks.run(5, sub_groups, fresh_seed())
    assert results[0] == results[2] == results[3]
    assert results[1] == results[4]
    assert len(results[0]) == 2 * len(ALGORITHMS)


def test_views(ranks: RankServer) -> None:
    ranks.run(3, layouts, fresh_seed())


def test_parameters_inference_mode_nan_and_tags(ranks: RankServer) -> None:
    ranks.run(3, other_tensors, fresh_seed())


def test_a_wrong_argument_stays_on_its_rank(ranks: RankServer) -> None:
    ranks.run(2, wrong_arguments)


def test_without_a_group() -> None:
    for name, function in ALGORITHMS.items():
        with pytest.raises(UsageError, match=f"^{name}: no process group: call phalanx.init"):
            function(torch.ones(1))
