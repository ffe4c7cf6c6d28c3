"""`SharedDataParallel` in typical uses of DDP, compared with a plain replica."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from phalanx.parallel import SharedDataParallel
from tests.ranks import RankServer
from tests.synchronous_sgd import (
    BUCKET,
    average,
    check,
    compare_states,
    preloaded,
    same,
    seed,
    seeded,
)

__all__ = ["preloaded", "seed"]


class Branches(nn.Module):
    """A module whose calls choose which parameters are used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        for number in used:
            inputs = self.branches[number](inputs).tanh()
        return inputs.square().mean()


F = nn.functional


class Scenario:
    """A `SharedDataParallel` and a plain replica, compared after every step."""

    def __init__(self, seed: int, optimizer_class: Any = torch.optim.Adam, **options: Any) -> None:
        torch.manual_seed(seed)
        self.replica = Branches()
        self.model = SharedDataParallel(copy.deepcopy(self.replica), bucket_bytes=BUCKET)
        options = {"lr": 0.05, **options}
        self.optimizer = self.model.optimizer(optimizer_class, **options)
        self.plain = optimizer_class(self.replica.parameters(), **options)
        self.random = seeded(seed + dist.get_rank())

    def backward(self, used: list[int]) -> None:
        inputs = torch.randn(3, 40, generator=self.random)
        self.model(inputs, used).backward()
        self.replica(inputs, used).backward()

    def apply(self, action: Callable[[nn.Module, Any], object]) -> None:
        """Apply an action to both modules and their optimizers."""
        action(self.model, self.optimizer)
        action(self.replica, self.plain)

    def step(self) -> None:
        check(self.model, self.replica, "before the step")
        self.apply(lambda _, optimizer: optimizer.step())
        check(self.model, self.replica, "after the step")


def accumulate_like_ddp(seed: int) -> None:
    torch.set_num_threads(1)
    rank, all_branches = dist.get_rank(), [0, 1, 2, 3]
    one = Scenario(seed)

    # Several backward passes before a step, averaged once.
    with one.model.no_sync():
        one.backward(all_branches)
        one.backward([0, 1])
    assert one.model.module.branches[2].weight.grad is not None
    one.backward([3, 1])
    average(one.replica)
    one.step()

    # Gradients that are not zeroed, and gradients zeroed in place.
    one.backward(all_branches)
    accumulated_average(one.replica, rank)
    one.step()
    one.apply(lambda _, optimizer: optimizer.zero_grad(set_to_none=False))
    one.backward(all_branches)
    average(one.replica)
    one.step()

    # A parameter that some ranks do not use, one that no rank uses, and a different order.
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    one.backward([3, 0] if rank % 2 else [0, 3, 1])
    average(one.replica)
    assert one.model.module.branches[2].weight.grad is None
    one.step()

    # Two backward passes, each averaged, as for two losses.
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    one.backward(all_branches)
    average(one.replica)
    check(one.model, one.replica, "after the first loss")
    one.backward([1, 2])
    accumulated_average(one.replica, rank)
    one.step()


def accumulated_average(replica: nn.Module, rank: int) -> None:
    """Average again; gradients that are equal on all ranks stay the same except for rounding."""
    average(replica)


