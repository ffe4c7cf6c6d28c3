"""User errors, exhausted resources and deaths: clear errors at once, and no leaks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost, PhalanxError, RemoteError, UsageError
from phalanx.rpc.agent import agent
from tests.ranks import RankServer
from tests.rpc_training import limit_address_space
from tests.waiting import once_blocked, wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def worker_name(rank: int) -> str:
    return f"worker-{rank}"


def run_as_worker(function: Any, *arguments: Any) -> Any:
    """Run each rank as a worker; worker 0 calls the function."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    value = function(*arguments) if rank == 0 else None
    rpc.shutdown(timeout=30)
    return value


def file(name: str) -> Path:
    return Path(os.environ["FOLDER"], name)


# ---- functions that are called ----


def echo(value: Any) -> Any:
    return value


KEPT: list[Any] = []


def keep(value: Any) -> None:
    KEPT.append(value)


def drop_kept() -> None:
    KEPT.clear()


def leased_count() -> int:
    gc.collect()
    return agent().shm_sender.leased_count


def wait_until_all_returned(*workers: int) -> None:
    """Wait until no memory of these workers is leased."""
    wait_for(
        lambda: (
            leased_count() == 0 and all(rpc.rpc_sync(each, leased_count) == 0 for each in workers)
        )
    )


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def raise_unsendable() -> None:
    raise Unsendable("own message")


def fail_with(tensor: Tensor) -> None:
    raise ValueError("with a tensor", tensor)


def sleep(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


class NotUnpicklable:
    """An object with a tensor that can be pickled, but not unpickled."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return fail_to_unpickle, (self.tensor,)


def fail_to_unpickle(tensor: Tensor) -> None:
    raise ArithmeticError("it cannot be unpickled")


def make_not_unpicklable(size: int) -> NotUnpicklable:
    return NotUnpicklable(torch.ones(size))


def call_back_and_forth(depth: int) -> int:
    other = 1 - rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync(other, call_back_and_forth, (depth - 1,))) if depth else 0


# ---- mistakes ----


def check_user_errors() -> None:
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        rpc.rpc_sync(1, interrupt)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        rpc.rpc_async(1, exit, (3,)).wait()
    with pytest.raises(RemoteError, match="own message"):
        rpc.rpc_sync(1, raise_unsendable)
    with pytest.raises(ArithmeticError, match="cannot be unpickled"):
        rpc.rpc_sync(1, echo, (make_not_unpicklable(1),))
    with pytest.raises(ArithmeticError, match="cannot be unpickled"):
        rpc.rpc_sync(1, make_not_unpicklable, (1,))
    with pytest.raises(UsageError, match=r"the result cannot be sent"):
        rpc.rpc_sync(1, threading.Lock)
    for timeout in (-2, float("nan"), "soon"):
        with pytest.raises(UsageError, match=r"timeout=.* expected seconds"):
            rpc.rpc_sync(1, echo, (1,), timeout=timeout)  # type: ignore[arg-type]
    assert rpc.rpc_sync(1, echo, (1,), timeout=0) == 1
    for worker in ("", 2, -1, None, 1.0, b"worker-1"):
        with pytest.raises(UsageError, match="could not find destination"):
            rpc.rpc_sync(worker, echo, (1,))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"70000 tensors, but one call takes at most 65534"):
        rpc.rpc_sync(1, echo, (list(torch.zeros(70_000)),))
    assert call_back_and_forth(50) == 50
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match=r"cannot be sent: .*recursion"):
        rpc.rpc_sync(1, echo, (deep,))


def call_from_many_threads() -> None:
    failed: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for size in (1, 100, 3000, 50_000):
                data = torch.full((size,), float(number))
                assert torch.equal(rpc.rpc_sync(1, echo, (data,)), data)
                assert rpc.rpc_async(1, echo, (number,)).wait() == number
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)
    wait_until_all_returned(1)


def check_leases_after_failures() -> None:
    """Wherever a call fails, the memory of tensors is returned on both sides."""
    tensor = torch.ones(50_000)
    with pytest.raises(UsageError, match="cannot be sent"):
        rpc.rpc_sync(1, echo, (tensor, threading.Lock()))
    with pytest.raises(TypeError):
        rpc.rpc_sync(1, echo, (tensor, tensor))
    with pytest.raises(ValueError, match="with a tensor"):
        rpc.rpc_sync(1, fail_with, (tensor,))
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, echo, ([tensor, NotUnpicklable(tensor), tensor],))
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, make_not_unpicklable, (50_000,))
    with pytest.raises(ArithmeticError):
        rpc.rpc_async(1, make_not_unpicklable, (50_000,)).wait()
    with pytest.raises(AttributeError):
        rpc.remote(1, echo, (tensor,)).rpc_sync().missing(tensor)
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(1, sleep, (0.2, tensor), timeout=0.05)
    with pytest.raises(CallTimeout):
        rpc.rpc_async(1, sleep, (0.2, tensor), timeout=0.05).wait()
    vast = torch.zeros(2**28, dtype=torch.uint8)
    with (
        limit_address_space(vast.nbytes // 2),
        pytest.raises(PhalanxError, match="not enough memory to send a tensor"),
    ):
        rpc.rpc_sync(1, echo, ([tensor, vast],))
    text = os.urandom(3_000_000)  # larger than what is sent by the socket
    assert rpc.rpc_sync(1, echo, (text,)) == text
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, echo, ((text, NotUnpicklable(tensor)),))
    # Views of one storage are sent separately.
    base = torch.arange(200_000.0)
    views = [base[5:], base.view(400, 500).t(), base[::7], base]
    assert all(map(torch.equal, rpc.rpc_sync(1, echo, (views,)), views))
    large = torch.zeros(40_000_000, dtype=torch.uint8)  # a block of its own
    large[-1] = 7
    assert rpc.rpc_sync(1, torch.Tensor.sum, (large,)) == 7
    del views, base, large
    rpc.rpc_sync(1, keep, (tensor,))
    wait_for(lambda: leased_count() == 1)
    rpc.rpc_sync(1, drop_kept)
    wait_until_all_returned(1)


def test_user_errors(ranks: RankServer) -> None:
    def run_all() -> None:
        check_user_errors()
        call_from_many_threads()
        check_leases_after_failures()

    ranks.run(2, run_as_worker, run_all)


# ---- exhausted resources ----


_MIN_FILES = 3
"""The number of files that a process opens at its start; with fewer it could not even poll."""


class NoFreeFiles:
    """A context in which this process cannot open files."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit_files(_MIN_FILES)

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._before)


