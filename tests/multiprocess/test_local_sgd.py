"""Local SGD and DiLoCo: against a simulation in one process, bit-identical on all ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.errors import UsageError
from phalanx.parallel import DiLoCo, LocalSGD, average_gradients
from phalanx.system.polling import wait_until
from tests.ranks import RankServer, marker_file, wait_for_file

STEPS = 14


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Each rank would import it for its optimizer, which takes most of the time of a test."""
    ranks.preload("torch._dynamo")


def make_model(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double().float()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def backward(model: nn.Module, step: int, rank: int) -> None:
    inputs, targets = batch(step, rank)
    nn.functional.mse_loss(model(inputs), targets).backward()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


class Simulation:
    """All units of a training in one process, in float64 where they meet.

    Args:
        units: The ranks of each.
        every: The number of steps between two exchanges.
        lr: The outer learning rate.
        momentum: The outer momentum.
        overlap: The number of steps after which an exchange takes effect.
        parts: The parts of the flat parameters that are exchanged in turn.
    """

    def __init__(
        self,
        units: list[list[int]],
        every: int,
        lr: float,
        momentum: float,
        overlap: int = 0,
        parts: tuple[slice, ...] = (slice(None),),
    ) -> None:
        self.units, self.every, self.overlap, self.parts = units, every, overlap, parts
        self.models = [make_model() for _ in units]
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in self.models]
        self.common = [nn.Parameter(flat(self.models[0])[part].clone()) for part in parts]
        nesterov = momentum > 0
        self.outer = torch.optim.SGD(self.common, lr=lr, momentum=momentum, nesterov=nesterov)
        self.due = [every + number * every // len(parts) for number in range(len(parts))]
        self.begun: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.completed = 0
        self.equal_at = [0] * len(parts)
        """By part, the number of steps after which all models had the common parameters."""

    def step(self, number: int) -> None:
        for unit, model, optimizer in zip(self.units, self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            copies = [copy.deepcopy(model) for _ in unit]
            for rank, each in zip(unit, copies, strict=True):
                backward(each, number, rank)
            for parameter, *grads in zip(
                model.parameters(), *(each.parameters() for each in copies), strict=True
            ):
                parameter.grad = torch.stack([each.grad for each in grads]).mean(0)
            optimizer.step()
        completed = self.completed = number + 1
        for part, (begin, _) in [*self.begun.items()]:
            if completed - begin >= self.overlap:
                self.finish(part)
        for part, due in enumerate(self.due):
            if completed == due:
                self.begin(part)
                self.due[part] += self.every
                if not self.overlap:
                    self.finish(part)

    def begin(self, part: int) -> None:
        starts = [flat(each)[self.parts[part]].clone() for each in self.models]
        self.begun[part] = self.completed, starts

    def finish(self, part: int) -> None:
        begin, starts = self.begun.pop(part)
        self.equal_at[part] = begin
        common = self.common[part]
        changes = [
            (common.detach() - start).double() * len(unit)
            for unit, start in zip(self.units, starts, strict=True)
        ]
        ranks = sum(map(len, self.units))
        common.grad = (torch.stack(changes).sum(0) / ranks).float()
        self.outer.step()
        common.grad = None
        for model, start in zip(self.models, starts, strict=True):
            values = flat(model)
            values[self.parts[part]] += common.detach() - start
            nn.utils.vector_to_parameters(values, model.parameters())

    def synchronize(self) -> None:
        for part in [*self.begun]:
            self.finish(part)
        changed = [part for part, step in enumerate(self.equal_at) if step != self.completed]
        for part in changed:
            self.begin(part)
        for part in changed:
            self.finish(part)


def train(kind: str, hosts: str, unit: str, options: dict[str, int]) -> None:
    rank = dist.get_rank()
    groups = phalanx.host_ranks() if unit == "host" else [[each] for each in range(len(hosts))]
    own = next(number for number, ranks in enumerate(groups) if rank in ranks)
    lr, momentum = (0.7, 0.9) if kind == "diloco" else (1.0, 0.0)
    parts = (slice(240), slice(240, None)) if "fragments" in options else (slice(None),)
    simulation = Simulation(groups, 4, lr, momentum, options.get("overlap", 0), parts)
    model = make_model(5 if rank == 0 else 6 + rank)  # all get the parameters of rank 0
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    create: Any = DiLoCo if kind == "diloco" else LocalSGD
    optimizer = create(inner, every=4, unit=unit, **options)
    assert [each.outer.numel() for each in optimizer._fragments] == [
        each.numel() for each in simulation.common
    ]
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
        simulation.step(step)
        torch.testing.assert_close(flat(model), flat(simulation.models[own]), rtol=1e-4, atol=1e-5)
        if step % 4 == 3 and not options:
            check_equal(flat(model))
    optimizer.synchronize()
    simulation.synchronize()
    torch.testing.assert_close(flat(model), flat(simulation.models[0]), rtol=1e-4, atol=1e-5)
    check_equal(flat(model))


def check_equal(values: torch.Tensor) -> None:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    assert all(torch.equal(each, everyone[0]) for each in everyone)
    assert values.isfinite().all()


@pytest.mark.parametrize("unit", ("host", "rank"))
@pytest.mark.parametrize("hosts", ("ab", "aabb", "aab", "aaa"))
@pytest.mark.parametrize("kind", ("local", "diloco"))
def test_against_a_simulation(ranks: RankServer, kind: str, hosts: str, unit: str) -> None:
    ranks.run(len(hosts), train, kind, hosts, unit, {}, timeout=60, hosts=hosts)


@pytest.mark.parametrize(
    "options", ({"overlap": 2}, {"fragments": 2}, {"fragments": 2, "overlap": 1}), ids=str
)
@pytest.mark.parametrize("hosts", ("ab", "aab"))
def test_overlap_and_fragments_against_a_simulation(
    ranks: RankServer, options: dict[str, int], hosts: str
) -> None:
    ranks.run(len(hosts), train, "diloco", hosts, "host", options, timeout=60, hosts=hosts)


def continues_meanwhile() -> None:
    """Rank 1 does not come to the exchange before rank 0 has made a step after it."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 4, overlap=3)
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step, rank)
        if rank == 1 and step == 3:
            wait_for_file("continued", 20)
        optimizer.step()
        if rank == 0 and step == 4:
            marker_file("continued").touch()
    optimizer.synchronize()
    check_equal(flat(model))


def test_an_exchange_overlaps_with_steps(ranks: RankServer) -> None:
    ranks.run(2, continues_meanwhile, hosts="ab")


def overlaps(options: dict[str, Any]) -> None:
    """The common parameters are the same on all ranks whenever an exchange has ended."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5000), nn.Tanh(), nn.Linear(5000, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = DiLoCo(inner, every=5, **options)
    start = loss_of(model)
    for step in range(40):
        optimizer.zero_grad()
        inputs, targets = regression(step, rank)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        with optimizer.common_parameters():
            check_equal(flat(model))
    optimizer.synchronize()
    check_equal(flat(model))
    assert loss_of(model) < 0.5 * start


def regression(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77 * step + rank)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, inputs[:, :3].sin() - inputs[:, 3:]


def loss_of(model: nn.Module) -> float:
    inputs, targets = regression(10_000, 0)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))