def change_in_place(seed: int) -> None:
    """In-place writes are private to a rank, and the step starts from them."""
    torch.set_num_threads(1)
    one = Scenario(seed, weight_decay=0.1)

    def clip(module: nn.Module, _: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    def change_through_data(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.data /= 2
            parameter.data.clamp_(-0.1, 0.1)

    def scale_parameters(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)  # applied once, although the memory is shared

    def replace_gradients(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.grad.sign()

    def remove_gradient(module: nn.Module, _: Any) -> None:
        next(module.parameters()).grad = None

    for change in (clip, change_through_data, scale_parameters, replace_gradients, remove_gradient):
        one.apply(lambda _, optimizer: optimizer.zero_grad())
        one.backward([0, 1, 2, 3])
        average(one.replica)
        one.apply(change)
        one.step()
    assert one.model._shared.memory.discard() == 0

    # The model's own clipping: each rank scales its slices. The order of the sum differs.
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    one.backward([0, 1, 2, 3])
    average(one.replica)
    for norm_type in (2.0, 1.0, 3.5, float("inf")):
        norm = one.model.clip_grad_norm_(1e-3, norm_type)
        expected = nn.utils.clip_grad_norm_(one.replica.parameters(), 1e-3, norm_type)
        torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=0.0)
        for parameter, other in zip(one.model.parameters(), one.replica.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-9)
    assert one.model._gradients.memory.discard() == 0


def save_and_load(seed: int) -> None:
    """Cover saving, loading, a scheduler, a closure, parameter groups and a plain optimizer."""
    torch.set_num_threads(1)
    all_branches = [0, 1, 2, 3]
    one = Scenario(seed)
    for _ in range(2):
        one.apply(lambda _, optimizer: optimizer.zero_grad())
        one.backward(all_branches)
        average(one.replica)
        one.step()
    file = io.BytesIO()
    torch.save({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}, file)
    assert file.tell() < 4 * 4 * 4 * 41 * 40  # three times the parameters, not the whole memory
    file.seek(0)
    saved = torch.load(file)
    assert list(saved["model"]) == [f"module.{name}" for name, _ in one.replica.named_parameters()]

    other = Scenario(seed + 1)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    other.replica.load_state_dict(one.replica.state_dict())
    other.plain.load_state_dict(saved["optimizer"])
    check_loaded = torch.optim.lr_scheduler.StepLR(other.optimizer, 1, 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(other.plain, 1, 0.5)
    for _ in range(2):
        other.apply(lambda _, optimizer: optimizer.zero_grad())
        other.backward(all_branches)
        average(other.replica)
        other.step()
        check_loaded.step()
        scheduler.step()
    assert other.optimizer.param_groups[0]["lr"] == 0.05 / 4

    torch.manual_seed(seed)
    replica = Branches()
    model = SharedDataParallel(copy.deepcopy(replica), bucket_bytes=BUCKET)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in module.parameters() if p.dim() > 1]
        biases = [p for p in module.parameters() if p.dim() == 1][:3]  # not the last
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]

    optimizer = model.optimizer(torch.optim.SGD, groups(model.module), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(groups(replica), lr=0.1, momentum=0.9)
    inputs = torch.randn(3, 40, generator=seeded(seed + dist.get_rank()))

    def make_closure(module: nn.Module, own_optimizer: Any) -> Callable[[], Any]:
        def closure() -> Any:
            own_optimizer.zero_grad()
            loss = module(inputs, all_branches)
            loss.backward()
            if module is replica:
                average(replica)
            return loss

        return closure

    for _ in range(3):
        one_loss = optimizer.step(make_closure(model, optimizer))
        assert torch.equal(one_loss, plain.step(make_closure(replica, plain)))
        check(model, replica, "with groups and a closure")
    compare_states(optimizer.state_dict(), plain.state_dict(), model)

    own = torch.optim.Adam(
        model.parameters(), lr=0.01
    )  # as for DDP: each rank then has its own parameters
    plain = torch.optim.Adam(replica.parameters(), lr=0.01)
    for _ in range(2):
        make_closure(model, own)()
        make_closure(replica, plain)()
        own.step()
        plain.step()
        check(model, replica, "with a plain optimizer")
    assert model._shared.memory.discard() > 0


def train_in_mixed_precision(seed: int) -> None:
    torch.set_num_threads(1)
    all_branches = [0, 1, 2, 3]
    one = Scenario(seed)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40) for _ in range(2)]
    sides: list[Any] = [(one.model, one.optimizer), (one.replica, one.plain)]
    skipped = False
    for _ in range(8):
        inputs = torch.randn(3, 40, generator=one.random)
        for (module, optimizer), scaler in zip(sides, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module(inputs, all_branches)
            scaler.scale(loss * 1e3).backward()
            if module is one.replica:
                average(one.replica)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        check(one.model, one.replica, "with a scaler")
        assert scalers[0].get_scale() == scalers[1].get_scale()
        skipped = skipped or scalers[0].get_scale() < 2.0**40
    assert skipped


@dataclasses.dataclass
class Outputs:
    loss: Tensor
    more: dict[str, Any]


def mix_backward_passes(seed: int) -> None:
    """Only passes whose forward went through the wrapper outside of `no_sync` are averaged."""
    torch.set_num_threads(1)
    one = Scenario(seed)
    module, all_branches = one.model.module, [0, 1, 2, 3]

    def losses(used: list[int] = all_branches) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(3, 40, generator=one.random)
        return one.model(inputs, used), one.replica(inputs, used)

    def backward(pair: tuple[Tensor, Tensor], averaged: bool = True, **options: Any) -> None:
        for loss in pair:
            loss.backward(**options)
        if averaged:
            average(one.replica)
        check(one.model, one.replica, f"averaged: {averaged}")

    # Without the wrapper: on one rank alone, before, between and after other passes.
    def bypass_wrapper() -> None:
        if dist.get_rank() == 1:
            inputs = torch.randn(3, 40, generator=one.random)
            backward(
                (module(inputs, all_branches), one.replica(inputs, all_branches)), averaged=False
            )

    bypass_wrapper()
    backward(losses())
    bypass_wrapper()
    backward(losses([3]))
    with one.model.no_sync():
        backward(losses(), averaged=False)
    bypass_wrapper()
    backward(losses())
    one.step()

    # Two forward passes before two backward passes, or one; a graph that is kept; no_sync between.
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    first, second = losses([0, 1]), losses([2, 0])
    backward(second)
    backward(first)
    first, second = losses([0, 1]), losses([2, 3])
    backward((first[0] + second[0], first[1] + second[1]))
    bypass_wrapper()
    both = losses()
    backward(both, retain_graph=True)
    backward(both)
    backward(losses(), create_graph=True)
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    first = losses()
    with one.model.no_sync():
        backward(losses([1, 2]), averaged=False)
        kept = losses([0])
    backward(first)
    backward(kept, averaged=False)

    # From nested outputs, and from a loss that the module has stored.
    plain = Branches.forward

    def forward_nested(branches: Branches, inputs: Tensor, used: list[int]) -> Any:
        branches.stored_loss = inputs.sum() * branches.branches[0].weight.square().sum()
        loss = plain(branches, inputs, used)
        return loss if branches is one.replica else Outputs(loss, {"all": [loss.exp(), None]})

    Branches.forward = forward_nested  # type: ignore[method-assign]
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    pairs = [losses(), losses([1, 2])]
    for outputs, loss in pairs:
        backward((outputs.more["all"][0].log(), loss.exp().log()))
    losses()
    backward((one.model.module.stored_loss, one.replica.stored_loss))
    Branches.forward = plain  # type: ignore[method-assign]


def copy_model(seed: int) -> None:
    """A copy is a plain, separate module: averaged weights, a teacher, a whole saved module."""
    torch.set_num_threads(1)
    rank, all_branches = dist.get_rank(), [0, 1, 2, 3]
    one = Scenario(seed)
    averaged, plain = AveragedModel(one.model), AveragedModel(one.replica)
    for _ in range(3):
        one.apply(lambda _, optimizer: optimizer.zero_grad())
        one.backward(all_branches)
        average(one.replica)
        one.step()
        averaged.update_parameters(one.model)
        plain.update_parameters(one.replica)
    for own_value, other in zip(averaged.parameters(), plain.parameters(), strict=True):
        assert same(own_value.detach(), other.detach())
    assert list(averaged.module.state_dict()) == list(one.model.state_dict())

    one.model.eval()
    copies = [copy.deepcopy(one.model)] if rank == 0 else []  # on one rank alone
    file = io.BytesIO()
    torch.save(one.model, file)
    file.seek(0)
    for module in [*copies, torch.load(file, weights_only=False)]:
        inputs = torch.randn(3, 40)
        assert not module.training
        assert torch.equal(module(inputs, all_branches), one.replica(inputs, all_branches))
        module(inputs, all_branches).backward()
        torch.optim.SGD(module.parameters(), lr=10.0).step()
        assert not torch.equal(module(inputs, all_branches), one.replica(inputs, all_branches))
    one.apply(lambda _, optimizer: optimizer.zero_grad())
    check(one.model, one.replica, "once copies have been trained")
    again = SharedDataParallel(copy.deepcopy(one.model).module)
    again(torch.ones(1, 40), all_branches).backward()


SCENARIOS = (
    accumulate_like_ddp,
    change_in_place,
    save_and_load,
    train_in_mixed_precision,
    mix_backward_passes,
    copy_model,
)


@pytest.mark.parametrize("world_size", [2, 4])
def test_scenarios_equal_ddp(ranks: RankServer, world_size: int, seed: int) -> None:
    def scenarios() -> None:
        for scenario in SCENARIOS:
            scenario(seed)

    ranks.run(world_size, scenarios)
