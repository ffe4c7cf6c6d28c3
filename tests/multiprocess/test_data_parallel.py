"""`DataParallel` against plain synchronous SGD, bit for bit, and against one process.

The oracle of most tests is a replica of the model on every rank, whose gradients are averaged by
one all-reduce per parameter, and which a plain optimizer updates as a whole.
"""

from __future__ import annotations

import copy
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from phalanx.errors import PeerLost, UsageError
from phalanx.parallel import DataParallel
from tests.ranks import RankServer

F = nn.functional
CHUNK = 32 * 1024
# Every optimizer that treats each element by itself, with options that use all of its state.
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01, "t0": 1}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


class Net(nn.Module):
    """Parameters of several dtypes and layouts, without elements and without dimensions."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 13, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(13)
        self.embed = nn.Embedding(31, 17)
        self.hidden = nn.Linear(13 * 6 * 6 + 17, 71)
        self.wide = nn.Linear(71, 33, dtype=torch.float64)
        self.narrow = nn.Linear(33, 5, dtype=torch.bfloat16)
        self.steps = nn.Linear(17, 201, bias=False)
        self.back = nn.Linear(201, 17)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(71), requires_grad=not frozen)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu().flatten(1)
        word = self.embed(words)
        longer = self.back(self.steps(word[:, None] * torch.linspace(0.1, 1, 47)[:, None])).mean(1)
        hidden = torch.cat([hidden, word + self.back(self.steps(longer))], 1)
        hidden = (
            self.hidden(hidden + self.steps.weight.square().mean()).tanh() * self.scale
            + self.frozen
            + self.empty.sum()
        )
        return self.narrow(self.wide(hidden.double()).tanh().bfloat16()).float()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Another one on each rank."""
    random = seeded(seed * 1009 + dist.get_rank())
    images = torch.randn(size, 3, 8, 8, generator=random)
    words = torch.randint(31, (size,), generator=random)
    return images, words, torch.randint(5, (size,), generator=random)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    images, words, labels = batch(seed)
    return F.cross_entropy(model(images, words), labels)


