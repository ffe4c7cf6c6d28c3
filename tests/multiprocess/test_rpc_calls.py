"""Calls of `phalanx.rpc` between real processes: what travels, what comes back, what goes wrong."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import CallTimeout, PhalanxError, RemoteError, UsageError
from phalanx.rpc import calls
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer
from tests.waiting import wait_for

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
]
# Nothing, a number, what stays in the message, its edge in bytes, what goes through memory.
SHAPES = [(0, 3), (), (7,), (64, 16), (1025,), (3, 1, 50_001), (2**20 + 3,)]


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def name_of(rank: int) -> str:
    return f"worker-{rank}"


def as_worker(function: Any, *arguments: Any, size: int | None = None) -> Any:
    """What each rank runs: a worker, on which worker 0 runs a function of the test."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank), rank=rank, world_size=size)
    value = function(*arguments) if rank == 0 else None
    rpc.shutdown(timeout=30)
    return value


def on_all(function: Any, *arguments: Any) -> Any:
    rpc.init_rpc(name_of(int(os.environ["RANK"])))
    value = function(*arguments)
    rpc.shutdown(timeout=30)
    return value


# ---- functions that are called ----


def pid() -> int:
    return os.getpid()


def same(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def echo(value: Any) -> Any:
    return value


def fill(tensor: Tensor, value: float) -> Tensor:
    return tensor.fill_(value)


class Adder:
    def __init__(self, start: int) -> None:
        self.sum = start

    def add(self, number: int) -> int:
        self.sum += number
        return self.sum

    @classmethod
    def made(cls, start: int) -> Adder:
        return cls(start)

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number


class Awkward(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_awkward() -> None:
    raise Awkward(1, 2)


def raise_local() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    raise Local("so local")


def raise_key(key: object) -> None:
    raise KeyError(key)


def lock_of_mine() -> Any:
    return threading.Lock()


def sleep(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def leased() -> int:
    return agent().shm_sender.leased_count


# ---- tests ----


def values() -> None:
    """Functions, methods, classes, closures and results of all kinds."""
    there = rpc.rpc_sync(name_of(1), pid)
    assert there != os.getpid()
    assert rpc.rpc_sync(1, pid) == rpc.rpc_sync(rpc.get_worker_info(name_of(1)), pid) == there
    assert rpc.rpc_sync(name_of(0), pid) == os.getpid()
    assert rpc.rpc_sync(name_of(1), same, (1, "a"), {"x": None}) == ((1, "a"), {"x": None})
    assert rpc.rpc_sync(name_of(1), same, args=[2]) == ((2,), {})
    base = 40
    assert rpc.rpc_sync(name_of(1), lambda x: x + base, (2,)) == 42
    assert rpc.rpc_sync(name_of(1), partial(same, 1), (2,)) == ((1, 2), {})
    assert rpc.rpc_sync(name_of(1), Adder(5).add, (1,)) == 6
    assert rpc.rpc_sync(name_of(1), Adder.made, (5,)).sum == 5
    assert rpc.rpc_sync(name_of(1), Adder.twice, (5,)) == 10
    assert rpc.rpc_sync(name_of(1), max, ([3, 9, 4],)) == 9

    class Local:
        def __init__(self) -> None:
            self.words = "by value"

    assert rpc.rpc_sync(name_of(1), Local).words == "by value"
    futures = [rpc.rpc_async(name_of(number % 3), echo, (number,)) for number in range(200)]
    assert torch.futures.wait_all(futures) == list(range(200))
    doubled = rpc.rpc_async(name_of(2), echo, (4,)).then(lambda done: 2 * done.wait())
    assert doubled.wait() == 8
    assert [each.name for each in rpc.get_worker_infos()] == [name_of(rank) for rank in range(3)]
    assert (rpc.get_worker_info().id, calls.get_root_worker()) == (0, 0)
    assert rpc.rpc_sync(name_of(2), calls.get_root_worker) == 0
    assert rpc.rpc_sync(name_of(2), rpc.rpc_sync, (name_of(1), calls.get_root_worker)) == 0


def tensors() -> None:
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    peer = name_of(1)
    sent = []
    for dtype in DTYPES:
        for shape in SHAPES:
            data = (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)
            sent.append(data)
            assert_same(rpc.rpc_sync(peer, echo, (data,)), data)
    for come, data in zip(rpc.rpc_sync(peer, same, sent)[0], sent, strict=True):
        assert_same(come, data)
    matrix = torch.randn(300, 401)
    for view in (matrix.t(), matrix[::3, 5:], matrix[0].expand(50, 401), torch.randn(9, 9).t()):
        assert_same(rpc.rpc_sync(peer, echo, (view,)), view)
    conj = torch.randn(30, dtype=torch.complex64).conj()
    assert_same(rpc.rpc_sync(peer, echo, (conj,)), conj)
    rows = torch.sparse_coo_tensor([[5, 1, 5]], torch.randn(3, 8000), (100_000, 8000))
    come = rpc.rpc_sync(peer, echo, (rows,))
    assert not come.is_coalesced()
    assert come._nnz() == 3
    assert_same(come.coalesce().values(), rows.coalesce().values())
    twice = rpc.rpc_sync(peer, echo, ({"a": matrix, "b": [matrix]},))
    assert twice["a"] is twice["b"][0]
    parameter = nn.Parameter(torch.randn(5))
    come = rpc.rpc_sync(peer, echo, ([parameter],))[0]  # a node of the graph, as by itself
    assert (type(come), come.is_leaf, come.requires_grad) == (torch.Tensor, False, True)
    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50))
    come = rpc.rpc_sync(peer, echo, (model,))
    for name, value in model.state_dict().items():
        assert_same(come.state_dict()[name], value)
    assert all(each.requires_grad for each in come.parameters())


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one, other)


