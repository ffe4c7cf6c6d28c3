"""Asynchronous operations: works, futures, order, threads, object collectives, many groups."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.backend import threads as backend_threads
from phalanx.errors import CollectiveMismatch, CollectiveTimeout, UsageError
from tests.fault_injection.leaks import settled_resources
from tests.ranks import RankServer


def a_work_of_every_operation() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((10,), float(rank))
    outputs = [torch.zeros(10) for _ in range(world_size)]
    parts = [torch.zeros(10) for _ in range(world_size)]
    reduced, scattered = torch.ones(10), torch.zeros(10)
    at_root: Any = outputs if rank == 0 else None
    works = {
        "all_reduce": (dist.all_reduce(reduced, async_op=True), [reduced]),
        "all_gather": (dist.all_gather(parts, mine, async_op=True), parts),
        "gather": (dist.gather(mine, at_root, 0, async_op=True), at_root or [mine]),
        "scatter": (dist.scatter(scattered, at_root, 0, async_op=True), [scattered]),
        "barrier": (dist.barrier(async_op=True), []),
    }
    for name, (work, expected) in works.items():
        assert work is not None, name
        assert work.wait() is True, name
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name
        assert [id(tensor) for tensor in work.result()] == [id(t) for t in expected], name
        value = work.get_future().wait()
        assert len(value) == len(expected), name
        assert all(map(torch.equal, value, expected)), name
    assert (reduced == world_size).all()
    assert (scattered == rank).all()


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_a_work_of_every_operation(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, a_work_of_every_operation)


def not_completed_before_the_peer_enters() -> None:
    if dist.get_rank() == 0:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        received = torch.zeros(1)
        message = dist.irecv(received, 1)
        for pending in (work, message):
            assert not pending.is_completed()
            assert not pending.is_success()
        assert tensor.item() == 1
        # As on Gloo, this ends only the wait; but the error names the missing rank.
        with pytest.raises(CollectiveTimeout) as caught:
            work.wait(timedelta(milliseconds=20))
        text = str(caught.value)
        assert re.search(r"\] all_reduce #1 float32\[1\] SUM at test_backend_works\.py:\d+: ", text)
        assert re.search(r"rank 0 waited for rank 1 \(pid \d+\) until the timeout of 0\.02 s", text)
        assert re.search(r"wait, \d\.\d s after the call; rank 1 is in recv .* for \d", text)
        # Another operation is queued behind it.
        second = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(CollectiveTimeout, match=r"queued all_reduce float32\[1\].* for rank 1"):
            second.wait(timedelta(milliseconds=20))
        # The other rank enters only now: rank 0 has checked.
        dist.send(torch.zeros(1), 1, tag=1)
        work.wait()
        second.wait()
        message.wait()
        assert (tensor.item(), received.item()) == (2, 7)
        assert work.is_completed()
        assert message.is_completed()
    else:
        dist.recv(torch.zeros(1), 0, tag=1)
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        dist.send(torch.full((1,), 7.0), 0)


def test_a_work_is_not_completed_before_the_peer_enters(ranks: RankServer) -> None:
    ranks.run(2, not_completed_before_the_peer_enters)


def start_in_backward(kind: str) -> None:
    """Start an all_reduce in a backward pass of rank 0, which sends the others a message then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    native: Any = dist.group.WORLD
    if rank != 0:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(reduced := torch.ones(100))
        assert (reduced == size).all()
        dist.barrier()
        return
    if kind == "end":  # a slow machine may reach the end after the usual bound
        backend_threads._DEFERRAL_SECONDS = 60.0
    threads: list[threading.Thread] = []
    works: list[dist.Work] = []
    reduced = torch.ones(100)

    def start(_gradient: torch.Tensor) -> None:
        work = dist.all_reduce(reduced, async_op=True)
        assert work is not None
        works.append(work)
        work.get_future().then(lambda _: threads.append(threading.current_thread()))
        assert native._membership.pending == 1
        for peer in range(1, size):
            dist.send(torch.zeros(1), peer)
        if kind == "wait":
            work.wait()
        elif kind == "poll":
            deadline = time.monotonic() + 60
            while not work.is_completed():
                assert time.monotonic() < deadline
        elif kind == "fail":
            raise ZeroDivisionError

    values = torch.ones(3, requires_grad=True)
    values.register_hook(start)
    with pytest.raises(ZeroDivisionError) if kind == "fail" else contextlib.nullcontext():
        values.sum().backward()
    if kind == "end":
        assert works[0].is_completed()
        assert threads == [threading.main_thread()]
    dist.barrier()
    works[0].wait()
    assert (reduced == size).all()
    assert kind == "end" or threads != [threading.main_thread()]


@pytest.mark.parametrize("kind", ["end", "wait", "poll", "fail"])
def test_small_operations_of_a_backward_pass(ranks: RankServer, kind: str) -> None:
    """They run at its end in its thread, unless something waits for them before."""
    ranks.run(3, start_in_backward, kind)


