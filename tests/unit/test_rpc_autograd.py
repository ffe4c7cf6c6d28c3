"""Backward passes through calls: random programs on several workers, against one process.

The workers are graphs in this process, whose calls are functions on other threads. That the very
same goes through real calls between processes is shown elsewhere (tests/multiprocess).
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
from phalanx.rpc.autograd.metadata import AutogradMetadata, Source, pack_metadata, unpack_metadata
from tests.rpc_worlds import LIMIT, Program, Workers, World, workers


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def program(seed: int, depth: int) -> Program:
    """Calculations, calls of other programs, and values left for later, at random."""

    def run(world: World, me: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        choose = random.Random(seed)
        values = [*arguments, *world.parameters[me]]
        for _ in range(choose.randint(3, 8)):
            kind, one, other = choose.random(), choose.choice(values), choose.choice(values)
            if kind < 0.2:
                values.append(one * other)
            elif kind < 0.35:
                values.append(torch.tanh(one) + other)
            elif kind < 0.45:
                values.append((one * 2).add_(other))
            elif kind < 0.55 and world.stores:
                world.stored[me].append(one)
            elif kind < 0.65 and world.stored[me]:
                values.append(choose.choice(world.stored[me]) + 0)
            elif depth:
                picked = [choose.choice(values) for _ in range(choose.randint(0, 3))]
                called = program(choose.getrandbits(32), depth - 1)
                values += world.call(me, choose.randrange(world.size), called, picked)
        return [choose.choice(values[-4:]) for _ in range(choose.randint(1, 3))]

    return run


def loss_of(world: World, seed: int, depth: int, me: int = 0) -> Tensor:
    outputs = program(seed, depth)(world, me, [])
    return torch.stack([(output * output.tanh()).sum() for output in outputs]).sum()


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 4), depth=st.integers(1, 4))
def test_gradients_equal_one_process(
    seed: int, size: int, depth: int, pool: ThreadPoolExecutor
) -> None:
    alone = World(size, seed)
    with workers(size, seed, pool) as together:
        losses = [loss_of(world, seed, depth) for world in (alone, together)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        check(alone, together, 0)
        assert all(parameter.grad is None for own in together.parameters[1:] for parameter in own)
        del loss, losses
        together.stored.clear()
        together.free()


@settings(max_examples=8)
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=4), depth=st.integers(1, 3))
def test_concurrent_trainers_do_not_mix(
    seeds: list[int], depth: int, pool: ThreadPoolExecutor
) -> None:
    def train(me: int) -> None:
        for _ in range(3):
            loss = loss_of(together, seeds[me], depth, me)
            if loss.requires_grad:
                loss.backward()

    with workers(len(seeds), 0, pool) as together:
        together.stores = False
        for trainer in [pool.submit(train, me) for me in range(len(seeds))]:
            trainer.result(LIMIT)
        for me, seed in enumerate(seeds):
            alone = World(len(seeds), 0)
            alone.stores = False
            loss = loss_of(alone, seed, depth, me)
            if loss.requires_grad:
                (3 * loss).backward()
            check(alone, together, me)
        del loss
        together.free()


def check(alone: World, together: Workers, me: int) -> None:
    """This worker called backward: its gradients are in `grad`, others' kept for it."""
    for worker, (own, others) in enumerate(zip(together.parameters, alone.parameters, strict=True)):
        kept = together.graphs[worker].gradients.peek(Root(me))
        for parameter, oracle in zip(own, others, strict=True):
            found = parameter.grad if worker == me else kept.get(parameter)
            zeros = torch.zeros_like(parameter)
            torch.testing.assert_close(
                zeros if found is None else found, zeros if oracle.grad is None else oracle.grad
            )


