"""What mistakes and bad luck do to `phalanx.rpc`: a clear error at once, nothing lost."""

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
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer
from tests.rpc_training import little_address_space
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def name_of(rank: int) -> str:
    return f"worker-{rank}"


def as_worker(function: Any, *arguments: Any) -> Any:
    """What each rank runs: a worker, on which worker 0 runs a function of the test."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
    value = function(*arguments) if rank == 0 else None
    rpc.shutdown(timeout=30)
    return value


def told(name: str) -> Path:
    return Path(os.environ["FOLDER"], name)


# ---- functions that are called ----


def echo(value: Any) -> Any:
    return value


KEPT: list[Any] = []


def keep(value: Any) -> None:
    KEPT.append(value)


def let_go() -> None:
    KEPT.clear()


def leased() -> int:
    gc.collect()
    return agent().shm_sender.leased_count


def all_returned(*workers: int) -> None:
    """No worker's memory is leased any more."""
    wait_for(lambda: leased() == 0 and all(rpc.rpc_sync(each, leased) == 0 for each in workers))


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


def raise_unsendable() -> None:
    raise Unsendable("words of mine")


def fail_with(tensor: Tensor) -> None:
    raise ValueError("with a tensor", tensor)


def sleep(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


class Unpackable:
    """It can be pickled, but not unpickled, and has a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return unpack_badly, (self.tensor,)


def unpack_badly(tensor: Tensor) -> None:
    raise ArithmeticError("it can't be unpacked")


def unpackable(size: int) -> Unpackable:
    return Unpackable(torch.ones(size))


def there_and_back(depth: int) -> int:
    other = 1 - rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync(other, there_and_back, (depth - 1,))) if depth else 0


# ---- mistakes ----


def make_mistakes() -> None:
    with pytest.raises(RemoteError, match="KeyboardInterrupt"):
        rpc.rpc_sync(1, interrupt)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        rpc.rpc_async(1, exit, (3,)).wait()
    with pytest.raises(RemoteError, match="words of mine"):
        rpc.rpc_sync(1, raise_unsendable)
    with pytest.raises(ArithmeticError, match="can't be unpacked"):
        rpc.rpc_sync(1, echo, (unpackable(1),))
    with pytest.raises(ArithmeticError, match="can't be unpacked"):
        rpc.rpc_sync(1, unpackable, (1,))
    with pytest.raises(UsageError, match=r"the result can't be sent"):
        rpc.rpc_sync(1, threading.Lock)
    for timeout in (-2, float("nan"), "soon"):
        with pytest.raises(UsageError, match=r"timeout=.* expected seconds"):
            rpc.rpc_sync(1, echo, (1,), timeout=timeout)  # type: ignore[arg-type]
    assert rpc.rpc_sync(1, echo, (1,), timeout=0) == 1
    for worker in ("", 2, -1, None, 1.0, b"worker-1"):
        with pytest.raises(UsageError, match="could not find destination"):
            rpc.rpc_sync(worker, echo, (1,))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"70000 tensors, of 65534 that one call takes"):
        rpc.rpc_sync(1, echo, (list(torch.zeros(70_000)),))
    assert there_and_back(50) == 50
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match=r"can't be sent: .*recursion"):
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
    all_returned(1)


def lease_and_fail() -> None:
    """Wherever it ends, the memory of tensors comes back, on both sides."""
    tensor = torch.ones(50_000)
    with pytest.raises(UsageError, match="can't be sent"):
        rpc.rpc_sync(1, echo, (tensor, threading.Lock()))
    with pytest.raises(TypeError):
        rpc.rpc_sync(1, echo, (tensor, tensor))
    with pytest.raises(ValueError, match="with a tensor"):
        rpc.rpc_sync(1, fail_with, (tensor,))
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, echo, ([tensor, Unpackable(tensor), tensor],))
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, unpackable, (50_000,))
    with pytest.raises(ArithmeticError):
        rpc.rpc_async(1, unpackable, (50_000,)).wait()
    with pytest.raises(AttributeError):
        rpc.remote(1, echo, (tensor,)).rpc_sync().missing(tensor)
    with pytest.raises(CallTimeout):
        rpc.rpc_sync(1, sleep, (0.2, tensor), timeout=0.05)
    with pytest.raises(CallTimeout):
        rpc.rpc_async(1, sleep, (0.2, tensor), timeout=0.05).wait()
    vast = torch.zeros(2**28, dtype=torch.uint8)
    with (
        little_address_space(vast.nbytes // 2),
        pytest.raises(PhalanxError, match="no room for a tensor"),
    ):
        rpc.rpc_sync(1, echo, ([tensor, vast],))
    text = os.urandom(3_000_000)  # larger than what goes by the socket
    assert rpc.rpc_sync(1, echo, (text,)) == text
    with pytest.raises(ArithmeticError):
        rpc.rpc_sync(1, echo, ((text, Unpackable(tensor)),))
    # Views of one storage: each is itself.
    base = torch.arange(200_000.0)
    views = [base[5:], base.view(400, 500).t(), base[::7], base]
    assert all(map(torch.equal, rpc.rpc_sync(1, echo, (views,)), views))
    large = torch.zeros(40_000_000, dtype=torch.uint8)  # a block of its own
    large[-1] = 7
    assert rpc.rpc_sync(1, torch.Tensor.sum, (large,)) == 7
    del views, base, large
    rpc.rpc_sync(1, keep, (tensor,))
    wait_for(lambda: leased() == 1)
    rpc.rpc_sync(1, let_go)
    all_returned(1)


def test_mistakes(ranks: RankServer) -> None:
    def all_of_it() -> None:
        make_mistakes()
        call_from_many_threads()
        lease_and_fail()

    ranks.run(2, as_worker, all_of_it)


# ---- no room ----


_NO_MORE = 3
"""Files that a process has from its beginning; with fewer it couldn't even poll."""


class NoRoom:
    """This process can't open any file, within it."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit_files(_NO_MORE)

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._before)


def limit_files(most: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if most is None else most, hard))


def answer_large(size: int) -> Tensor:
    return torch.ones(size)


def values_owned() -> int:
    gc.collect()
    return len(agent().owned_values)


def run_out() -> None:
    """Neither files nor memory: it is said, and all goes on when there is room again."""
    small, tensor, large = torch.ones(3), torch.ones(10_000), torch.ones(100_000)
    # Segments of blocks are there for some, not for others, and no connection to worker 1.
    rref = rpc.remote(2, echo, (5,))
    assert rref.to_here() == 5
    with NoRoom():
        failed = rpc.remote(1, echo, (small,))
        for call in (
            partial(rpc.rpc_sync, 1, echo, (small,)),
            rpc.rpc_async(1, echo, (small,)).wait,
            failed.to_here,
        ):
            with pytest.raises(PhalanxError, match="no connection can be made: Too many open"):
                call()
        del failed
        with pytest.raises(UsageError, match="can't be sent"):
            rpc.rpc_sync(2, echo, ([rref, rpc.RRef(1), threading.Lock()],))
    assert rpc.rpc_sync(1, echo, (3,)) == rpc.rpc_async(1, echo, (3,)).wait() == 3
    with NoRoom():
        assert rpc.rpc_sync(1, echo, (3,)) == 3
        with pytest.raises(PhalanxError, match=r"no room for a tensor of \(100000,\).*Too many"):
            rpc.rpc_sync(1, echo, ([tensor, large],))
    assert leased() == 0
    # The receiver can't map what was sent, and has no way yet to say so.
    rpc.rpc_sync(1, limit_files, (_NO_MORE,))
    with pytest.raises(PhalanxError, match=r"2 of 3 tensors from .* can't be mapped: Too many"):
        rpc.rpc_sync(1, echo, ([large, small, large + 1],))
    assert leased() == 2
    rpc.rpc_sync(1, limit_files, (None,))
    all_returned(1)
    assert torch.equal(rpc.rpc_sync(1, echo, (large,)), large)
    # Nor the caller the result.
    assert rpc.rpc_async(2, echo, (1,)).wait() == 1
    limit_files(_NO_MORE)
    with pytest.raises(PhalanxError, match=r"1 of 1 tensors from .* can't be mapped"):
        rpc.rpc_sync(2, answer_large, (300_000,))
    with pytest.raises(PhalanxError, match=r"1 of 1 tensors from .* can't be mapped"):
        rpc.rpc_async(2, answer_large, (300_000,)).wait()
    limit_files(None)
    all_returned(1, 2)
    # Who connects to one without room waits until it has some.
    rpc.rpc_sync(2, limit_files, (_NO_MORE,))
    rpc.rpc_async(2, limit_files_later, (0.3,))
    threads = [threading.Thread(target=rpc.rpc_sync, args=(2, echo, (n,))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    del rref
    wait_for(lambda: rpc.rpc_sync(2, values_owned) == 0)


def limit_files_later(seconds: float) -> None:
    time.sleep(seconds)
    limit_files(None)


def test_no_room(ranks: RankServer) -> None:
    ranks.run(3, as_worker, run_out)


# ---- death ----


def survive() -> str:
    """What the dead had leased comes back, and what waits for them ends."""
    tensor = torch.ones(50_000)
    # Its connections end before it does, by more than a second on a machine that is very busy.
    with pytest.raises(PeerLost, match=r"worker 'worker-2' .*(died|left).* waited for die"):
        rpc.rpc_sync(2, die)
    with pytest.raises(PeerLost, match="worker 'worker-2'"):
        rpc.rpc_sync(2, keep, (tensor,))
    # Worker 3 has forked: its child holds the ends of all its connections.
    rpc.rpc_sync(3, echo, (1,))
    rpc.rpc_sync(3, fork_and_live)
    rpc.rpc_sync(3, keep, (tensor,))
    assert leased() == 1
    future = rpc.rpc_async(3, sleep, (60, tensor), timeout=0)
    begun = time.monotonic()
    threading.Timer(0.2, lambda: rpc.rpc_async(3, die)).start()
    with pytest.raises(PeerLost, match=r"worker 'worker-3' .* has died"):
        rpc.rpc_sync(3, sleep, (60, tensor), timeout=0)
    with pytest.raises(PeerLost, match=r"worker 'worker-3' .* has died"):
        future.wait()
    assert time.monotonic() - begun < 10
    os.kill(int(told("child").read_text()), signal.SIGKILL)
    all_returned(1)
    return "survived"


def fork_and_live() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    told("child").write_text(str(child))


def see_deaths() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
    said = ""
    try:
        said = survive() if rank == 0 else ""
    finally:
        if rank == 0:
            told("over").touch()
    if rank == 1:
        wait_for(told("over").exists, 50)
    if rank > 1:
        time.sleep(60)
    with pytest.raises(PeerLost):
        rpc.shutdown(timeout=30)
    os._exit(0 if rank or said else 1)  # the group can't end: some of it are dead


def test_deaths(ranks: RankServer) -> None:
    ended = ranks.start(4, see_deaths).join()
    codes = [rank.code for rank in ended]
    assert codes == [0, 0, -9, -9], "\n".join(each.report() for each in ended)


# ---- forks ----


def in_a_child(function: Any) -> str:
    """What a function returns in a process that is forked off here, and ends as others do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        from phalanx.rpc.init import _leave_at_exit

        _leave_at_exit()
        os._exit(0)
    os.close(writer)
    with open(reader) as said_there:
        said = said_there.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def fork() -> None:
    tensor, here = torch.ones(50_000), rpc.RRef(3)
    for function in (partial(rpc.rpc_sync, 1, echo, (1,)), partial(rpc.RRef, 1), rpc.shutdown):
        assert "forked off by worker 'worker-0'" in in_a_child(function)
    rref = rpc.remote(1, echo, (tensor,))
    come = rref.to_here()

    def let_all_go() -> str:
        nonlocal come, rref, here
        before = come.sum()
        del come, rref, here
        gc.collect()
        return f"{before:g}"

    assert in_a_child(let_all_go) == "50000"
    # Those were copies: here all is as it was.
    assert rpc.rpc_sync(1, leased) == 1
    for number in range(5):
        rpc.rpc_sync(1, echo, (torch.full((50_000,), float(number)),))
    assert come.eq(1).all()
    assert here.local_value() == 3
    assert torch.equal(rref.to_here(), tensor)
    del come, rref
    all_returned(1)


def test_forks(ranks: RankServer) -> None:
    ranks.run(2, as_worker, fork)