def average(module: nn.Module) -> None:
    """Plain synchronous SGD: an all-reduce for each gradient; zeros where a rank has none."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        present = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(present)
        if present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def same(one: Any, other: Any) -> bool:
    """Bitwise, but for the sign of zeros and the kind of NaNs."""
    if one is None or other is None:
        return one is other
    equal = torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return one.dtype == other.dtype and one.shape == other.shape and equal


def check(model: DataParallel, replica: nn.Module, what: str) -> None:
    pairs = zip(model.module.named_parameters(), replica.parameters(), strict=True)
    for (name, one), other in pairs:
        assert same(one.detach(), other.detach()), (what, name)
        assert same(one.grad, other.grad), (what, f"gradient of {name}")
    for (name, one), other in zip(model.module.named_buffers(), replica.buffers(), strict=True):
        assert same(one, other), (what, name)


def buffers_of_rank_0(replica: nn.Module) -> None:
    for buffer in replica.buffers():
        dist.broadcast(buffer, 0)


def pair(seed: int, **options: Any) -> tuple[DataParallel, nn.Module]:
    """A model with the values of rank 0, and a replica that has them by itself."""
    torch.manual_seed(seed)
    replica = Net()
    torch.manual_seed(seed + dist.get_rank())
    return DataParallel(Net(), chunk_bytes=CHUNK, **options), replica


def every_optimizer(seed: int, steps: int) -> None:
    torch.set_num_threads(1)
    for number, (kind, options) in enumerate(OPTIMIZERS):
        model, replica = pair(seed + number)
        check(model, replica, "at the beginning")
        optimizer = model.optimizer(kind, **options)
        plain = kind([p for p in replica.parameters() if p.requires_grad], **options)
        for step in range(steps):
            buffers_of_rank_0(replica)
            optimizer.zero_grad()
            plain.zero_grad()
            one, other = loss_of(model, seed + step), loss_of(replica, seed + step)
            assert torch.equal(one, other), (kind, step)
            one.backward()
            other.backward()
            average(replica)
            check(model, replica, f"{kind} before step {step}")
            optimizer.step()
            plain.step()
            check(model, replica, f"{kind} after step {step}")
        compare_states(optimizer.state_dict(), plain.state_dict(), model)
        assert model._memory.drop() == 0, "the parameters are held once"


def compare_states(one: dict[str, Any], other: dict[str, Any], model: DataParallel) -> None:
    assert one["param_groups"] == other["param_groups"]
    for index, state in other["state"].items():
        if model._trained[index].numel():
            assert set(one["state"][index]) == set(state)
        for key, value in state.items():
            if model._trained[index].numel():
                found = one["state"][index][key]
                assert same(found, value) if isinstance(value, Tensor) else found == value, key


@pytest.fixture(autouse=True)
def preloaded(ranks: RankServer) -> None:
    """The first step of an optimizer imports it."""
    ranks.preload("torch._dynamo")


@pytest.fixture
def seed() -> int:
    value = int(torch.randint(2**20, ()))
    print(f"seed {value}")
    return value


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_plain_synchronous_sgd_bit_for_bit(
    ranks: RankServer, world_size: int, seed: int
) -> None:
    ranks.run(world_size, every_optimizer, seed, 3)


# The order of reduction is then that of the hosts, so results are near, not equal; on every rank
# they are the same.
def near_one_process(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = nn.Sequential(nn.Linear(9, 301), nn.Tanh(), nn.Linear(301, 7)).double()
    torch.manual_seed(seed + dist.get_rank())
    module = nn.Sequential(nn.Linear(9, 301), nn.Tanh(), nn.Linear(301, 7)).double()
    model = DataParallel(module, chunk_bytes=CHUNK)
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(replica.parameters(), lr=0.01)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        random = seeded(seed + step)
        inputs = torch.randn(4 * size, 9, generator=random, dtype=torch.float64)
        targets = torch.randn(4 * size, 7, generator=random, dtype=torch.float64)
        optimizer.zero_grad()
        plain.zero_grad()
        F.mse_loss(model(inputs[rank::size]), targets[rank::size]).backward()
        F.mse_loss(replica(inputs), targets).backward()
        for one, other in zip(module.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)
        norm = model.clip_grad_norm_(0.5)
        expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0.0)
        optimizer.step()
        plain.step()
        for one, other in zip(module.parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    for parameter in module.parameters():
        of_all = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(of_all, parameter.detach())
        assert all(torch.equal(of_all[0], other) for other in of_all)
    state = optimizer.state_dict()["state"]
    for index, expected_state in plain.state_dict()["state"].items():
        for key, value in expected_state.items():
            torch.testing.assert_close(state[index][key], value, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab", "abb", "ab", "aaabc"])
def test_equals_one_process_on_many_hosts(ranks: RankServer, hosts: str, seed: int) -> None:
    ranks.run(len(hosts), near_one_process, seed, hosts=hosts)


def on_gloo(seed: int) -> None:
    path = Path(os.environ["FOLDER"]) / "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    near_one_process(seed)
    dist.destroy_process_group()


def test_equals_one_process_on_gloo(ranks: RankServer, seed: int) -> None:
    ranks.run(3, on_gloo, seed, timeout=None)


class Branches(nn.Module):
    """Which of its parameters are used is said at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        for number in used:
            inputs = self.branches[number](inputs).tanh()
        return inputs.square().mean()


class Scenario:
    """The same done to a `DataParallel` and to a plain replica, compared after every step."""

    def __init__(self, seed: int, kind: Any = torch.optim.Adam, **options: Any) -> None:
        torch.manual_seed(seed)
        self.replica = Branches()
        self.model = DataParallel(copy.deepcopy(self.replica), chunk_bytes=CHUNK)
        options = {"lr": 0.05, **options}
        self.optimizer = self.model.optimizer(kind, **options)
        self.plain = kind(self.replica.parameters(), **options)
        self.random = seeded(seed + dist.get_rank())

    def backward(self, used: list[int]) -> None:
        inputs = torch.randn(3, 40, generator=self.random)
        self.model(inputs, used).backward()
        self.replica(inputs, used).backward()

    def do(self, what: Callable[[nn.Module, Any], object]) -> None:
        """To both: the module and its optimizer."""
        what(self.model, self.optimizer)
        what(self.replica, self.plain)

    def step(self) -> None:
        check(self.model, self.replica, "before the step")
        self.do(lambda _, optimizer: optimizer.step())
        check(self.model, self.replica, "after the step")