def test_a_graph_is_kept_where_asked_and_gone_else(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        weight = world.parameters[1][0]
        (result,) = world.call(0, 1, lambda world, me, given: [(weight * 3).square()], [])
        result.sum().backward(retain_graph=True)
        result.sum().backward()
        (found,) = world.graphs[1].gradients.take(Root(0), [weight])
        torch.testing.assert_close(found, 2 * 18 * weight.detach())
        with pytest.raises(RuntimeError, match=r"call the first with retain_graph=True"):
            result.sum().backward()
        assert world.graphs[1].gradients.take(Root(0), [weight]) == [None]


def test_without_a_backward_pass_all_is_freed(pool: ThreadPoolExecutor) -> None:
    with workers(3, 0, pool) as world:
        start = world.parameters[0][0] * 2

        def nested(world: World, me: int, given: Sequence[Tensor]) -> list[Tensor]:
            return world.call(1, 2, lambda world, me, given: [given[0].tanh()], [given[0] * 2])

        (result,) = world.call(0, 1, nested, [start])
        assert [graph.pending for graph in world.graphs] == [2, 4, 2]
        del result
        world.free()


def test_a_step_frees_all_without_further_messages(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        start, (weight, _) = world.parameters[0][0], world.parameters[1]

        def once(world: World, me: int, given: Sequence[Tensor]) -> list[Tensor]:
            return [(given[0] * weight).exp()]

        for _ in range(3):
            (result,) = world.call(0, 1, once, [start * 2])
            result.sum().backward()
            del result
            assert [graph.pending for graph in world.graphs] == [0, 0]
        assert world.told == 0


def test_in_no_grad_nothing_is_recorded(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world, torch.no_grad():
        # The other thread records: what comes is a plain tensor all the same.
        (result,) = world.call(
            0, 1, lambda world, me, given: [given[0] * world.parameters[1][0]], [torch.ones(3)]
        )
        assert not result.requires_grad
        world.free()


def test_what_is_changed_in_place_after_it_was_sent(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        weight = world.parameters[0][0]
        start = weight * 2
        (result,) = world.call(0, 1, lambda world, me, given: [given[0].mul_(5)], [start])
        start.mul_(100)
        (result.add_(1).sum() + start.sum()).backward()
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 210.0))


def test_sparse_gradients_stay_sparse(pool: ThreadPoolExecutor) -> None:
    table = nn.EmbeddingBag(1000, 3, mode="sum", sparse=True)
    rows = torch.tensor([[3, 999], [3, 3]])
    with workers(2, 0, pool) as world:
        (bags,) = world.call(0, 1, lambda world, me, given: [table(given[0])], [rows])
        (bags * 2).sum().backward()
        # The table itself travels to where it is looked up.
        (there,) = world.call(0, 1, lambda world, me, given: [table.weight], [])
        nn.functional.embedding(rows, there, sparse=True).sum().backward()
        (found,) = world.graphs[1].gradients.take(Root(0), [table.weight])
    assert found is not None
    assert found.is_sparse
    assert found._nnz() <= 8
    nn.functional.embedding_bag(rows, table.weight, mode="sum").sum().mul(3).backward()
    torch.testing.assert_close(found.to_dense(), table.weight.grad)


def test_a_gradient_of_a_gradient_is_refused(pool: ThreadPoolExecutor) -> None:
    with workers(2, 0, pool) as world:
        start = torch.randn(3, dtype=torch.float64, requires_grad=True)
        (result,) = world.call(0, 1, lambda world, me, given: [given[0] ** 3], [start])
        (first,) = torch.autograd.grad(result.sum(), start, create_graph=True)
        torch.testing.assert_close(first, 3 * start.detach() ** 2)
        with pytest.raises(RuntimeError, match="don't go through calls"):
            first.sum().backward()


def test_who_is_dead_holds_nothing(pool: ThreadPoolExecutor) -> None:
    with workers(3, 0, pool) as world:
        weight = world.parameters[1][0]
        for worker in (0, 2):
            results = [
                world.call(worker, 1, lambda world, me, given: [weight * 2], [])[0]
                for _ in range(2)
            ]
            results[0].sum().backward()
        world.graphs[1].forget(0)
        assert world.graphs[1].pending == 1
        assert not world.graphs[1].gradients.peek(Root(0))
        assert world.graphs[1].gradients.peek(Root(2)).keys() == {weight}
        del results
        world.free()


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
        (found,) = gradients.take(Root(1), [parameter])
        assert found is not None
        assert torch.equal(found, oracle + parts[0][1])
        assert gradients.take(Root(1), [parameter]) == [None]


@given(
    number=st.integers(0, 2**64 - 1),
    indices=st.sets(st.integers(0, 99), min_size=1).map(tuple),
    reach=st.lists(
        st.builds(
            Source, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
        )
    ).map(tuple),
)
def test_notes(number: int, indices: tuple[int, ...], reach: tuple[Source, ...]) -> None:
    note = AutogradMetadata(number, indices, reach)
    assert unpack_metadata(pack_metadata(note), 100) == note
    for wrong in (pack_metadata(note)[:-1], pack_metadata(note) + b"\0"):
        with pytest.raises(ValueError, match="a note of"):
            unpack_metadata(wrong, 100)
    with pytest.raises(ValueError, match="a message of"):
        unpack_metadata(pack_metadata(note), max(indices))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_note_or_refused(data: bytes) -> None:
    try:
        unpack_metadata(data, 3)
    except ValueError:
        return
    assert len(data) >= 20
