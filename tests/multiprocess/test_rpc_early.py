"""Large tensors, which are copied while their message is under way: what may happen meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc.current_agent import agent
from phalanx.rpc.shared_memory import sender
from tests.ranks import RankServer
from tests.rpc_training import little_address_space, worker
from tests.waiting import wait_for

SIZE = 2**17  # 512 KiB of float32: above the limit, and quick


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


# ---- functions that are called ----


def echo(value: Any) -> Any:
    return value


def total(*tensors: Tensor) -> float:
    return sum(float(each.double().sum()) for each in tensors)


def large(value: float) -> Tensor:
    return torch.full((SIZE,), value)


def leased() -> int:
    gc.collect()
    return agent().shm_sender.leased_count


def at_work() -> int:
    return agent()._reactor.threads.active_count


def all_returned(*workers: int) -> None:
    wait_for(lambda: leased() == 0 and all(rpc.rpc_sync(each, leased) == 0 for each in workers))


# ---- what happens in the middle of a copy ----

REAL = sender._Segment.write
GO_ON = threading.Event()


def instead(happens: Callable[[], None]) -> None:
    """Have something happen here just before the next copy of a large tensor."""

    def fill(segment: Any, block: int, tensor: Tensor) -> None:
        if tensor.numel() >= SIZE:
            sender._Segment.write = REAL  # type: ignore[method-assign]
            happens()
        REAL(segment, block, tensor)

    sender._Segment.write = fill  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_interrupted() -> None:
    raise KeyboardInterrupt


def pause() -> None:
    assert GO_ON.wait(30)
    GO_ON.clear()


def go_on() -> None:
    GO_ON.set()


# ---- tests ----


def send_and_change() -> None:
    """Who sends may change its tensors as soon as the call has returned."""
    fresh = torch.Generator().manual_seed(torch.seed() % 2**63)
    for _ in range(20):
        tensor = torch.randn(SIZE + 1, generator=fresh)
        views = tensor, tensor[1:], tensor[::2], tensor[:1000], tensor.bfloat16()
        copies = [each.clone() for each in views]
        futures = [rpc.rpc_async(1, echo, (each,)) for each in views]
        last = rpc.rpc_async(1, total, views)
        expected = total(*views)
        tensor.zero_()
        for future, copy in zip(futures, copies, strict=True):
            assert torch.equal(future.wait(), copy)
        assert last.wait() == expected
        assert torch.equal(rpc.rpc_sync(1, echo, (copies[0],)), copies[0])
    conjugate = torch.randn(SIZE, dtype=torch.complex64).conj()
    assert torch.equal(rpc.rpc_sync(1, echo, (conjugate,)), conjugate)
    del futures, last, future


def send_from_many_threads() -> None:
    wrong = list[int]()

    def work(number: int) -> None:
        for step in range(30):
            tensor = torch.full((SIZE + number,), float(number * 100 + step))
            if not torch.equal(rpc.rpc_sync(1 + step % 2, echo, (tensor,)), tensor):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert wrong == []


def send_what_cannot_be_sent() -> None:
    """The message fails after its first tensor has a block: the block is free again."""
    large = torch.ones(2**26)
    with little_address_space(large.nbytes // 2):
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(PhalanxError, match="no room for a tensor"):
                call(1, echo, ([torch.ones(SIZE), large],))
    assert leased() == 0


def as_one_of_three(function: Callable[[], None]) -> None:
    with worker() as rank:
        if rank == 0:
            function()
            all_returned(1, 2)


@pytest.mark.parametrize(
    "function", [send_and_change, send_from_many_threads, send_what_cannot_be_sent]
)
def test_what_is_sent_arrives(ranks: RankServer, function: Callable[[], None]) -> None:
    ranks.run(3, as_one_of_three, function)


def interrupted_while_it_asks() -> None:
    """The worker that was asked isn't held up, and nothing stays leased."""
    instead(be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync(1, total, (large(1), large(2)))
    instead(be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_async(1, total, (large(1), large(2)))
    all_returned(1)
    assert rpc.rpc_sync(1, total, (large(1),)) == SIZE


def interrupted_while_it_answers() -> None:
    """The caller hears of it."""
    for call in (rpc.rpc_sync, lambda *what: rpc.rpc_async(*what).wait()):
        rpc.rpc_sync(1, instead, (be_interrupted,))
        with pytest.raises(PhalanxError, match=r"tensors from worker 'w1' .* was interrupted"):
            call(1, large, (1.0,))
    all_returned(1)
    assert torch.equal(rpc.rpc_sync(1, large, (2.0,)), large(2))


def late_answers() -> None:
    """The call's timeout holds; what comes after it is let go."""
    for call in (rpc.rpc_sync, lambda *what, **how: rpc.rpc_async(*what, **how).wait()):
        rpc.rpc_sync(1, instead, (pause,))
        with pytest.raises(CallTimeout, match=r"large.* took longer than"):
            call(1, large, (1.0,), timeout=0.3)
        assert rpc.rpc_sync(1, total, (large(1),)) == SIZE
        rpc.rpc_sync(1, go_on)
        all_returned(1)


def late_requests() -> None:
    """Others are served meanwhile, and the request that is late holds one thread at most."""
    instead(pause)
    answers = list[float]()
    asker = threading.Thread(target=lambda: answers.append(rpc.rpc_sync(1, total, (large(1),))))
    asker.start()
    wait_for(lambda: sender._Segment.write is REAL)
    for _ in range(20):
        assert rpc.rpc_sync(1, total, (large(2),)) == 2 * SIZE
    wait_for(lambda: rpc.rpc_sync(1, at_work) <= 2)  # with the thread that executes this call
    assert answers == []
    go_on()
    asker.join(20)
    assert answers == [SIZE]


@pytest.mark.parametrize(
    "function",
    [interrupted_while_it_asks, interrupted_while_it_answers, late_answers, late_requests],
)
def test_copies_that_take_long_or_are_never_made(
    ranks: RankServer, function: Callable[[], None]
) -> None:
    ranks.run(3, as_one_of_three, function)


def ask_one_who_dies(is_mapped: bool) -> None:
    """Both calls say who has died, and another worker's death in a call holds nobody up."""
    if is_mapped:
        assert torch.equal(rpc.rpc_sync(1, large, (2.0,)), large(2))
        assert rpc.rpc_sync(2, ask) == SIZE
    rpc.rpc_sync(1, instead, (die,))
    future = rpc.rpc_async(1, large, (1.0,))
    with pytest.raises(PeerLost, match=r"worker 'w1' .*died.* waited for large"):
        rpc.rpc_sync(1, large, (1.0,))
    with pytest.raises(PeerLost, match=r"worker 'w1' .*died.* waited for large"):
        future.wait()
    rpc.rpc_sync(2, instead, (die,))
    with pytest.raises(PeerLost, match=r"worker 'w2' .*died.* waited for ask"):
        rpc.rpc_sync(2, ask)
    wait_for(lambda: agent()._reactor.threads.active_count == 0)
    assert leased() == 0


def ask() -> float:
    return float(rpc.rpc_sync(0, total, (large(1),)))


def as_one_of_three_who_die(is_mapped: bool) -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        ask_one_who_dies(is_mapped)
        rpc.shutdown(graceful=False)
    else:
        signal.pause()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_death_in_the_middle_of_a_copy(ranks: RankServer, is_mapped: bool) -> None:
    first, *others = ranks.start(3, as_one_of_three_who_die, is_mapped).join()
    assert first.value is None
    assert [each.code for each in others] == [-signal.SIGKILL] * 2