@pytest.mark.parametrize(
    "options",
    (
        {"overlap": 3},
        {"fragments": 2},
        {"fragments": 3, "overlap": 2, "compress": "int8"},
        {"compress": "bfloat16"},
        {"compress": "int4", "overlap": 4, "unit": "rank"},
    ),
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("hosts", ("aabb", "aab"))
def test_overlap_fragments_and_compression(
    ranks: RankServer, options: dict[str, Any], hosts: str
) -> None:
    ranks.run(len(hosts), overlaps, options, timeout=60, hosts=hosts)


def begins_early(overlap: int) -> int:
    """Host "b" is slow: it has made at most 3 of 10 steps when host "a" begins the exchange."""
    rank = dist.get_rank()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = LocalSGD(inner, 10, overlap=overlap, early=True)
    is_slow = rank > 0
    exchanged_at: list[int] = []
    for number in range(25):
        if is_slow and number == 3:
            assert wait_until(optimizer._has_arrived, 20)
        optimizer.zero_grad()
        backward(model, number, rank)
        optimizer.step()
        if optimizer.has_exchanged:
            exchanged_at.append(optimizer.completed)
    assert exchanged_at[0] in (range(1, 5) if is_slow else [10])
    least = max(overlap, 1)
    assert all(later - sooner >= least for sooner, later in itertools.pairwise(exchanged_at))
    assert len(exchanged_at) <= 5
    optimizer.synchronize()
    check_equal(flat(model))
    exchanges: list[Any] = [0] * dist.get_world_size()
    dist.all_gather_object(exchanges, optimizer.exchanges)
    assert len(set(exchanges)) == 1
    return optimizer.exchanges


@pytest.mark.parametrize("hosts", ("ab", "abb"))
@pytest.mark.parametrize("overlap", (0, 2))
def test_exchanges_begin_early(ranks: RankServer, hosts: str, overlap: int) -> None:
    """A host that is done takes part in the exchanges of a slow one, until that is done too."""
    ranks.run(len(hosts), begins_early, overlap, hosts=hosts)


def ends_with_nan() -> None:
    model = make_model()
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 10)
    backward(model, 0, 0)
    if dist.get_rank() == 1:
        next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
    optimizer.step()
    with pytest.raises(FloatingPointError, match="after step 1, the parameters of rank 1 are"):
        optimizer.synchronize()


