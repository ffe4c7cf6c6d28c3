"""all_gather on single tensors and of uneven parts; coalesced forms of several operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
WORLD_SIZES = (1, 2, 3, 4)
SIZES = (0, 1, 3, 1000, 4096, 4097, 65_537, 70_001)


def inputs_of(dtype: str, size: int, seed: int) -> list[Tensor]:
    return [cases.data(dtype, size, seed, peer, size) for peer in range(dist.get_world_size())]


def finish(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if async_op:
        work.wait()


def single(seed: int) -> None:
    rank = dist.get_rank()
    for number, dtype in enumerate(cases.DTYPES):
        for turn, size in enumerate(SIZES[number % 2 :: 2]):
            inputs, async_op = inputs_of(dtype, size, seed), bool(turn % 2)
            expected, own = torch.cat(inputs), inputs[rank].clone()
            what = f"all_gather_into_tensor of {dtype}[{size}]"
            output = cases.poisoned(expected)
            finish(dist.all_gather_into_tensor(output, own, async_op=async_op), async_op)
            cases.check_bits(output, expected, what)
            cases.check_bits(own, inputs[rank], f"input of {what}")
            output = cases.poisoned(expected)
            own = output[rank * size : (rank + 1) * size]
            own.copy_(inputs[rank])
            finish(dist.all_gather_into_tensor(output, own, async_op=async_op), async_op)
            cases.check_bits(output, expected, f"in place, {what}")


def single_layouts(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (6, 6000):
        inputs = inputs_of("float32", size, seed)
        expected = torch.cat(inputs)
        wide = torch.full((world_size * size, 2), float("nan"))
        dist.all_gather_into_tensor(wide[:, 0], inputs[rank].repeat(2, 1).t()[:, 0])
        cases.check_bits(wide[:, 0], expected, "strided")
        assert wide[:, 1].isnan().all()
        stacked = torch.zeros(world_size, size // 3, 3)
        dist.all_gather_into_tensor(stacked, inputs[rank].reshape(-1, 3))
        cases.check_bits(stacked.flatten(), expected, "stacked")
        transposed = torch.zeros(3, world_size * size // 3).t()
        dist.all_gather_into_tensor(transposed, inputs[rank].reshape(-1, 3))
        cases.check_bits(transposed.flatten(), expected, "transposed")
    scalars = torch.zeros(world_size)
    dist.all_gather_into_tensor(scalars, torch.tensor(float(rank)))
    assert scalars.tolist() == list(range(world_size))


def on_root(seed: int) -> None:
    """Check `dist.gather_single` of PyTorch 2.14, and the method that it calls."""
    rank, world_size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    options = dist.GatherOptions()
    for root in range(world_size):
        options.rootRank = root
        for turn, (dtype, size) in enumerate(zip(cases.DTYPES, SIZES * 2, strict=False)):
            inputs = inputs_of(dtype, size, seed)
            expected, options.asyncOp = torch.cat(inputs), bool(turn % 2)
            output = cases.poisoned(expected)
            given = output if rank == root else output.new_empty(0)
            group.gather_single(given, inputs[rank], options).wait()
            if rank == root:
                cases.check_bits(output, expected, f"gather_single of {dtype}[{size}]")
    stacked = torch.zeros(world_size, 2, 3)
    group.gather_single(stacked, torch.full((2, 3), float(rank))).wait()
    assert stacked[:, 1, 1].tolist() == (list(range(world_size)) if rank == 0 else [0] * world_size)
    if rank == 0:
        with pytest.raises(UsageError, match=r"gather_single: the output .* has 1 elements"):
            group.gather_single(torch.zeros(1), torch.zeros(2))
        with pytest.raises(UsageError, match="expected a contiguous tensor"):
            group.gather_single(torch.zeros(2, 2 * world_size)[:, ::2].t(), torch.zeros(2))
    if public := getattr(dist, "gather_single", None):
        public(
            torch.full((2, 3), -1.0), stacked if rank == world_size - 1 else None, world_size - 1
        )
        assert (stacked == -1).all() == (rank == world_size - 1)


def uneven(seed: int) -> None:
    """Gather parts of different sizes, which all ranks know."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, counts in enumerate(([3, 0, 5000, 1], [70_000, 1, 0, 300_000], [0, 0, 0, 2])):
        for dtype in ("int16", "bfloat16", "complex64", "bool"):
            inputs = [cases.data(dtype, counts[peer], seed, peer) for peer in range(world_size)]
            for async_op in (False, True):
                own = inputs[rank].clone()
                outputs = [cases.poisoned(part) for part in inputs]
                finish(dist.all_gather(outputs, own, async_op=async_op), async_op)
                for output, part in zip(outputs, inputs, strict=True):
                    cases.check_bits(output, part, f"uneven all_gather {number} of {dtype}")
                cases.check_bits(own, inputs[rank], "input of an uneven all_gather")
        outputs = [cases.poisoned(part) for part in inputs]
        outputs[rank].copy_(inputs[rank])
        dist.all_gather(outputs, outputs[rank])
        assert all(map(torch.equal, outputs, inputs))