def as_ddp_does(seed: int) -> None:
    torch.set_num_threads(1)
    rank, every = dist.get_rank(), [0, 1, 2, 3]
    one = Scenario(seed)

    # Several backward passes before a step, averaged once.
    with one.model.no_sync():
        one.backward(every)
        one.backward([0, 1])
    assert one.model.module.branches[2].weight.grad is not None
    one.backward([3, 1])
    average(one.replica)
    one.step()

    # Gradients that aren't zeroed, and zeroed in place.
    one.backward(every)
    accumulated_average(one.replica, rank)
    one.step()
    one.do(lambda _, optimizer: optimizer.zero_grad(set_to_none=False))
    one.backward(every)
    average(one.replica)
    one.step()

    # A parameter that some ranks don't use, one that nobody uses, another order.
    one.do(lambda _, optimizer: optimizer.zero_grad())
    one.backward([3, 0] if rank % 2 else [0, 3, 1])
    average(one.replica)
    assert one.model.module.branches[2].weight.grad is None
    one.step()

    # Two backward passes, each averaged, as two losses are.
    one.do(lambda _, optimizer: optimizer.zero_grad())
    one.backward(every)
    average(one.replica)
    check(one.model, one.replica, "after the first loss")
    one.backward([1, 2])
    accumulated_average(one.replica, rank)
    one.step()


def accumulated_average(replica: nn.Module, rank: int) -> None:
    """What was averaged before is the same on all ranks: it stays what it is, but for rounding."""
    average(replica)


def changed_in_place(seed: int) -> None:
    """What a rank writes to parameters and gradients is its own, and where the step begins."""
    torch.set_num_threads(1)
    one = Scenario(seed, weight_decay=0.1)

    def clip(module: nn.Module, _: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    def by_data(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.data /= 2
            parameter.data.clamp_(-0.1, 0.1)

    def scaled(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)  # once, though the memory is everybody's

    def another_gradient(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.grad.sign()

    def none_of_one(module: nn.Module, _: Any) -> None:
        next(module.parameters()).grad = None

    for change in (clip, by_data, scaled, another_gradient, none_of_one):
        one.do(lambda _, optimizer: optimizer.zero_grad())
        one.backward([0, 1, 2, 3])
        average(one.replica)
        one.do(change)
        one.step()
    assert one.model._memory.drop() == 0

    # By the model itself: each rank scales its slices. The sum goes in another order.
    one.do(lambda _, optimizer: optimizer.zero_grad())
    one.backward([0, 1, 2, 3])
    average(one.replica)
    for norm_type in (2.0, 1.0, 3.5, float("inf")):
        norm = one.model.clip_grad_norm_(1e-3, norm_type)
        expected = nn.utils.clip_grad_norm_(one.replica.parameters(), 1e-3, norm_type)
        torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=0.0)
        for parameter, other in zip(one.model.parameters(), one.replica.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-9)
    assert one.model._gradients.memory.drop() == 0


def loaded_and_plain(seed: int) -> None:
    """Saved, loaded, a scheduler, a closure, groups with options of their own, a plain one."""
    torch.set_num_threads(1)
    every = [0, 1, 2, 3]
    one = Scenario(seed)
    for _ in range(2):
        one.do(lambda _, optimizer: optimizer.zero_grad())
        one.backward(every)
        average(one.replica)
        one.step()
    file = io.BytesIO()
    torch.save({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}, file)
    assert file.tell() < 4 * 4 * 4 * 41 * 40  # three times the parameters, not the memory of all
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
        other.do(lambda _, optimizer: optimizer.zero_grad())
        other.backward(every)
        average(other.replica)
        other.step()
        check_loaded.step()
        scheduler.step()
    assert other.optimizer.param_groups[0]["lr"] == 0.05 / 4

    torch.manual_seed(seed)
    replica = Branches()
    model = DataParallel(copy.deepcopy(replica), chunk_bytes=CHUNK)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in module.parameters() if p.dim() > 1]
        biases = [p for p in module.parameters() if p.dim() == 1][:3]  # not the last
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]

    optimizer = model.optimizer(torch.optim.SGD, groups(model.module), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(groups(replica), lr=0.1, momentum=0.9)
    inputs = torch.randn(3, 40, generator=seeded(seed + dist.get_rank()))

    def closure_of(module: nn.Module, of: Any) -> Callable[[], Any]:
        def closure() -> Any:
            of.zero_grad()
            loss = module(inputs, every)
            loss.backward()
            if module is replica:
                average(replica)
            return loss

        return closure

    for _ in range(3):
        one_loss = optimizer.step(closure_of(model, optimizer))
        assert torch.equal(one_loss, plain.step(closure_of(replica, plain)))
        check(model, replica, "with groups and a closure")
    compare_states(optimizer.state_dict(), plain.state_dict(), model)

    own = torch.optim.Adam(model.parameters(), lr=0.01)  # as for DDP: each rank has its own then
    plain = torch.optim.Adam(replica.parameters(), lr=0.01)
    for _ in range(2):
        closure_of(model, own)()
        closure_of(replica, plain)()
        own.step()
        plain.step()
        check(model, replica, "with a plain optimizer")
    assert model._memory.drop() > 0


def mixed_precision(seed: int) -> None:
    torch.set_num_threads(1)
    every = [0, 1, 2, 3]
    one = Scenario(seed)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40) for _ in range(2)]
    sides: list[Any] = [(one.model, one.optimizer), (one.replica, one.plain)]
    skipped = False
    for _ in range(8):
        inputs = torch.randn(3, 40, generator=one.random)
        for (module, optimizer), scaler in zip(sides, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module(inputs, every)
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_does_what_ddp_does(ranks: RankServer, world_size: int, seed: int) -> None:
    def scenarios() -> None:
        for scenario in (as_ddp_does, changed_in_place, loaded_and_plain, mixed_precision):
            scenario(seed)

    ranks.run(world_size, scenarios)


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


def other_ways_of_backward(seed: int) -> None:
    """Those in which a linear layer's gradient isn't, or not only, the product of one call."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    replica = Tied()
    model = DataParallel(copy.deepcopy(replica))
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
    near(model, replica)

    for module in (model, replica):
        module.zero_grad()
    seen: list[Tensor] = []
    for middle in (model.module.middle, replica.middle):
        middle.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    penalized(model).backward()
    penalized(replica).backward()
    average(replica)
    assert same(*seen)
    near(model, replica)

    with torch.inference_mode():
        assert torch.equal(model(words), replica(words))
    moved_and_checkpointed(seed)
    scaled = torch.func.jacrev(lambda scale: model(words) * scale)(torch.tensor(2.0))
    torch.testing.assert_close(scaled, replica(words))


class Checkpointed(nn.Module):
    """Of complex numbers, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 40, dtype=torch.complex64)
        self.real = nn.Linear(40, 40)

    def forward(self, inputs: Tensor) -> Tensor:
        def run(inputs: Tensor) -> Tensor:
            return self.real(self.layer(inputs.to(torch.complex64)).abs()).tanh()

        return torch.utils.checkpoint.checkpoint(run, inputs, use_reentrant=False)