def copies() -> None:
    """By value, whichever way a tensor travels; and its memory is used again."""
    for size in (10, 100_000):
        mine = torch.zeros(size)
        theirs = rpc.rpc_sync(name_of(1), fill, (mine, 3.0))
        kept = rpc.remote(name_of(1), echo, (theirs,))
        assert theirs.eq(3).all()
        assert mine.eq(0).all()
        theirs.fill_(4)
        assert kept.to_here().eq(3).all()
        later = rpc.rpc_async(name_of(1), echo, (mine,))
        mine.fill_(9)
        assert later.wait().eq(0).all()
        kept.to_here().fill_(8)
        assert kept.to_here().eq(3).all()
    del theirs, kept, later
    tensor = torch.randn(50_000)
    for _ in range(200):
        rpc.rpc_sync(name_of(1), echo, (tensor,))
    wait_for(lambda: leased() == 0 == rpc.rpc_sync(name_of(1), leased))


def test_what_travels(ranks: RankServer) -> None:
    def all_of_it() -> None:
        values()
        tensors()
        copies()

    ranks.run(3, as_worker, all_of_it)


def test_what_travels_between_hosts(ranks: RankServer) -> None:
    def all_of_it() -> None:
        values()
        tensors()

    ranks.run(3, as_worker, all_of_it, hosts="ab")


def around(depth: int) -> int:
    """Calls itself on the next worker, `depth` deep."""
    if depth == 0:
        return 0
    here = rpc.get_worker_info().id
    return 1 + rpc.rpc_sync((here + 1) % len(rpc.get_worker_infos()), around, (depth - 1,))


def around_later(depth: int) -> int:
    """The same by futures."""
    if depth == 0:
        return 0
    here = rpc.get_worker_info().id
    to = (here + 1) % len(rpc.get_worker_infos())
    return 1 + int(rpc.rpc_async(to, around_later, (depth - 1,)).wait())


def tree(depth: int) -> int:
    if depth == 0:
        return 1
    futures = [rpc.rpc_async(worker, tree, (depth - 1,)) for worker in range(3)]
    return sum(torch.futures.wait_all(futures))