def limit_files(limit: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if limit is None else limit, hard))


def make_large(size: int) -> Tensor:
    return torch.ones(size)


def owned_count() -> int:
    gc.collect()
    return len(agent().owned_values)


def check_exhaustion() -> None:
    """Without files or memory calls raise an error; afterwards they work again."""
    small, tensor, large = torch.ones(3), torch.ones(10_000), torch.ones(100_000)
    # Segments exist for some block sizes only, and there is no connection to worker 1.
    rref = rpc.remote(2, echo, (5,))
    assert rref.to_here() == 5
    with NoFreeFiles():
        failed = rpc.remote(1, echo, (small,))
        for call in (
            partial(rpc.rpc_sync, 1, echo, (small,)),
            rpc.rpc_async(1, echo, (small,)).wait,
            failed.to_here,
        ):
            with pytest.raises(PhalanxError, match="cannot connect: Too many open"):
                call()
        del failed
        with pytest.raises(UsageError, match="cannot be sent"):
            rpc.rpc_sync(2, echo, ([rref, rpc.RRef(1), threading.Lock()],))
    assert rpc.rpc_sync(1, echo, (3,)) == rpc.rpc_async(1, echo, (3,)).wait() == 3
    with NoFreeFiles():
        assert rpc.rpc_sync(1, echo, (3,)) == 3
        with pytest.raises(
            PhalanxError, match=r"not enough memory to send a tensor of \(100000,\).*Too many"
        ):
            rpc.rpc_sync(1, echo, ([tensor, large],))
    assert leased_count() == 0
    # The receiver cannot map the tensors, and has no connection yet to report that.
    rpc.rpc_sync(1, limit_files, (_MIN_FILES,))
    with pytest.raises(PhalanxError, match=r"2 of 3 tensors from .* cannot be mapped: Too many"):
        rpc.rpc_sync(1, echo, ([large, small, large + 1],))
    assert leased_count() == 2
    rpc.rpc_sync(1, limit_files, (None,))
    wait_until_all_returned(1)
    assert torch.equal(rpc.rpc_sync(1, echo, (large,)), large)
    # Likewise, the caller cannot map the result.
    assert rpc.rpc_async(2, echo, (1,)).wait() == 1
    limit_files(_MIN_FILES)
    with pytest.raises(PhalanxError, match=r"1 of 1 tensors from .* cannot be mapped"):
        rpc.rpc_sync(2, make_large, (300_000,))
    with pytest.raises(PhalanxError, match=r"1 of 1 tensors from .* cannot be mapped"):
        rpc.rpc_async(2, make_large, (300_000,)).wait()
    limit_files(None)
    wait_until_all_returned(1, 2)
    # A connection to a worker without free files waits until it has some.
    rpc.rpc_sync(2, limit_files, (_MIN_FILES,))
    rpc.rpc_async(2, limit_files_later, (0.3,))
    threads = [threading.Thread(target=rpc.rpc_sync, args=(2, echo, (n,))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    del rref
    wait_for(lambda: rpc.rpc_sync(2, owned_count) == 0)


def limit_files_later(seconds: float) -> None:
    time.sleep(seconds)
    limit_files(None)


def test_exhausted_resources(ranks: RankServer) -> None:
    ranks.run(3, run_as_worker, check_exhaustion)


# ---- death ----


def check_deaths() -> str:
    """Memory leased by dead workers is returned, and calls to them end."""
    tensor = torch.ones(50_000)
    # Its connections end before the process, by more than a second on a busy machine.
    with pytest.raises(PeerLost, match=r"worker 'worker-2' .*(died|left).* waited for die"):
        rpc.rpc_sync(2, die)
    with pytest.raises(PeerLost, match="worker 'worker-2'"):
        rpc.rpc_sync(2, keep, (tensor,))
    # Worker 3 has forked: its child keeps all its connections open.
    rpc.rpc_sync(3, echo, (1,))
    rpc.rpc_sync(3, fork_and_sleep)
    rpc.rpc_sync(3, keep, (tensor,))
    assert leased_count() == 1
    future = rpc.rpc_async(3, sleep, (60, tensor), timeout=0)
    once_blocked(lambda: rpc.rpc_async(3, die))
    with pytest.raises(PeerLost, match=r"worker 'worker-3' .* died"):
        rpc.rpc_sync(3, sleep, (60, tensor), timeout=0)
    with pytest.raises(PeerLost, match=r"worker 'worker-3' .* died"):
        future.wait()
    os.kill(int(file("child").read_text()), signal.SIGKILL)
    wait_until_all_returned(1)
    return "done"


def fork_and_sleep() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    file("child").write_text(str(child))


def run_with_deaths() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    result = ""
    try:
        result = check_deaths() if rank == 0 else ""
    finally:
        if rank == 0:
            file("over").touch()
    if rank == 1:
        wait_for(file("over").exists, 50)
    if rank > 1:
        time.sleep(60)
    with pytest.raises(PeerLost):
        rpc.shutdown(timeout=30)
    os._exit(0 if rank or result else 1)  # the process group cannot shut down: ranks are dead


def test_deaths(ranks: RankServer) -> None:
    exits = ranks.start(4, run_with_deaths).join()
    codes = [rank.code for rank in exits]
    assert codes == [0, 0, -9, -9], "\n".join(each.report() for each in exits)


# ---- forks ----


def call_in_fork(function: Any) -> str:
    """Call a function in a forked process that exits normally, and return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = str(function())
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, result.encode())
        from phalanx.rpc.init import _leave_at_exit

        _leave_at_exit()
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        result = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return result


def check_forks() -> None:
    tensor, local = torch.ones(50_000), rpc.RRef(3)
    for function in (partial(rpc.rpc_sync, 1, echo, (1,)), partial(rpc.RRef, 1), rpc.shutdown):
        assert "forked by worker 'worker-0'" in call_in_fork(function)
    rref = rpc.remote(1, echo, (tensor,))
    received = rref.to_here()

    def drop_all() -> str:
        nonlocal received, rref, local
        before = received.sum()
        del received, rref, local
        gc.collect()
        return f"{before:g}"

    assert call_in_fork(drop_all) == "50000"
    # The child released copies: nothing changes in this process.
    assert rpc.rpc_sync(1, leased_count) == 1
    for number in range(5):
        rpc.rpc_sync(1, echo, (torch.full((50_000,), float(number)),))
    assert received.eq(1).all()
    assert local.local_value() == 3
    assert torch.equal(rref.to_here(), tensor)
    del received, rref
    wait_until_all_returned(1)


def test_forks(ranks: RankServer) -> None:
    ranks.run(2, run_as_worker, check_forks)


# ---- a worker that leaves ----


def send_to_a_leaver() -> bool:
    """Worker 0 sends a tensor to worker 1, which leaves and keeps it, then many to worker 2."""
    rank, sent = int(os.environ["RANK"]), torch.arange(300_000.0)
    rpc.init_rpc(worker_name(rank))
    if rank == 0:
        rpc.rpc_sync(worker_name(1), keep, (sent,))
        file("sent").touch()
        wait_for(file("left").exists)
        with pytest.raises(PeerLost):
            rpc.rpc_sync(worker_name(1), echo, (1,))
        for _ in range(20):
            rpc.rpc_sync(worker_name(2), keep, (-sent,))
        file("overwritten").touch()
    wait_for(file("sent").exists)
    if rank == 1:
        rpc.shutdown(graceful=False)
        file("left").touch()
    wait_for(file("overwritten").exists)
    if rank != 1:
        rpc.shutdown(graceful=False)
    return rank != 1 or torch.equal(KEPT[0], sent)


def test_a_tensor_outlives_the_worker_that_received_it(ranks: RankServer) -> None:
    """Its block is leased until the process ends, not only until it leaves RPC."""
    assert ranks.run(3, send_to_a_leaver) == [True] * 3