def moved_and_checkpointed(seed: int) -> None:
    """Complex products, checkpoints, hooks after accumulation, and data that is assigned."""
    torch.manual_seed(seed)
    replica = Checkpointed()
    model = DataParallel(copy.deepcopy(replica), chunk_bytes=CHUNK)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(replica.parameters(), lr=0.1)
    seen: list[bool] = []
    for step in range(3):
        inputs = torch.randn(3, 40, generator=seeded(seed + 7 * step + dist.get_rank()))
        for module, one in ((model, optimizer), (replica, plain)):
            one.zero_grad()
            module(inputs).square().mean().backward()
        average(replica)
        near(model, replica)
        if step == 1:  # a gradient of the user's own, and then one rank is late
            for module in (model, replica):
                for parameter in module.parameters():
                    parameter.grad = parameter.grad * 3
            norm = model.clip_grad_norm_(0.01)
            expected = nn.utils.clip_grad_norm_(replica.parameters(), 0.01)
            torch.testing.assert_close(norm.float(), expected, rtol=1e-4, atol=0.0)
            near(model, replica)
        optimizer.step()
        plain.step()
        if step == 0:  # as one who swaps averaged weights in does
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
    stale = DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = stale.optimizer(torch.optim.SGD, lr=0.1)
    loss = stale(torch.ones(1, 3)).mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def on_a_part_and_all() -> None:
    """A model of some ranks, then one of all: their groups find each other."""
    some = dist.new_group([1, 2])
    if dist.get_rank():
        part = DataParallel(nn.Linear(3, 2), some)
        part(torch.ones(1, 3)).sum().backward()
    model = DataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(2, 3))


def test_a_sub_group_and_then_all(ranks: RankServer) -> None:
    ranks.run(3, on_a_part_and_all)


