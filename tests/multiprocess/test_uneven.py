"""Uneven inputs: no hang, and the results equal those of one process with all data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from phalanx.data import (
    EvaluationSampler,
    ResumableSampler,
    join_uneven_inputs,
    mean_over_ranks,
    truncate_uneven_inputs,
)
from phalanx.errors import PhalanxError, UsageError
from phalanx.parallel import average_gradients
from tests.ranks import RankServer

Batch = tuple[Tensor, Tensor]
Group = Any
Loop = Callable[[nn.Module, list[list[Batch]], Group], None]

WORLD_SIZES = (1, 2, 3, 4)
EXAMPLE = torch.full((2, 6), torch.nan), torch.zeros(2, 3)  # NaN, which must be ignored


@pytest.fixture(autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Preload the module that the first step of an optimizer imports."""
    ranks.preload("torch._dynamo")


def all_batches(seed: int, world_size: int, fewest: int) -> list[list[Batch]]:
    """Return batches of odd sizes for each rank, a different number on each rank."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randperm(world_size, generator=generator) + fewest

    def batch() -> Batch:
        size = int(torch.randint(1, 6, (), generator=generator))
        whole = torch.randn(size, 9, generator=generator, dtype=torch.float64)
        return whole[:, :6], whole[:, 6:]

    return [[batch() for _ in range(int(count) * 2)] for count in counts]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normalize(inputs: Tensor, moments: Callable[[Tensor], Tensor]) -> Tensor:
    mean = moments(inputs)
    return (inputs - mean) / (moments((inputs - mean) ** 2) + 1e-3).sqrt()


def train_alone(
    batches: list[list[Batch]], count_steps: Callable[[Any], int], normalized: bool
) -> list[Tensor]:
    """Train in one process, whose batch is that of all ranks: the oracle."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(count_steps(map(len, batches))):
        parts = [rank[step] for rank in batches if step < len(rank)]
        inputs, targets = (torch.cat(subgroup) for subgroup in zip(*parts, strict=True))
        optimizer.zero_grad()
        inputs = normalize(inputs, lambda x: x.mean(0)) if normalized else inputs
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# --- training loops on this rank's batches ------------------------------------------------------


def train_by_averaging(model: nn.Module, batches: list[list[Batch]], group: Group) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    example = tuple(subgroup.double() for subgroup in EXAMPLE)
    own = batches[dist.get_rank(group)]
    # A generator, which has no length.
    for (inputs, targets), weight in join_uneven_inputs((b for b in own), group, example=example):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average_gradients(model, group, weight=weight)
        optimizer.step()


def train_with_ddp(model: nn.Module, batches: list[list[Batch]], group: Group) -> None:
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (inputs, targets), weight in join_uneven_inputs(batches[dist.get_rank(group)], group):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        (loss * weight * dist.get_world_size(group)).backward()
        optimizer.step()


def train_with_zero(model: nn.Module, batches: list[list[Batch]], group: Group) -> None:
    """Train with ZeRO, for which `Join` is wrong: an ended rank keeps its last gradient."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(model, process_group=group)
    optimizer_class = torch.optim.SGD
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, process_group=group, lr=0.1, momentum=0.9
    )
    for (inputs, targets), weight in join_uneven_inputs(batches[dist.get_rank(group)], group):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        (loss * weight * dist.get_world_size(group)).backward()
        optimizer.step()


def train_with_collectives(model: nn.Module, batches: list[list[Batch]], group: Group) -> None:
    """Normalize over all ranks, and use several other collectives in every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (inputs, targets), weight in join_uneven_inputs(batches[dist.get_rank(group)], group):

        def over_ranks(x: Tensor, weight: float = weight) -> Tensor:
            total: Tensor = with_gradients.all_reduce(x.mean(0) * weight, group=group)
            return total

        optimizer.zero_grad()
        (F.mse_loss(model(normalize(inputs, over_ranks)), targets) * weight).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        weights = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(weights, torch.tensor([weight]), group=group)
        assert math.isclose(sum(weights), 1, rel_tol=1e-6)
        first = next(model.parameters()).detach().clone()
        dist.broadcast(first, group_src=0, group=group)
        assert torch.equal(first, next(model.parameters()))