def enter_last(kind: str) -> None:
    """Enter last: a small operation runs inline, and its wait raises if it fails."""
    native: Any = dist.group.WORLD
    if dist.get_rank() != 1:
        if kind == "other":
            with pytest.raises(CollectiveMismatch):
                dist.barrier()
        else:
            dist.all_reduce(tensor := torch.ones(100))
            assert (tensor == dist.get_world_size()).all()
            dist.barrier()
        return
    deadline = time.monotonic() + 60
    while not native._membership.native.is_awaited():
        assert time.monotonic() < deadline
    work = dist.all_reduce(tensor := torch.ones(100), async_op=True)
    assert work is not None
    assert work.is_completed()
    if kind == "other":
        with pytest.raises(CollectiveMismatch, match=r"\] all_reduce #1 .* at test_backend_works"):
            work.wait()
        return
    assert (tensor == dist.get_world_size()).all()
    assert work.get_future().wait()[0] is tensor
    assert native._membership.collective_thread._thread is None  # not started, since not needed
    dist.barrier()  # the recorder has the caller's thread, and its line
    done = {each["kind"]: each for each in native._membership.native.flight_recorder(1, 8)["done"]}
    assert done["barrier"]["thread"] == done["all_reduce"]["thread"] == 0
    assert done["barrier"]["site"] != done["all_reduce"]["site"]


@pytest.mark.parametrize("kind", ["same", "other"])
@pytest.mark.parametrize("world_size", (2, 4))
def test_last_rank_runs_inline(ranks: RankServer, world_size: int, kind: str) -> None:
    ranks.run(world_size, enter_last, kind)


def callbacks() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1000,), float(rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    doubled = halved.then(lambda done: done.value() * 4)
    total = sum(range(world_size))
    assert (doubled.wait() == 2 * total).all()
    assert (halved.wait() == total / 2).all()
    # Requested after the end.
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.get_future().then(lambda done: done.value()[0].item()).wait() == world_size
    # An error of a callback says where it was raised.
    failed = work.get_future().then(lambda done: done.value()[0].nothing)
    with pytest.raises(AttributeError, match="nothing") as caught:
        failed.then(lambda done: done.wait()).wait()
    if sys.version_info >= (3, 11):
        assert 'test_backend_works.py", line' in caught.value.__notes__[0]
    # Futures of messages.
    seen = threading.Event()
    received = torch.zeros(3)
    message = dist.irecv(received, (rank - 1) % world_size)
    message.get_future().add_done_callback(lambda _: seen.set())
    future = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world_size).get_future()
    future.wait()
    assert seen.wait(60)
    assert (received == (rank - 1) % world_size).all()
    assert torch.futures.collect_all([work.get_future(), future]).wait()


@pytest.mark.parametrize("world_size", (2, 3))
def test_callbacks_of_futures(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, callbacks)


def run_in_order() -> None:
    """Each operation reads the result of the previous one; a blocking one follows queued ones."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for size in (1, 100_000):
        tensor = torch.full((size,), float(rank + 1))
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
        dist.all_reduce(tensor)
        assert (tensor == sum(range(1, world_size + 1)) * world_size**5).all()
        assert all(work.is_completed() for work in works)
        works = [dist.broadcast(tensor, root, async_op=True) for root in range(world_size)]
        dist.barrier()
        assert all(work.is_completed() for work in works)
        outputs = [torch.zeros(size) for _ in range(world_size)]
        dist.all_gather(outputs, tensor)
        for work in reversed(works):
            work.wait()


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_a_blocking_operation_runs_after_queued_ones(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, run_in_order)


def dropped_works() -> None:
    """The tensors of operations whose work is dropped live until the operation has ended."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in range(200):
        dist.isend(torch.full((5000,), float(number)), (rank + 1) % world_size)
    gc.collect()
    for number in range(200):
        received = torch.zeros(5000)
        dist.recv(received, (rank - 1) % world_size)
        assert (received == number).all()
    for _ in range(50):
        dist.all_reduce(torch.ones(5000), async_op=True)
        dist.broadcast(torch.full((50, 100), float(rank)).t(), 0, async_op=True)
    gc.collect()
    dist.barrier()


def test_dropped_works(ranks: RankServer) -> None:
    ranks.run(3, dropped_works)


def memory_is_freed() -> None:
    """A finished operation keeps no tensor alive."""
    alive = []
    for async_op in (False, True):
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=async_op)
        if work is not None:
            work.wait()
        alive.append(weakref.ref(tensor))
        del work, tensor
    peer = 1 - dist.get_rank()
    for _ in range(3):
        sent, received = torch.ones(1000), torch.ones(1000)
        works = [dist.irecv(received, peer), dist.isend(sent, peer)]
        for work in works:
            work.wait()
        alive += [weakref.ref(sent), weakref.ref(received)]
        del works, work, sent, received
    dist.barrier()
    deadline = time.monotonic() + 10
    while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