def nest() -> None:
    assert around(40) == 40
    assert around_later(30) == 30
    assert tree(3) == 27
    threads = [threading.Thread(target=around, args=(10,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    # While one request takes its time, others are executed.
    slow = rpc.rpc_async(name_of(1), sleep, (2.0, "slow"))
    assert [rpc.rpc_sync(name_of(1), echo, (n,)) for n in range(20)] == list(range(20))
    assert not slow.done()
    assert slow.wait() == "slow"


def test_nested_calls(ranks: RankServer) -> None:
    ranks.run(3, on_all, nest)


@rpc.functions.async_execution
def later(to: str, number: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, echo, (number,)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def later_fails() -> torch.futures.Future[int]:
    return rpc.rpc_async(name_of(0), raise_key, ("deep",))


@rpc.functions.async_execution
def not_later() -> int:
    return 3


class Batch:
    """As in PyTorch's example of a batch: whoever comes second lets the first one go on."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.future: torch.futures.Future[list[int]] = torch.futures.Future()
        self.numbers: list[int] = []

    @rpc.functions.async_execution
    def add(self, number: int) -> torch.futures.Future[list[int]]:
        with self.lock:
            self.numbers.append(number)
            future = self.future
            if len(self.numbers) == self.size:
                future.set_result(sorted(self.numbers))
        return future


def defer() -> None:
    assert rpc.rpc_sync(name_of(1), later, (name_of(0), 4)) == 5
    assert rpc.remote(name_of(1), later, (name_of(0), 4)).to_here() == 5
    with pytest.raises(KeyError):
        rpc.rpc_sync(name_of(1), later_fails)
    with pytest.raises(KeyError):
        rpc.remote(name_of(1), later_fails).to_here()
    with pytest.raises(TypeError, match=r"got int from .*not_later"):
        rpc.rpc_sync(name_of(1), not_later)
    batch = rpc.remote(name_of(1), Batch, (30,))
    futures = [batch.rpc_async().add(number) for number in range(29)]
    assert batch.rpc_sync().add(29) == list(range(30))
    assert torch.futures.wait_all(futures) == [list(range(30))] * 29


def test_results_that_come_later(ranks: RankServer) -> None:
    ranks.run(2, as_worker, defer)


def fail() -> None:
    with pytest.raises(KeyError, match="here") as raised:
        rpc.rpc_sync(name_of(1), raise_key, ("here",))
    words = str(raised.value.__cause__)
    assert f"worker {name_of(1)!r}" in words
    assert "in raise_key" in words
    with pytest.raises(KeyError):
        rpc.rpc_async(name_of(1), raise_key, ("here",)).wait()
    with pytest.raises(KeyError):
        rpc.rpc_sync(name_of(1), rpc.rpc_sync, (name_of(0), raise_key, ("deep",)))
    for function, said in ((raise_awkward, "Awkward: 1 and 2"), (raise_local, "so local")):
        with pytest.raises(RemoteError, match=said):
            rpc.rpc_sync(name_of(1), function)
    with pytest.raises(UsageError, match=r"the result can't be sent: TypeError: .*lock"):
        rpc.rpc_sync(name_of(1), lock_of_mine)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        rpc.rpc_sync(name_of(1), exit, (3,))
    before = rpc.rpc_sync(name_of(1), agent_activity)
    with pytest.raises(UsageError, match=r"echo on worker 'worker-1'.*can't be sent: .*lock"):
        rpc.rpc_sync(name_of(1), echo, (threading.Lock(),))
    with pytest.raises(UsageError, match="can't be sent"):
        rpc.rpc_async(name_of(1), threading.Lock().acquire)
    with pytest.raises(UsageError, match="can't be sent"):
        rpc.remote(name_of(1), echo, (rpc.RRef(1), threading.Lock()))
    with pytest.raises(
        UsageError, match=r"could not find destination 'x': the workers are 'worker-0'"
    ):
        rpc.rpc_sync("x", echo, (1,))
    with pytest.raises(UsageError, match="could not find destination 7"):
        rpc.remote(7, echo, (1,))
    with pytest.raises(UsageError, match=r"args of type int .* args=\(x,\)"):
        rpc.rpc_sync(name_of(1), echo, 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a function"):
        rpc.rpc_sync(name_of(1), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout=-2"):
        rpc.rpc_sync(name_of(1), pid, timeout=-2)
    with pytest.raises(UsageError, match="RPC is already initialized"):
        rpc.init_rpc("again")
    assert rpc.rpc_sync(name_of(1), agent_activity) == before + 1


def agent_activity() -> int:
    return agent().activity


def be_late() -> None:
    tensor = torch.randn(100_000)
    with pytest.raises(CallTimeout, match=r"sleep on worker 'worker-1' .* longer than 0\.2 s"):
        rpc.rpc_sync(name_of(1), sleep, (0.5, tensor), timeout=0.2)
    # The late answer is for nobody, not for the next call.
    assert rpc.rpc_sync(name_of(1), sleep, (0.5, "next"), timeout=30) == "next"
    begun = time.monotonic()
    futures = [rpc.rpc_async(name_of(1), sleep, (0.6, tensor), timeout=t) for t in (0.3, 0.1, 0)]
    for late in futures[:2]:
        with pytest.raises(CallTimeout):
            late.wait()
    assert time.monotonic() - begun < 0.6
    assert torch.equal(futures[2].wait(), tensor)
    rref = rpc.remote(name_of(1), sleep, (0.5, 3), timeout=0.1)
    with pytest.raises(CallTimeout):
        rref.to_here(timeout=0.1)
    assert rref.to_here() == 3
    del futures, late
    rpc.rpc_sync(name_of(1), pid)
    wait_for(lambda: leased() == 0 == rpc.rpc_sync(name_of(1), leased))


def test_what_goes_wrong(ranks: RankServer) -> None:
    def all_of_it() -> None:
        fail()
        be_late()

    ranks.run(2, as_worker, all_of_it)


def use_without() -> None:
    for use in (partial(rpc.rpc_sync, "x", pid), partial(rpc.RRef, 3), rpc.shutdown):
        with pytest.raises(
            UsageError, match=r"RPC has not been initialized .*phalanx\.rpc\.init_rpc"
        ):
            use()
    rank = int(os.environ["RANK"])
    for name in "first", "second":
        rpc.init_rpc(f"{name}-{rank}")
        assert rpc.rpc_sync(f"{name}-{1 - rank}", echo, (rank,)) == rank
        rpc.shutdown()
        with pytest.raises(UsageError, match=r"^RPC has not been initialized again .* by shutdown"):
            rpc.rpc_sync(f"{name}-0", pid)
    with pytest.raises(
        UsageError, match=r"name 'twin' is not unique: workers 0 .* and 1 .* have it"
    ):
        rpc.init_rpc("twin")


def test_beginning_and_end(ranks: RankServer) -> None:
    ranks.run(2, use_without)


def alone() -> None:
    """Without a group; and one worker too few."""
    rank = int(os.environ["RANK"])
    folder = f"file://{os.environ['FOLDER']}"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.3, init_method=f"{folder}/other")
    rpc.init_rpc(name_of(rank), rpc_backend_options=options)
    if rank == 0:
        with pytest.raises(CallTimeout, match=r"0\.3 s"):
            rpc.rpc_sync(name_of(1), sleep, (1.0,))
    rpc.shutdown()
    options.init_method = f"{folder}/third"
    with pytest.raises(PhalanxError, match=r"of 3 workers, 2 didn't come to init_rpc within 0\.5"):
        rpc.init_rpc(name_of(rank), None, rank, 3, options, timeout=0.5)


def test_without_a_group(ranks: RankServer) -> None:
    ranks.run(2, alone, timeout=None)