def train_truncated(model: nn.Module, batches: list[list[Batch]], group: Group) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (inputs, targets), weight in truncate_uneven_inputs(batches[dist.get_rank(group)], group):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average_gradients(model, group, weight=weight)
        optimizer.step()


def check_training(seed: int, group: Group) -> None:
    loops = (
        train_by_averaging,
        train_with_ddp,
        train_with_zero,
        train_with_collectives,
        train_truncated,
    )
    for loop in loops:
        fewest = 0 if loop is train_by_averaging else 1
        batches = all_batches(seed, dist.get_world_size(group), fewest)
        count_steps = min if loop is train_truncated else max
        expected = train_alone(batches, count_steps, normalized=loop is train_with_collectives)
        model = network()
        loop(model, batches, group)
        for own_value, other_value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(own_value.detach(), other_value, rtol=1e-9, atol=1e-12)


# --- other guarantees ---------------------------------------------------------------------------


def check_weights(group: Group) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(rank * 3 + 2))

    # Rank r has batches of 2 out of 3 r + 2 samples, one of them perhaps of 1.
    loader = DataLoader(Stream(), batch_size=2)
    steps_taken = list(join_uneven_inputs(loader, group))
    sizes = [[min(2, max(0, r * 3 + 2 - 2 * step)) for r in range(world_size)] for step in range(9)]
    sizes = [step for step in sizes if any(step)]
    assert [weight for _, weight in steps_taken] == [step[rank] / sum(step) for step in sizes]
    own = list(loader)
    for step, (batch, weight) in enumerate(steps_taken):
        assert torch.equal(batch, own[step] if step < len(own) else own[-1])
        assert (weight == 0) == (step >= len(own))
    equal_weights = [
        weight for _, weight in join_uneven_inputs(loader, group, size=lambda batch: 1)
    ]
    assert equal_weights == [bool(step[rank]) / sum(map(bool, step)) for step in sizes]
    assert list(join_uneven_inputs([], group)) == []
    assert len(list(truncate_uneven_inputs(loader, group))) == 1
    if world_size > 1:
        assert list(truncate_uneven_inputs([] if rank == 1 else own, group)) == []


def catch_error(steps: Iterator[Any]) -> BaseException:
    with pytest.raises((UsageError, PhalanxError, ZeroDivisionError)) as raised:
        list(steps)
    return raised.value