def test_finished_operations_keep_no_memory(ranks: RankServer) -> None:
    ranks.run(2, memory_is_freed)


def objects() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def of(number: int) -> Any:
        return {"rank": number, "text": "x" * (number * 50_000), "tensor": torch.arange(number)}

    def same(one: Any, other: Any) -> bool:
        return (
            one["rank"] == other["rank"]
            and one["text"] == other["text"]
            and torch.equal(one["tensor"], other["tensor"])
        )

    gathered = [None] * world_size
    dist.all_gather_object(gathered, of(rank))
    assert all(same(gathered[number], of(number)) for number in range(world_size))
    for root in range(world_size):
        items = [of(root), "second", None] if rank == root else [None] * 3
        dist.broadcast_object_list(items, src=root)
        assert same(items[0], of(root))
        assert items[1:] == ["second", None]
        found = [None] * world_size if rank == root else None
        dist.gather_object(of(rank), found, dst=root)
        if found is not None:
            assert all(same(found[number], of(number)) for number in range(world_size))
        out = [None]
        inputs = [of(number) for number in range(world_size)] if rank == root else None
        dist.scatter_object_list(out, inputs, src=root)
        assert same(out[0], of(rank))
    if world_size > 1:
        received: list[Any] = [None]
        if rank == 0:
            dist.send_object_list([of(2)], dst=1)
        elif rank == 1:
            dist.recv_object_list(received, src=0)
            assert same(received[0], of(2))


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_object_collectives(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, objects)


def threads() -> None:
    """Four threads exchange messages while the main thread runs collectives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    errors: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for number in range(100):
                size = (1, 100, 5000, 70_000)[(tag + number) % 4]
                sent = torch.full((size,), rank * 1000 + tag * 100.0 + number)
                received = torch.zeros(size)
                if tag % 2:
                    works = [dist.isend(sent, right, tag=tag), dist.irecv(received, left, tag=tag)]
                    for work in works:
                        work.wait()
                elif rank == 0:
                    dist.send(sent, right, tag=tag)
                    dist.recv(received, left, tag=tag)
                else:
                    dist.recv(received, left, tag=tag)
                    dist.send(sent, right, tag=tag)
                assert (received == left * 1000 + tag * 100.0 + number).all()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in started:
        thread.start()
    steps = 0
    while True:
        tensor = torch.full((steps % 7 * 1000 + 1,), float(rank))
        dist.all_reduce(tensor, async_op=bool(steps % 2))
        dist.barrier()
        assert (tensor == sum(range(world_size))).all()
        steps += 1
        # All ranks must agree on whether to continue.
        going = torch.tensor([float(any(thread.is_alive() for thread in started))])
        dist.all_reduce(going, dist.ReduceOp.MAX)
        if not going.item() and steps >= 100:
            break
    for thread in started:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("world_size", (2, 3))
def test_messages_from_several_threads(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, threads)


def many_groups() -> None:
    """Groups leave no descriptor, mapping or thread behind."""
    rank = dist.get_rank()

    def use_a_group(number: int) -> None:
        members = [[0, 1, 2], [0, 1], [1, 2], [2]][number % 4]
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(number * 100)
            dist.all_reduce(tensor, group=group)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            assert (tensor == len(members) ** 2).all()
            if len(members) > 1:
                place = dist.get_rank(group)
                peer = members[(place + 1) % len(members)]
                dist.isend(tensor, peer, group)
                dist.recv(tensor, members[place - 1], group)
            dist.destroy_process_group(group)

    for number in range(4):
        use_a_group(number)
    dist.barrier()
    before = settled_resources(None)
    for number in range(50):
        use_a_group(number)
    dist.barrier()
    assert not settled_resources(before).exceeds(before)


def test_fifty_groups_leave_nothing(ranks: RankServer) -> None:
    ranks.run(3, many_groups)


def many_groups_at_once() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group() for _ in range(20)]
    tensors = [torch.full((1000,), float(rank)) for _ in groups]
    # Different groups may be used in a different order on each rank.
    order = range(20) if rank == 0 else reversed(range(20))
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    assert all((tensor == 1).all() for tensor in tensors)


def test_groups_are_independent(ranks: RankServer) -> None:
    ranks.run(2, many_groups_at_once)


def query_group() -> None:
    group = dist.group.WORLD
    assert dist.get_backend() == "phalanx"
    assert group.name() == "phalanx"
    assert (group.rank(), group.size()) == (dist.get_rank(), 2)
    named = dist.new_group(group_desc="pair", timeout=timedelta(seconds=7))
    assert dist.get_backend(named) == "phalanx"
    assert named.group_name
    dist.barrier(named)
    with pytest.raises(
        UsageError, match=r"tensor \d of the list is float32\[3\], expected float32\[2\]"
    ):
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(2))


def test_queries_of_pytorch(ranks: RankServer) -> None:
    ranks.run(2, query_group)
