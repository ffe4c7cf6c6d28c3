"""Tensors that are not one contiguous block: strided, expanded, 0-d, autograd or inference mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

View = Callable[[Tensor], Tensor]

# Each takes a part or a permutation of a base of 4 x 6 x 8 x 10.
VIEWS: dict[str, View] = {
    "transposed": lambda base: base.transpose(0, 3),
    "strided": lambda base: base[:, ::2, :, 1::3],
    "column": lambda base: base[:, 0, 0, 0],
    "channels_last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "narrowed": lambda base: base.narrow(1, 2, 3),
    "one element": lambda base: base[1, 2, 3, 4],
    "no element": lambda base: base[:, :0],
    "offset": lambda base: base.reshape(-1)[1:],
}


def fill(tensor: Tensor, seed: int, rank: int) -> Tensor:
    """Fill a view with a rank's data, and return the data."""
    values = cases.data("float32", list(tensor.shape), seed, rank)
    tensor.copy_(values)
    return values


def every_view(name: str, seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    make = VIEWS[name]

    def poisoned_view() -> tuple[Tensor, Tensor]:
        base = torch.full((4, 6, 8, 10), float("nan"))
        view = make(base)
        return base if view.data_ptr() != 0 else view, view

    shape = list(poisoned_view()[1].shape)
    inputs = [cases.data("float32", shape, seed, peer) for peer in range(world_size)]
    total = cases.folded("SUM", inputs)
    for async_op in (False, True):

        def finish(work: dist.Work | None, async_op: bool = async_op) -> None:
            if async_op:
                assert work is not None
                work.wait()

        base, view = poisoned_view()
        fill(view, seed, rank)
        shares_base = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        untouched = int(base.isnan().sum()) if shares_base else 0
        finish(dist.all_reduce(view, async_op=async_op))
        assert torch.equal(view, total), "all_reduce"
        if shares_base:
            assert int(base.isnan().sum()) == untouched, "elements beside the view were written"
        _, view = poisoned_view()
        fill(view, seed, rank)
        finish(dist.broadcast(view, world_size - 1, async_op=async_op))
        assert torch.equal(view, inputs[world_size - 1]), "broadcast"
        _, view = poisoned_view()
        fill(view, seed, rank)
        finish(dist.reduce(view, 0, async_op=async_op))
        assert torch.equal(view, total if rank == 0 else inputs[rank]), "reduce"
        _, view = poisoned_view()
        fill(view, seed, rank)
        outputs = [poisoned_view()[1] for _ in range(world_size)]
        finish(dist.all_gather(outputs, view, async_op=async_op))
        assert all(map(torch.equal, outputs, inputs)), "all_gather"
        assert torch.equal(view, inputs[rank]), "all_gather wrote to its input"
        outputs = [poisoned_view()[1] for _ in range(world_size)]
        finish(dist.gather(view, outputs if rank == 0 else None, 0, async_op=async_op))
        assert rank != 0 or all(map(torch.equal, outputs, inputs)), "gather"
        _, output = poisoned_view()
        parts = outputs if rank == 0 else None
        finish(dist.scatter(output, parts, 0, async_op=async_op))
        assert torch.equal(output, inputs[rank]), "scatter"


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("world_size", (1, 3))
def test_views(ranks: RankServer, name: str, world_size: int) -> None:
    ranks.run(world_size, every_view, name, fresh_seed())


def conjugated_and_negative(seed: int) -> None:
    """Reduce tensors in contiguous memory that torch computes only on reads."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = [cases.data("complex64", 10, seed, peer) for peer in range(world_size)]
    # Through the group's methods: the functions of torch.distributed reject conjugated tensors.
    group = dist.group.WORLD
    lazy, plain = inputs[0].clone().conj(), torch.zeros(10, dtype=torch.complex64)
    assert lazy.is_conj()
    assert lazy.is_contiguous()
    if rank == 0:
        group.send([lazy], 1, 0).wait()
        group.send([inputs[0]], 1, 0).wait()
    else:
        group.recv([plain], 0, 0).wait()
        assert torch.equal(plain, inputs[0].conj())
        group.recv([lazy], 0, 0).wait()
        assert torch.equal(lazy, inputs[0])
    for async_op in (False, True):
        negative = torch._neg_view(inputs[rank].real.contiguous())
        assert negative.is_neg()
        assert negative.is_contiguous()
        outputs = [torch.zeros(10) for _ in inputs]
        work = dist.all_gather(outputs, negative, async_op=async_op)
        if work is not None:
            work.wait()
        assert all(torch.equal(outputs[peer], -inputs[peer].real) for peer in range(world_size))
        dist.all_reduce(negative)
        assert torch.equal(negative, -sum(tensor.real for tensor in inputs))


def test_lazily_conjugated_and_negated(ranks: RankServer) -> None:
    ranks.run(2, conjugated_and_negative, fresh_seed())


def overlapping_outputs() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expanded = torch.zeros(1).expand(5)
    plain = torch.zeros(5)

    def rejected(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError, match=r"share memory.*clone"):
            call()

    rejected(lambda: dist.all_reduce(expanded))
    rejected(lambda: dist.all_gather([expanded] * world_size, plain))
    if rank != 0:
        rejected(lambda: dist.broadcast(expanded, 0))
        rejected(lambda: dist.recv(expanded, 0))
    # It is allowed as an input.
    source = torch.tensor([float(rank)]).expand(5)
    outputs = [torch.zeros(5) for _ in range(world_size)]
    dist.all_gather(outputs, source)
    assert [output.tolist() for output in outputs] == [[float(i)] * 5 for i in range(world_size)]
    dist.broadcast(torch.ones(1).expand(5) if rank == 0 else plain, 0)
    assert plain.tolist() == [0.0 if rank == 0 else 1.0] * 5


def test_expanded_outputs_are_rejected(ranks: RankServer) -> None:
    ranks.run(2, overlapping_outputs)


def autograd_and_inference() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, world_size + 1)))
    for shape in ((3, 4), (4, 3)):
        leaf = torch.full(shape, rank + 1.0, requires_grad=True)
        dist.all_reduce(leaf)
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert leaf.tolist() == torch.full(shape, total).tolist()
    # A parameter in another memory order is copied.
    parameter = torch.nn.Parameter(
        torch.full((2, 3, 4, 5), rank + 1.0).to(memory_format=torch.channels_last)
    )
    dist.all_reduce(parameter)
    assert (parameter.detach() == total).all()
    dist.broadcast(parameter, 0)
    for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5)):
        leaf = torch.full((3,), 1.0, requires_grad=True)
        dist.all_reduce(leaf, op)
        expected = 1.0 if op == dist.ReduceOp.AVG else 0.5 * world_size
        assert leaf.tolist() == [expected] * 3
    with torch.inference_mode():
        inside = torch.full((3, 4), rank + 1.0)
        dist.all_reduce(inside)
        dist.all_reduce(inside.t())
    assert (inside == total * world_size).all()
    dist.all_reduce(inside)
    dist.all_reduce(inside.t())
    dist.all_reduce(inside.t(), async_op=True).wait()
    assert (inside == total * world_size**4).all()


@pytest.mark.parametrize("world_size", (1, 2))
def test_autograd_and_inference_mode(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, autograd_and_inference)


def tensor_subclasses_and_scalars() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(rank + 1)
    dist.all_reduce(scalar)
    assert scalar.shape == ()
    assert scalar.item() == sum(range(1, world_size + 1))
    outputs = [torch.tensor(0) for _ in range(world_size)]
    dist.all_gather(outputs, torch.tensor(rank))
    assert [output.item() for output in outputs] == list(range(world_size))
    shapes = torch.arange(6.0).reshape(1, 2, 1, 3, 1)
    dist.all_reduce(shapes)
    assert shapes.shape == (1, 2, 1, 3, 1)
    assert torch.equal(shapes.flatten(), world_size * torch.arange(6.0))


def test_shapes(ranks: RankServer) -> None:
    ranks.run(3, tensor_subclasses_and_scalars)