def several(seed: int, dtype: str) -> list[list[Tensor]]:
    return [inputs_of(dtype, size, seed) for size in (3, 0, 5000, 70_001)]


def coalesced(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype in ("int32", "float16", "float64", "complex64"):
        groups = several(seed, dtype)
        for async_op in (False, True):
            tensors = [inputs[rank].clone() for inputs in groups]
            finish(dist.all_reduce_coalesced(tensors, async_op=async_op), async_op)
            for tensor, inputs in zip(tensors, groups, strict=True):
                cases.check_bits(tensor, cases.folded("SUM", inputs), f"coalesced {dtype}")
            lists = [[cases.poisoned(inputs[rank]) for inputs in groups] for _ in range(world_size)]
            tensors = [inputs[rank].clone() for inputs in groups]
            finish(dist.all_gather_coalesced(lists, tensors, async_op=async_op), async_op)
            for peer, outputs in enumerate(lists):
                for output, inputs in zip(outputs, groups, strict=True):
                    cases.check_bits(output, inputs[peer], f"all_gather_coalesced {dtype}")


def coalescing_manager(seed: int) -> None:
    """Record operations of one kind and run them as one, like FSDP."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for async_ops in (False, True):
        groups = several(seed, "float32")
        totals = [cases.folded("SUM", inputs) for inputs in groups]
        tensors = [inputs[rank].clone() for inputs in groups]
        mixed_operations([partial(dist.all_reduce, tensor) for tensor in tensors], async_ops)
        check_all(tensors, totals, "all_reduce")
        outputs = [cases.poisoned(torch.cat(inputs)) for inputs in groups]
        tensors = [inputs[rank].clone() for inputs in groups]
        pairs = list(zip(outputs, tensors, strict=True))
        mixed_operations([partial(dist.all_gather_into_tensor, *pair) for pair in pairs], async_ops)
        check_all(outputs, [torch.cat(inputs) for inputs in groups], "all_gather")
        wholes = [torch.cat([inputs[rank]] * world_size) for inputs in groups]
        outputs = [cases.poisoned(inputs[rank]) for inputs in groups]
        pairs = list(zip(outputs, wholes, strict=True))
        mixed_operations([partial(dist.reduce_scatter_tensor, *pair) for pair in pairs], async_ops)
        check_all(outputs, totals, "reduce_scatter")


def mixed_in_a_manager(seed: int) -> None:
    """Coalesce operations of any kind, including messages, with one wait, given a device."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = inputs_of("float32", 5000, seed)
    reduced, broadcast = inputs[rank].clone(), inputs[rank].clone()
    gathered = [cases.poisoned(part) for part in inputs]
    received = cases.poisoned(inputs[0])
    with dist._coalescing_manager(None, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(broadcast, world_size - 1, async_op=True)
        dist.all_gather(gathered, inputs[rank], async_op=True)
        dist.reduce(reduced, 0, async_op=True)
        if world_size > 1:
            dist.isend(inputs[rank], (rank + 1) % world_size)
            dist.irecv(received, (rank - 1) % world_size)
    manager.wait()
    cases.check_bits(broadcast, inputs[-1], "broadcast")
    check_all(gathered, inputs, "all_gather")
    total = cases.folded("SUM", inputs)
    cases.check_bits(reduced, total if rank == 0 else inputs[rank], "reduce")
    if world_size > 1:
        cases.check_bits(received, inputs[rank - 1], "message")


def mixed_operations(calls: list[Callable[[], object]], async_ops: bool) -> None:
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        for call in calls:
            call()
    if async_ops:
        manager.wait()


def check_all(results: list[Tensor], expected: list[Tensor], what: str) -> None:
    for result, each in zip(results, expected, strict=True):
        cases.check_bits(result, each, what)


def futures(seed: int) -> None:
    inputs = inputs_of("float32", 1000, seed)
    own, total = inputs[dist.get_rank()], cases.folded("SUM", inputs)
    future = dist.all_reduce_coalesced([own.clone(), 2 * own], async_op=True)
    value = future.then(lambda done: done.value()[1] - done.value()[0]).wait()
    torch.testing.assert_close(value, total)
    output = torch.zeros(len(inputs) * 1000)
    work = dist.all_gather_into_tensor(output, own, async_op=True)
    assert [id(tensor) for tensor in work.get_future().wait()] == [id(output)]
    assert torch.equal(output, torch.cat(inputs))


PROGRAMS = [
    on_root,
    single,
    single_layouts,
    uneven,
    coalesced,
    coalescing_manager,
    mixed_in_a_manager,
    futures,
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_forms(ranks: RankServer, program: Callable[[int], None], world_size: int) -> None:
    ranks.run(world_size, program, fresh_seed())