def check_errors(group: Group) -> None:
    """Check that errors are raised on all ranks, which can continue."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    last = world_size - 1
    batch = torch.ones(2)
    if world_size > 1:
        error = catch_error(join_uneven_inputs([] if rank == last else [batch], group))
        assert isinstance(error, UsageError)
        assert f"rank {last} of {world_size} had no batch and no example" in str(error)

    def failing() -> Iterator[Tensor]:
        yield batch
        if rank == last:
            raise ZeroDivisionError("of the loader")
        yield batch

    for loop in (join_uneven_inputs, truncate_uneven_inputs):
        error = catch_error(loop(failing(), group))
        if rank == last:
            assert str(error) == "of the loader"
        else:
            assert f"{loop.__name__}: rank {last} raised while it fetched the batch of step 2" in (
                str(error)
            )
    error = catch_error(join_uneven_inputs([batch if rank != last else "words"], group))
    assert ("str given, expected a batch with a tensor" in str(error)) == (rank == last)
    error = catch_error(
        join_uneven_inputs([batch], group, size=lambda batch: -1 if rank == last else 2)
    )
    assert ("size= returned -1" in str(error)) == (rank == last)
    error = catch_error(join_uneven_inputs([batch[:0]], group))
    assert "batches of 0 samples given on all ranks in step 1" in str(error)
    with pytest.raises(UsageError, match="int given, expected an iterable"):
        join_uneven_inputs(5, group)  # type: ignore[arg-type]


def check_means(seed: int, group: Group) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(seed)
    for samples in (1, 2, 3, 50):  # also fewer than ranks
        inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (samples,), generator=generator)
        data, model = TensorDataset(inputs, labels), network()
        sampler = EvaluationSampler(data, world_size=world_size, rank=rank)
        loss, correct = 0.0, torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            for images, classes in DataLoader(data, batch_size=3, sampler=sampler):
                outputs = model(images)
                loss += F.cross_entropy(outputs, classes, reduction="sum").item()
                correct += (outputs.argmax(1) == classes).sum()
            outputs = model(inputs)
        means = mean_over_ranks({"loss": loss, "correct": correct}, len(sampler), group)
        assert list(means) == ["loss", "correct"]
        assert means["correct"] == int((outputs.argmax(1) == labels).sum()) / samples
        expected = F.cross_entropy(outputs, labels).item()
        assert math.isclose(means["loss"], expected, rel_tol=1e-12)
    # A rank without samples is ignored, even if its total is NaN; counts are given by name.
    has_no_samples = rank == world_size - 1 and world_size > 1
    total, count = (math.nan, 0) if has_no_samples else (3.0 * (rank + 1), 2 * (rank + 1))
    assert mean_over_ranks(total, count, group) == 1.5
    both = mean_over_ranks({"a": 6, "b": 1}, {"b": rank + 1, "a": 4}, group)
    assert both == {"a": 1.5, "b": world_size / sum(range(1, world_size + 1))}
    with pytest.raises(UsageError, match="count 0 given for 'a' on all ranks"):
        mean_over_ranks({"a": 1.0}, 0, group)
    if world_size > 1:
        with pytest.raises(UsageError, match="different names on another"):
            mean_over_ranks({"a" if rank else "b": 1.0}, 1, group)


def check_pytorch(seed: int, group: Group) -> None:
    """Check that `Join` and `DistributedSampler` work as documented."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    batches = all_batches(seed, world_size, 1)
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for inputs, targets in batches[rank]:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    # The oracle: the sum of the gradients of ranks with data, divided by the world size.
    oracle = network()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(max(map(len, batches))):
        plain.zero_grad()
        for own in batches:
            if step < len(own):
                inputs, targets = own[step]
                (F.mse_loss(oracle(inputs), targets) / world_size).backward()
        plain.step()
    for own_value, other_value in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(own_value, other_value, rtol=1e-9, atol=1e-12)

    data = TensorDataset(torch.arange(world_size * 20))
    sampler = ResumableSampler(DistributedSampler(data, world_size, rank, seed=seed))
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        own = torch.cat([batch for (batch,) in DataLoader(data, batch_size=3, sampler=sampler)])
        every = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(every, own, group=group)
        orders.append(torch.stack(every, 1).flatten().tolist())
        assert sorted(orders[-1]) == list(range(len(data)))
    assert orders[0] != orders[1]


def check_all(seed: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for group in (dist.group.WORLD, gloo):
        check_training(seed, group)
        check_weights(group)
        check_errors(group)
        check_means(seed, group)
        check_pytorch(seed, group)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_on_phalanx_and_gloo(ranks: RankServer, world_size: int) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    ranks.run(world_size, check_all, seed)


def run_in_subgroup() -> None:
    subgroup = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        for call in (
            lambda: join_uneven_inputs([], subgroup),
            lambda: mean_over_ranks(1, 1, subgroup),
        ):
            with pytest.raises(UsageError, match="this rank is not a member of the group given"):
                call()
        return
    own = [torch.ones(dist.get_rank())] * dist.get_rank()
    assert len(list(join_uneven_inputs(own, subgroup))) == 2
    assert mean_over_ranks(1, dist.get_rank(), subgroup) == 2 / 3


def test_subgroup(ranks: RankServer) -> None:
    ranks.run(3, run_in_subgroup)


def leave_loop(reason: str) -> None:
    """Leave the loop on rank 1 in its second step; the others must not wait forever."""
    for step, _ in join_uneven_inputs(range(5), size=lambda step: 1):
        if dist.get_rank() == 1 and step == 1:
            if reason == "break":
                break
            raise ZeroDivisionError("of the loop")
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("reason", "message"), [("break", "rank 1"), ("exception", "of the loop")])
def test_rank_that_leaves_loop_is_named(ranks: RankServer, reason: str, message: str) -> None:
    results = ranks.start(3, leave_loop, reason).join()
    for rank in (0, 2):
        assert isinstance(results[rank].error, PhalanxError)
        assert "rank 1" in str(results[rank].error)
        assert message in str(results[rank].error)