def near(model: DataParallel, replica: nn.Module) -> None:
    """A sum of several products may go in another order."""
    for one, other in zip(model.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_gradients_of_linear_layers_in_other_ways(ranks: RankServer, seed: int) -> None:
    ranks.run(2, other_ways_of_backward, seed)


def held_once() -> tuple[int, int]:
    """Bytes of the model, and what this process has of it that is its own."""
    torch.set_num_threads(1)
    model = DataParallel(nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))))
    optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 700)).sum().backward()
        optimizer.step()
    text = Path("/proc/self/smaps").read_text()
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    own = 0
    for area in areas:
        if "phalanx-commons" in area.partition("\n")[0]:
            found = re.search(r"^Anonymous: +(\d+) kB", area, re.MULTILINE)
            own += int(found[1]) * 1024 if found else 0
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    state = model_state_bytes(optimizer)
    assert state < size
    return size, own


def model_state_bytes(optimizer: Any) -> int:
    """What this rank has of the optimizer's state."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer._inner.state.values()
        for value in state.values()
    )


def test_a_host_holds_parameters_and_gradients_once(ranks: RankServer) -> None:
    for size, own in ranks.run(4, held_once):
        assert size > 15_000_000
        assert own == 0


def errors() -> None:
    rank, model = dist.get_rank(), nn.Linear(4, 3)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        DataParallel(frozen)
    with pytest.raises(UsageError, match=r"parameter weight \[4, 3\] is .* on meta"):
        DataParallel(nn.Linear(3, 4, device="meta"))
    with pytest.raises(UsageError, match="no shape yet"):
        DataParallel(nn.LazyLinear(3))
    different = nn.Linear(4, 3 + rank // 2)
    with pytest.raises(
        UsageError,
        match=r"parameter 0 is weight \[3, 4\] torch.float32, .* rank 0, weight \[4, 4\] .* rank 2",
    ):
        DataParallel(different)
    wrapped = DataParallel(model)
    with pytest.raises(UsageError, match="LBFGS given, expected one that treats each element"):
        wrapped.optimizer(torch.optim.LBFGS)
    with pytest.raises(UsageError, match=r"a parameter \[5\] given that isn't of this model"):
        wrapped.optimizer(torch.optim.SGD, [nn.Parameter(torch.zeros(5))], lr=0.1)
    with pytest.raises(UsageError, match="combined in shared memory"):
        wrapped.register_comm_hook(None, None)
    with pytest.raises(ValueError, match="learning rate"):
        wrapped.optimizer(torch.optim.SGD, lr=-1)
    with pytest.raises(UsageError, match=r"max_norm -1 and norm_type 2\.0 given"):
        wrapped.clip_grad_norm_(-1)
    optimizer = wrapped.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="divided among the ranks already"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    other = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    with pytest.raises(UsageError, match=r"groups of \[1\] parameters given, expected \[2\]"):
        optimizer.load_state_dict(other.state_dict())
    state = optimizer.state_dict()
    state["state"][0] = {"momentum_buffer": torch.zeros(7)}
    with pytest.raises(UsageError, match=r"momentum_buffer of parameter 0 is \[7\], expected \[3,"):
        optimizer.load_state_dict(state)
    # All that left every rank in step.
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_bad_input_gets_a_clear_error(ranks: RankServer) -> None:
    with pytest.raises(UsageError, match="no process group"):
        DataParallel(nn.Linear(2, 2))
    ranks.run(3, errors)


def cut_short() -> str:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(_: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("stop here")

    last = nn.Linear(3, 3)
    model = DataParallel(nn.Sequential(nn.Linear(3, 3), last))
    with pytest.raises(RuntimeError, match="stop here"):
        last(Stop.apply(model.module[0](torch.ones(1, 3)))).sum().backward()
    model(torch.ones(1, 3))  # nothing of it was averaged
    model._synchronizing = True
    with pytest.raises(RuntimeError, match="stop here"):
        model.module[1](Stop.apply(model.module[0](torch.ones(1, 3)))).sum().backward()
    with pytest.raises(UsageError, match="cut short by an exception") as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def test_a_backward_pass_that_is_cut_short_is_no_silent_desync(ranks: RankServer) -> None:
    assert "snapshot" in ranks.run(2, cut_short)[0]


def dies_in_the_third_step() -> None:
    model = DataParallel(nn.Linear(300, 300))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(10):
        loss = model(torch.ones(2, 300)).sum()
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        loss.backward()
        optimizer.step()


def test_a_death_is_told_to_all(ranks: RankServer) -> None:
    ended = ranks.start(3, dies_in_the_third_step).join()
    assert ended[1].code == -9
    for rank in (0, 2):
        assert isinstance(ended[rank].error, PeerLost), ended[rank].report()
        assert "rank 1" in str(ended[rank].error)
