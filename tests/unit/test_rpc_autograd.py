"""Backward passes through calls: random programs on several workers, compared with one process.

The workers are graphs in this process, whose calls run on other threads. tests/multiprocess covers
the same with calls between processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.rpc.autograd.gradients import Gradients, Root
from phalanx.rpc.autograd.nodes import AutogradMetadata, Source, pack_metadata, unpack_metadata
from tests.rpc_worlds import LIMIT, Program, SimulatedWorkers, SingleProcess, workers


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def program(seed: int, depth: int) -> Program:
    """Return a random program of calculations, calls of other programs and stored values."""

    def run(world: SingleProcess, rank: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        choose = random.Random(seed)
        values = [*arguments, *world.parameters[rank]]
        for _ in range(choose.randint(3, 8)):
            kind, first, second = choose.random(), choose.choice(values), choose.choice(values)
            if kind < 0.2:
                values.append(first * second)
            elif kind < 0.35:
                values.append(torch.tanh(first) + second)
            elif kind < 0.45:
                values.append((first * 2).add_(second))
            elif kind < 0.55 and world.stores:
                world.stored[rank].append(first)
            elif kind < 0.65 and world.stored[rank]:
                values.append(choose.choice(world.stored[rank]) + 0)
            elif depth:
                inputs = [choose.choice(values) for _ in range(choose.randint(0, 3))]
                callee = program(choose.getrandbits(32), depth - 1)
                values += world.call(rank, choose.randrange(world.size), callee, inputs)
        return [choose.choice(values[-4:]) for _ in range(choose.randint(1, 3))]

    return run


def compute_loss(world: SingleProcess, seed: int, depth: int, rank: int = 0) -> Tensor:
    outputs = program(seed, depth)(world, rank, [])
    return torch.stack([(output * output.tanh()).sum() for output in outputs]).sum()


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 4), depth=st.integers(1, 4))
def test_gradients_match_one_process(
    seed: int, size: int, depth: int, pool: ThreadPoolExecutor
) -> None:
    single = SingleProcess(size, seed)
    with workers(size, seed, pool) as distributed:
        losses = [compute_loss(world, seed, depth) for world in (single, distributed)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        check_gradients(single, distributed, 0)
        assert all(
            parameter.grad is None for own in distributed.parameters[1:] for parameter in own
        )
        del loss, losses
        distributed.stored.clear()
        distributed.wait_until_freed()


@settings(max_examples=8)
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=4), depth=st.integers(1, 3))
def test_concurrent_trainers_are_separate(
    seeds: list[int], depth: int, pool: ThreadPoolExecutor
) -> None:
    def train(rank: int) -> None:
        for _ in range(3):
            loss = compute_loss(distributed, seeds[rank], depth, rank)
            if loss.requires_grad:
                loss.backward()

    with workers(len(seeds), 0, pool) as distributed:
        distributed.stores = False
        for trainer in [pool.submit(train, rank) for rank in range(len(seeds))]:
            trainer.result(LIMIT)
        for rank, seed in enumerate(seeds):
            single = SingleProcess(len(seeds), 0)
            single.stores = False
            loss = compute_loss(single, seed, depth, rank)
            if loss.requires_grad:
                (3 * loss).backward()
            check_gradients(single, distributed, rank)
        del loss
        distributed.wait_until_freed()


def check_gradients(single: SingleProcess, distributed: SimulatedWorkers, rank: int) -> None:
    """Check the gradients after worker `rank` called backward: in `grad`, or kept for it."""
    for worker, (own, others) in enumerate(
        zip(distributed.parameters, single.parameters, strict=True)
    ):
        kept = distributed.graphs[worker].gradients.peek(Root(rank))
        for parameter, oracle in zip(own, others, strict=True):
            gradient = parameter.grad if worker == rank else kept.get(parameter)
            zeros = torch.zeros_like(parameter)
            torch.testing.assert_close(
                zeros if gradient is None else gradient,
                zeros if oracle.grad is None else oracle.grad,
            )


def test_retain_graph(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        weight = world.parameters[1][0]
        (result,) = world.call(0, 1, lambda world, rank, given: [(weight * 3).square()], [])
        result.sum().backward(retain_graph=True)
        result.sum().backward()
        (gradient,) = world.graphs[1].gradients.take(Root(0), [weight])
        torch.testing.assert_close(gradient, 2 * 18 * weight.detach())
        with pytest.raises(RuntimeError, match=r"call the first with retain_graph=True"):
            result.sum().backward()
        assert world.graphs[1].gradients.take(Root(0), [weight]) == [None]


def test_graph_is_freed_without_a_backward_pass(pool: ThreadPoolExecutor) -> None:
    with workers(3, 0, pool) as world:
        start = world.parameters[0][0] * 2

        def nested(world: SingleProcess, rank: int, given: Sequence[Tensor]) -> list[Tensor]:
            return world.call(1, 2, lambda world, rank, given: [given[0].tanh()], [given[0] * 2])

        (result,) = world.call(0, 1, nested, [start])
        assert [graph.pending for graph in world.graphs] == [2, 4, 2]
        del result
        world.wait_until_freed()


def test_backward_frees_the_graph_without_more_messages(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        start, (weight, _) = world.parameters[0][0], world.parameters[1]

        def multiply(world: SingleProcess, rank: int, given: Sequence[Tensor]) -> list[Tensor]:
            return [(given[0] * weight).exp()]

        for _ in range(3):
            (result,) = world.call(0, 1, multiply, [start * 2])
            result.sum().backward()
            del result
            assert [graph.pending for graph in world.graphs] == [0, 0]
        assert world.release_count == 0


def test_no_grad(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world, torch.no_grad():
        # The other thread records gradients, but the received tensor is a plain one.
        (result,) = world.call(
            0, 1, lambda world, rank, given: [given[0] * world.parameters[1][0]], [torch.ones(3)]
        )
        assert not result.requires_grad
        world.wait_until_freed()


def test_in_place_changes_after_sending(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        weight = world.parameters[0][0]
        start = weight * 2
        (result,) = world.call(0, 1, lambda world, rank, given: [given[0].mul_(5)], [start])
        start.mul_(100)
        (result.add_(1).sum() + start.sum()).backward()
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 210.0))


def test_sparse_gradients_stay_sparse(pool: ThreadPoolExecutor) -> None:
    table = nn.EmbeddingBag(1000, 3, mode="sum", sparse=True)
    rows = torch.tensor([[3, 999], [3, 3]])
    with workers(2, 0, pool) as world:
        (bags,) = world.call(0, 1, lambda world, rank, given: [table(given[0])], [rows])
        (bags * 2).sum().backward()
        # The table itself is sent to the caller, which looks up the rows.
        (weight,) = world.call(0, 1, lambda world, rank, given: [table.weight], [])
        nn.functional.embedding(rows, weight, sparse=True).sum().backward()
        (gradient,) = world.graphs[1].gradients.take(Root(0), [table.weight])
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient._nnz() <= 8
    nn.functional.embedding_bag(rows, table.weight, mode="sum").sum().mul(3).backward()
    torch.testing.assert_close(gradient.to_dense(), table.weight.grad)


def test_second_derivatives_are_rejected(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        start = torch.randn(3, dtype=torch.float64, requires_grad=True)
        (result,) = world.call(0, 1, lambda world, rank, given: [given[0] ** 3], [start])
        (first,) = torch.autograd.grad(result.sum(), start, create_graph=True)
        torch.testing.assert_close(first, 3 * start.detach() ** 2)
        with pytest.raises(RuntimeError, match="do not pass through calls"):
            first.sum().backward()


def test_graphs_of_a_dead_worker_are_freed(pool: ThreadPoolExecutor) -> None:
    with workers(3, 0, pool) as world:
        weight = world.parameters[1][0]
        for worker in (0, 2):
            results = [
                world.call(worker, 1, lambda world, rank, given: [weight * 2], [])[0]
                for _ in range(2)
            ]
            results[0].sum().backward()
        world.graphs[1].forget(0)
        assert world.graphs[1].pending == 1
        assert not world.graphs[1].gradients.peek(Root(0))
        assert world.graphs[1].gradients.peek(Root(2)).keys() == {weight}
        del results
        world.wait_until_freed()


def test_sums_do_not_depend_on_the_order_of_calls() -> None:
    parts = [((order,), torch.randn(5) * 10.0**order) for order in range(5)]
    parameter = torch.zeros(5, requires_grad=True)
    oracle = torch.zeros(5)
    for _, part in reversed(parts):
        oracle += part
    for seed in range(10):
        gradients = Gradients()
        for path, part in random.Random(seed).sample(parts, len(parts)):
            gradients.add(Root(1), 7, path, [(parameter, part.clone())])
        gradients.add(Root(1), 8, (0,), [(parameter, parts[0][1].clone())])
        (gradient,) = gradients.take(Root(1), [parameter])
        assert gradient is not None
        assert torch.equal(gradient, oracle + parts[0][1])
        assert gradients.take(Root(1), [parameter]) == [None]


@given(
    number=st.integers(0, 2**64 - 1),
    indices=st.sets(st.integers(0, 99), min_size=1).map(tuple),
    dependencies=st.lists(
        st.builds(
            Source, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
        )
    ).map(tuple),
)
def test_metadata(number: int, indices: tuple[int, ...], dependencies: tuple[Source, ...]) -> None:
    metadata = AutogradMetadata(number, indices, dependencies)
    assert unpack_metadata(pack_metadata(metadata), 100) == metadata
    for invalid in (pack_metadata(metadata)[:-1], pack_metadata(metadata) + b"\0"):
        with pytest.raises(ValueError, match="metadata of"):
            unpack_metadata(invalid, 100)
    with pytest.raises(ValueError, match="a message with"):
        unpack_metadata(pack_metadata(metadata), max(indices))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_metadata_or_rejected(data: bytes) -> None:
    try:
        unpack_metadata(data, 3)
    except ValueError:
        return
    assert len(data) >= 20
