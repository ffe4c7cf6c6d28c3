"""Large tensors, which are copied while their message is in flight, and failures meanwhile."""

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

from phalanx import _native, rpc
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.rpc import shared_memory
from phalanx.rpc.agent import agent
from tests.ranks import RankServer
from tests.rpc_training import limit_address_space, worker
from tests.waiting import wait_for

SIZE = 2**17  # 512 KiB of float32: above the limit for deferred copies


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


def leased_count() -> int:
    gc.collect()
    return agent().shm_sender.leased_count


def active_threads() -> int:
    return agent().reactor.threads.active_count


def wait_until_all_returned(*workers: int) -> None:
    wait_for(
        lambda: (
            leased_count() == 0 and all(rpc.rpc_sync(each, leased_count) == 0 for each in workers)
        )
    )


# ---- events during a copy ----

REAL = shared_memory._write
RESUME = threading.Event()


def inject_before_copy(action: Callable[[], None]) -> None:
    """Call a function in this process just before the next copy of a large tensor."""

    def write(segment: _native.LeaseSegment, block: int, lease: int, tensor: Tensor) -> None:
        if tensor.numel() >= SIZE:
            shared_memory._write = REAL
            action()
        REAL(segment, block, lease, tensor)

    shared_memory._write = write


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def pause() -> None:
    assert RESUME.wait(60)
    RESUME.clear()


def resume() -> None:
    RESUME.set()


# ---- tests ----


def send_and_change() -> None:
    """The sender may change its tensors as soon as the call has returned."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**63)
    for _ in range(20):
        tensor = torch.randn(SIZE + 1, generator=generator)
        views = tensor, tensor[1:], tensor[::2], tensor[:1000], tensor.bfloat16()
        copies = [each.clone() for each in views]
        futures = [rpc.rpc_async(1, echo, (each,)) for each in views]
        last_future = rpc.rpc_async(1, total, views)
        expected = total(*views)
        tensor.zero_()
        for future, copy in zip(futures, copies, strict=True):
            assert torch.equal(future.wait(), copy)
        assert last_future.wait() == expected
        assert torch.equal(rpc.rpc_sync(1, echo, (copies[0],)), copies[0])
    conjugate = torch.randn(SIZE, dtype=torch.complex64).conj()
    assert torch.equal(rpc.rpc_sync(1, echo, (conjugate,)), conjugate)
    del futures, last_future, future


def send_from_many_threads() -> None:
    failed = list[int]()

    def work(number: int) -> None:
        for step in range(30):
            tensor = torch.full((SIZE + number,), float(number * 100 + step))
            if not torch.equal(rpc.rpc_sync(1 + step % 2, echo, (tensor,)), tensor):
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failed == []


def send_too_large_tensor() -> None:
    """If a message fails after its first tensor has a block, the block is freed."""
    large = torch.ones(2**26)
    with limit_address_space(large.nbytes // 2):
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(PhalanxError, match="not enough memory to send a tensor"):
                call(1, echo, ([torch.ones(SIZE), large],))
    assert leased_count() == 0


def run_as_one_of_three(function: Callable[[], None]) -> None:
    with worker() as rank:
        if rank == 0:
            function()
            wait_until_all_returned(1, 2)


@pytest.mark.parametrize(
    "function", [send_and_change, send_from_many_threads, send_too_large_tensor]
)
def test_sent_tensors_arrive(ranks: RankServer, function: Callable[[], None]) -> None:
    ranks.run(3, run_as_one_of_three, function)


def interrupt_request() -> None:
    """The callee is not blocked, and nothing stays leased."""
    inject_before_copy(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync(1, total, (large(1), large(2)))
    inject_before_copy(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_async(1, total, (large(1), large(2)))
    wait_until_all_returned(1)
    assert rpc.rpc_sync(1, total, (large(1),)) == SIZE


def interrupt_answer() -> None:
    """The caller gets an error."""
    for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
        rpc.rpc_sync(1, inject_before_copy, (interrupt,))
        with pytest.raises(PhalanxError, match=r"tensors from worker 'w1' .* was interrupted"):
            call(1, large, (1.0,))
    wait_until_all_returned(1)
    assert torch.equal(rpc.rpc_sync(1, large, (2.0,)), large(2))


def delay_answer() -> None:
    """The timeout of the call holds; the late answer is dropped."""
    for call in (rpc.rpc_sync, lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()):
        rpc.rpc_sync(1, inject_before_copy, (pause,))
        with pytest.raises(CallTimeout, match=r"large.* took longer than"):
            call(1, large, (1.0,), timeout=0.3)
        assert rpc.rpc_sync(1, total, (large(1),)) == SIZE
        rpc.rpc_sync(1, resume)
        wait_until_all_returned(1)


def delay_request() -> None:
    """Other requests are served meanwhile; the late request occupies at most one thread."""
    inject_before_copy(pause)
    answers = list[float]()
    caller = threading.Thread(target=lambda: answers.append(rpc.rpc_sync(1, total, (large(1),))))
    caller.start()
    wait_for(lambda: shared_memory._write is REAL)
    for _ in range(20):
        assert rpc.rpc_sync(1, total, (large(2),)) == 2 * SIZE
    # One more is the thread that executes this call.
    wait_for(lambda: rpc.rpc_sync(1, active_threads) <= 2)
    assert answers == []
    resume()
    caller.join(60)
    assert answers == [SIZE]


@pytest.mark.parametrize(
    "function",
    [interrupt_request, interrupt_answer, delay_answer, delay_request],
)
def test_slow_and_interrupted_copies(ranks: RankServer, function: Callable[[], None]) -> None:
    ranks.run(3, run_as_one_of_three, function)


def call_dying_workers(is_mapped: bool) -> None:
    """Both calls name the dead worker; another worker's death during a call blocks no worker."""
    if is_mapped:
        assert torch.equal(rpc.rpc_sync(1, large, (2.0,)), large(2))
        assert rpc.rpc_sync(2, call_back) == SIZE
    rpc.rpc_sync(1, inject_before_copy, (die,))
    future = rpc.rpc_async(1, large, (1.0,))
    with pytest.raises(PeerLost, match=r"worker 'w1' .*died.* (waited|asked) for large"):
        rpc.rpc_sync(1, large, (1.0,))  # the first call may have ended the worker already
    with pytest.raises(PeerLost, match=r"worker 'w1' .*died.* waited for large"):
        future.wait()
    with pytest.raises(PeerLost, match=r"worker 'w1' .*died.* asked for large") as lost:
        rpc.rpc_sync(1, large, (1.0,))
    assert lost.value.operation.startswith("large")
    rpc.rpc_sync(2, inject_before_copy, (die,))
    with pytest.raises(PeerLost, match=r"worker 'w2' .*died.* waited for call_back"):
        rpc.rpc_sync(2, call_back)
    wait_for(lambda: agent().reactor.threads.active_count == 0)
    assert leased_count() == 0


def call_back() -> float:
    return float(rpc.rpc_sync(0, total, (large(1),)))


def run_with_dying_workers(is_mapped: bool) -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        call_dying_workers(is_mapped)
        rpc.shutdown(graceful=False)
    else:
        signal.pause()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_death_during_a_copy(ranks: RankServer, is_mapped: bool) -> None:
    first, *others = ranks.start(3, run_with_dying_workers, is_mapped).join()
    assert first.value is None
    assert [each.code for each in others] == [-signal.SIGKILL] * 2