def test_the_last_parameters_are_not_finite(ranks: RankServer) -> None:
    ranks.run(2, ends_with_nan, hosts="ab")


def has_nan(non_finite: str) -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = LocalSGD(torch.optim.AdamW(model.parameters()), 2, non_finite=non_finite)

    def step(number: int) -> None:
        optimizer.zero_grad()
        backward(model, number, rank)
        if rank == 1 and number == 2:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        optimizer.step()

    for number in range(3):
        step(number)
    if non_finite == "raise":
        with pytest.raises(FloatingPointError, match="after step 4, the parameters of rank 1 are"):
            step(3)
        return
    for number in range(3, 8):
        step(number)
        if number % 2:
            check_equal(flat(model))


@pytest.mark.parametrize("non_finite", ("raise", "exclude"))
def test_a_rank_that_is_not_finite(ranks: RankServer, non_finite: str) -> None:
    ranks.run(3, has_nan, non_finite, hosts="abc")


def heals(compress: str) -> None:
    """All parameters and moments of a rank are NaN; one fragment after the other is restored."""
    rank, model = dist.get_rank(), make_model()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = LocalSGD(inner, 4, fragments=2, overlap=1, non_finite="exclude", compress=compress)
    for number in range(16):
        optimizer.zero_grad()
        backward(model, number, rank)
        if rank == 1 and number == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
        optimizer.step()
    assert flat(model).isfinite().all()
    optimizer.synchronize()
    check_equal(flat(model))


@pytest.mark.parametrize("compress", ("", "int8"))
def test_fragments_of_a_rank_that_is_not_finite(ranks: RankServer, compress: str) -> None:
    ranks.run(3, heals, compress, hosts="abc")


def averages_by_itself(hosts: str) -> None:
    """`average=False`, with the group of the host, is the same as the default."""
    rank, models = dist.get_rank(), [make_model(), make_model()]
    for model, average in zip(models, (True, False), strict=True):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSGD(inner, 3, average=average)
        assert dist.get_world_size(optimizer.host_group) == hosts.count(hosts[rank])
        for number in range(5):
            optimizer.zero_grad()
            backward(model, number, rank)
            if not average:
                average_gradients(model, optimizer.host_group)
            optimizer.step()
    assert torch.equal(flat(models[0]), flat(models[1]))
    dist.barrier()  # a rank that leaves would disturb the last step of others


