"""`SharedDataParallel` if a linear layer's gradient is not just the product of one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

from phalanx.parallel import SharedDataParallel
from tests.ranks import RankServer
from tests.synchronous_sgd import BUCKET, average, preloaded, same, seed, seeded

__all__ = ["preloaded", "seed"]


class Tied(nn.Module):
    """A matrix that is an embedding and the weight of a linear layer, with a hook on another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 19)
        self.middle = nn.Linear(19, 19)
        self.head = nn.Linear(19, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(words)).tanh())


def compare_backward_modes(seed: int) -> None:
    """Compare backward passes in which a weight's gradient is not just the product of one call."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = Tied()
    model = SharedDataParallel(copy.deepcopy(replica))
    words = torch.randint(23, (5, 7), generator=seeded(seed + dist.get_rank()))

    def penalized(module: nn.Module) -> Tensor:
        return module(words).square().mean() + sum(p.abs().sum() for p in module.parameters())

    one = torch.autograd.grad(penalized(model), list(model.parameters()))
    other = torch.autograd.grad(penalized(replica), list(replica.parameters()))
    assert all(map(same, one, other))
    assert all(parameter.grad is None for parameter in model.parameters())

    first = torch.autograd.grad(penalized(model), list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()
    first = torch.autograd.grad(penalized(replica), list(replica.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in first).backward()
    average(replica)
    assert_close_gradients(model, replica)

    for module in (model, replica):
        module.zero_grad()
    seen: list[Tensor] = []
    for middle in (model.module.middle, replica.middle):
        middle.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    penalized(model).backward()
    penalized(replica).backward()
    average(replica)
    assert same(*seen)
    assert_close_gradients(model, replica)

    with torch.inference_mode():
        assert torch.equal(model(words), replica(words))
    compare_assigned_and_checkpointed(seed)
    scaled = torch.func.jacrev(lambda scale: model(words) * scale)(torch.tensor(2.0))
    torch.testing.assert_close(scaled, replica(words))


class Checkpointed(nn.Module):
    """Layers with complex numbers, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40, dtype=torch.complex64)
        self.real = nn.Linear(40, 40)

    def forward(self, inputs: Tensor) -> Tensor:
        def run(inputs: Tensor) -> Tensor:
            return self.real(self.layer(inputs.to(torch.complex64)).abs()).tanh()

        return torch.utils.checkpoint.checkpoint(run, inputs, use_reentrant=False)


def compare_assigned_and_checkpointed(seed: int) -> None:
    """Cover complex products, checkpoints, post-accumulation hooks and assigned data."""
    torch.manual_seed(seed)
    replica = Checkpointed()
    model = SharedDataParallel(copy.deepcopy(replica), bucket_bytes=BUCKET)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(replica.parameters(), lr=0.1)
    seen: list[bool] = []
    for step in range(3):
        inputs = torch.randn(3, 40, generator=seeded(seed + 7 * step + dist.get_rank()))
        for module, one in ((model, optimizer), (replica, plain)):
            one.zero_grad()
            module(inputs).square().mean().backward()
        average(replica)
        assert_close_gradients(model, replica)
        if step == 1:  # the user assigns gradients
            for module in (model, replica):
                for parameter in module.parameters():
                    parameter.grad = parameter.grad * 3
            norm = model.clip_grad_norm_(0.01)
            expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.01)
            torch.testing.assert_close(norm.float(), expected, rtol=1e-4, atol=0.0)
            assert_close_gradients(model, replica)
        optimizer.step()
        plain.step()
        if step == 0:  # as if the user swapped in averaged weights
            with torch.no_grad():
                for module in (model.module, replica):
                    module.real.weight.data = module.real.weight.data * 0.5
            model.module.real.weight.register_post_accumulate_grad_hook(
                lambda parameter: seen.append(parameter.grad is not None)
            )
        for (name, one), other in zip(
            model.module.named_parameters(), replica.parameters(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    assert seen == [True, True]
    stale = SharedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = stale.optimizer(torch.optim.SGD, lr=0.1)
    loss = stale(torch.ones(1, 3)).mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def train_in_subgroup_and_world() -> None:
    """Train a model on some ranks, then one on all ranks; the group names must match."""
    some = dist.new_group([1, 2])
    if dist.get_rank():
        part = SharedDataParallel(nn.Linear(3, 2), some)
        part(torch.ones(1, 3)).sum().backward()
    model = SharedDataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(2, 3))


def train_in_overlapping_groups(seed: int) -> None:
    """Train one model in each of several groups; ranks are in different numbers of groups."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    group_ranks = [[0, 1], [1, 2, 3], [0, 3], [1, 2, 3], [3, 2], [0, 1, 2, 3]]
    models: list[tuple[SharedDataParallel, Any, nn.Module, Any]] = []
    for number, ranks in enumerate(group_ranks):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        torch.manual_seed(seed + number)
        replica = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 9))
        model = SharedDataParallel(copy.deepcopy(replica), group)
        optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
        models.append((model, optimizer, replica, group))
    for step in range(2):
        for number, (model, optimizer, replica, group) in enumerate(models):
            inputs = torch.randn(3, 7, generator=seeded(seed + 10 * step + number + 100 * rank))
            plain = torch.optim.Adam(replica.parameters(), lr=0.01)
            optimizer.load_state_dict(plain.state_dict())
            for module in (model, replica):
                module.zero_grad()
                module(inputs).square().mean().backward()
            for parameter in replica.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)
            optimizer.step()
            plain.step()
            for one, other in zip(model.parameters(), replica.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["a", "aabb"])
def test_overlapping_groups(ranks: RankServer, hosts: str, seed: int) -> None:
    ranks.run(4, train_in_overlapping_groups, seed, hosts=hosts)


def test_subgroup_and_then_world(ranks: RankServer) -> None:
    ranks.run(3, train_in_subgroup_and_world)


def assert_close_gradients(model: SharedDataParallel, replica: nn.Module) -> None:
    """Compare gradients approximately, as the order of a sum of several products may differ."""
    for one, other in zip(model.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_backward_modes_of_linear_layers(ranks: RankServer, seed: int) -> None:
    ranks.run(2, compare_backward_modes, seed)


def forward_mode() -> None:
    """Tangents pass through the wrapper as through the module."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    wrapped = SharedDataParallel(copy.deepcopy(layers))
    layers.load_state_dict(wrapped.module.state_dict())
    inputs, directions = torch.randn(4, 5), torch.randn(4, 5)
    tangents = []
    for module in (wrapped, layers):
        with forward_ad.dual_level():
            outputs = module(forward_ad.make_dual(inputs, directions))
            tangents.append(forward_ad.unpack_dual(outputs).tangent)
    assert torch.equal(tangents[0], tangents[1])


def test_forward_mode(ranks: RankServer) -> None:
    ranks.run(2, forward_mode)