@pytest.mark.parametrize("hosts", ("abb", "ab"))
def test_gradients_averaged_by_the_user(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), averages_by_itself, hosts, hosts=hosts)


def loads_at_the_end() -> None:
    """An exchange without a step since the last one changes nothing."""
    rank = dist.get_rank()

    def make() -> tuple[nn.Module, Any]:
        model = make_model()
        return model, DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), 3, fragments=2)

    model, optimizer = make()
    for number in range(7):
        optimizer.zero_grad()
        backward(model, number, rank)
        optimizer.step()
    optimizer.synchronize()
    other, resumed = make()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.synchronize()
    assert torch.equal(flat(other), flat(model))
    assert resumed.exchanges == optimizer.exchanges


def test_nothing_to_exchange(ranks: RankServer) -> None:
    ranks.run(2, loads_at_the_end, hosts="ab")


def resumes() -> None:
    rank = dist.get_rank()

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            backward(model, number, rank)
            optimizer.step()

    def make() -> tuple[nn.Module, Any, Any]:
        model = make_model()
        optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 3)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = make()
    steps(model, optimizer, range(6))
    scheduler.step()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    steps(model, optimizer, range(6, 12))
    other, resumed, other_scheduler = make()
    for each, values in zip((other, resumed, other_scheduler), state, strict=True):
        each.load_state_dict(values)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    steps(other, resumed, range(6, 12))
    assert torch.equal(flat(model), flat(other))
    other_scheduler.step()
    assert resumed.inner.param_groups[0]["lr"] == resumed.param_groups[0]["lr"]


def test_resume(ranks: RankServer) -> None:
    ranks.run(2, resumes, hosts="ab")


def rejects() -> None:
    model = make_model()

    def make(**options: Any) -> LocalSGD:
        return LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    for options, words in bad_options():
        with pytest.raises(UsageError, match=words):
            make(**options)
    with pytest.raises(UsageError, match=r"unknown options \['overlab'\]"):
        DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), 2, overlab=1)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(UsageError, match="backend 'gloo', expected 'phalanx'"):
        make(every=2, group=gloo)
    rank = dist.get_rank()
    with pytest.raises(UsageError, match="rank 1 has every 3, rank 0 2"):
        make(every=2 + rank)
    other = nn.Linear(2, 2 + rank)
    optimizer = make(every=2)
    with pytest.raises(UsageError, match="LocalSGD: a parameter group was added to it"):
        optimizer.add_param_group({"params": list(other.parameters())})
    optimizer = make(every=2)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UsageError, match="LocalSGD: the parameters have changed since it was"):
        optimizer.step()
    with pytest.raises(UsageError, match="rank 1 has parameters"):
        LocalSGD(torch.optim.SGD(other.parameters(), lr=0.1), 2)


def bad_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"every": 0}, "every is 0, expected an integer from 1"
    yield {"every": 2.5}, "every is 2.5"
    yield {"every": 4, "overlap": 4}, "overlap is 4, expected less than every=4"
    yield {"every": 4, "fragments": 0}, "fragments is 0"
    yield {"every": 4, "unit": "cluster"}, "unit is 'cluster'"
    yield {"every": 4, "non_finite": "ignore"}, "non_finite is 'ignore'"
    yield {"every": 4, "compress": "int2"}, "compress='int2'"
    yield {"every": 4, "early": True, "fragments": 2}, "early=True with fragments=2 given"


def test_bad_arguments(ranks: RankServer) -> None:
    ranks.run(2, rejects, hosts="ab")


def test_without_a_group() -> None:
    with pytest.raises(UsageError, match="LocalSGD: no process group"):
        LocalSGD(torch.optim.SGD(make_model().parameters(), lr=0.1), 2)
