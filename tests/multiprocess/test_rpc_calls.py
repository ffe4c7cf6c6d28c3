"""Calls of `phalanx.rpc` between processes: arguments, results and errors."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import rpc
from phalanx.errors import CallTimeout, PhalanxError, RemoteError, UsageError
from phalanx.rpc.agent import agent
from tests.ranks import RankServer
from tests.seeds import fresh_seed
from tests.waiting import wait_for

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
# No elements, a scalar, inline in the message, at the inline limit, through shared memory.
SHAPES = [(0, 3), (), (7,), (64, 16), (1025,), (3, 1, 50_001), (2**20 + 3,)]


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def worker_name(rank: int) -> str:
    return f"worker-{rank}"


def run_as_worker(function: Any, *arguments: Any, size: int | None = None) -> Any:
    """Run each rank as a worker; worker 0 calls the function."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank), rank=rank, world_size=size)
    value = function(*arguments) if rank == 0 else None
    rpc.shutdown(timeout=30)
    return value


def run_on_all(function: Any, *arguments: Any) -> Any:
    rpc.init_rpc(worker_name(int(os.environ["RANK"])))
    value = function(*arguments)
    rpc.shutdown(timeout=30)
    return value


# ---- functions that are called ----


def pid() -> int:
    return os.getpid()


def return_arguments(*args: Any, **kwargs: Any) -> Any:
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
    def create(cls, start: int) -> Adder:
        return cls(start)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


class NotUnpicklable(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_not_unpicklable() -> None:
    raise NotUnpicklable(1, 2)


def of_a_module_that_is_only_here(raises: bool) -> Any:
    """Return, or raise, an object whose class the caller cannot import."""
    module = types.ModuleType("only_here")
    exec("class Private(Exception): pass", vars(module))
    sys.modules["only_here"] = module
    private = module.Private("its own text")
    if raises:
        raise private
    return private


def raise_local() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    raise Local("so local")


def raise_key(key: object) -> None:
    raise KeyError(key)


def make_lock() -> Any:
    return threading.Lock()


def sleep(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def leased_count() -> int:
    return agent().shm_sender.leased_count


# ---- tests ----


def check_values() -> None:
    """Call functions, methods, classes and closures, with all kinds of results."""
    remote_pid = rpc.rpc_sync(worker_name(1), pid)
    assert remote_pid != os.getpid()
    info = rpc.get_worker_info(worker_name(1))
    assert rpc.rpc_sync(1, pid) == rpc.rpc_sync(info, pid) == remote_pid
    assert rpc.rpc_sync(worker_name(0), pid) == os.getpid()
    assert rpc.rpc_sync(worker_name(1), return_arguments, (1, "a"), {"x": None}) == (
        (1, "a"),
        {"x": None},
    )
    assert rpc.rpc_sync(worker_name(1), return_arguments, args=[2]) == ((2,), {})
    base = 40
    assert rpc.rpc_sync(worker_name(1), lambda x: x + base, (2,)) == 42
    assert rpc.rpc_sync(worker_name(1), partial(return_arguments, 1), (2,)) == ((1, 2), {})
    assert rpc.rpc_sync(worker_name(1), Adder(5).add, (1,)) == 6
    assert rpc.rpc_sync(worker_name(1), Adder.create, (5,)).sum == 5
    assert rpc.rpc_sync(worker_name(1), Adder.double, (5,)) == 10
    assert rpc.rpc_sync(worker_name(1), max, ([3, 9, 4],)) == 9

    class Local:
        def __init__(self) -> None:
            self.text = "by value"

    assert rpc.rpc_sync(worker_name(1), Local).text == "by value"
    futures = [rpc.rpc_async(worker_name(number % 3), echo, (number,)) for number in range(200)]
    assert torch.futures.wait_all(futures) == list(range(200))
    doubled = rpc.rpc_async(worker_name(2), echo, (4,)).then(lambda done: 2 * done.wait())
    assert doubled.wait() == 8
    assert [each.name for each in rpc.get_worker_infos()] == [
        worker_name(rank) for rank in range(3)
    ]
    assert rpc.get_worker_info().id == 0
    nested = rpc.rpc_sync(worker_name(2), rpc.rpc_sync, (worker_name(1), rpc.get_worker_info))
    assert nested.id == 1


def check_tensors() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    peer = worker_name(1)
    sent = []
    for dtype in DTYPES:
        for shape in SHAPES:
            data = (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)
            sent.append(data)
            assert_same(rpc.rpc_sync(peer, echo, (data,)), data)
    for received, data in zip(rpc.rpc_sync(peer, return_arguments, sent)[0], sent, strict=True):
        assert_same(received, data)
    matrix = torch.randn(300, 401)
    for view in (matrix.t(), matrix[::3, 5:], matrix[0].expand(50, 401), torch.randn(9, 9).t()):
        assert_same(rpc.rpc_sync(peer, echo, (view,)), view)
    conj = torch.randn(30, dtype=torch.complex64).conj()
    assert_same(rpc.rpc_sync(peer, echo, (conj,)), conj)
    rows = torch.sparse_coo_tensor([[5, 1, 5]], torch.randn(3, 8000), (100_000, 8000))
    received = rpc.rpc_sync(peer, echo, (rows,))
    assert not received.is_coalesced()
    assert received._nnz() == 3
    assert_same(received.coalesce().values(), rows.coalesce().values())
    pair = rpc.rpc_sync(peer, echo, ({"a": matrix, "b": [matrix]},))
    assert pair["a"] is pair["b"][0]
    parameter = nn.Parameter(torch.randn(5))
    # A node of the graph, as for a single parameter.
    received = rpc.rpc_sync(peer, echo, ([parameter],))[0]
    assert (type(received), received.is_leaf, received.requires_grad) == (torch.Tensor, False, True)
    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50))
    received = rpc.rpc_sync(peer, echo, (model,))
    for name, value in model.state_dict().items():
        assert_same(received.state_dict()[name], value)
    assert all(each.requires_grad for each in received.parameters())


def bits(tensor: Tensor) -> Tensor:
    # Not all dtypes have operators.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def assert_same(first: Tensor, second: Tensor) -> None:
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert torch.equal(bits(first), bits(second))


def check_copies() -> None:
    """Tensors are sent by value, inline or through memory, and the memory is reused."""
    for size in (10, 100_000):
        original = torch.zeros(size)
        returned = rpc.rpc_sync(worker_name(1), fill, (original, 3.0))
        kept = rpc.remote(worker_name(1), echo, (returned,))
        assert returned.eq(3).all()
        assert original.eq(0).all()
        returned.fill_(4)
        assert kept.to_here().eq(3).all()
        future = rpc.rpc_async(worker_name(1), echo, (original,))
        original.fill_(9)
        assert future.wait().eq(0).all()
        kept.to_here().fill_(8)
        assert kept.to_here().eq(3).all()
    del returned, kept, future
    tensor = torch.randn(50_000)
    for _ in range(200):
        rpc.rpc_sync(worker_name(1), echo, (tensor,))
    wait_for(lambda: leased_count() == 0 == rpc.rpc_sync(worker_name(1), leased_count))


def check_early_fetch() -> None:
    """A value that is fetched before it is ready is freed with its last reference."""
    rpc.rpc_sync(worker_name(1), gc.disable)
    try:
        kept = rpc.remote(worker_name(1), sleep, (0.2, torch.zeros(100_000)))
        assert kept.to_here().eq(0).all()
        del kept
        wait_for(lambda: leased_count() == 0 == rpc.rpc_sync(worker_name(1), leased_count))
    finally:
        rpc.rpc_sync(worker_name(1), gc.enable)


def test_arguments_and_results(ranks: RankServer) -> None:
    def run_all() -> None:
        check_early_fetch()
        check_values()
        check_tensors()
        check_copies()

    ranks.run(3, run_as_worker, run_all)


def test_arguments_and_results_between_hosts(ranks: RankServer) -> None:
    def run_all() -> None:
        check_values()
        check_tensors()

    ranks.run(3, run_as_worker, run_all, hosts="ab")


def call_around(depth: int) -> int:
    """Call this function on the next worker, recursively, `depth` times."""
    if depth == 0:
        return 0
    here = rpc.get_worker_info().id
    return 1 + rpc.rpc_sync((here + 1) % len(rpc.get_worker_infos()), call_around, (depth - 1,))


def call_around_async(depth: int) -> int:
    """Do the same by futures."""
    if depth == 0:
        return 0
    here = rpc.get_worker_info().id
    to = (here + 1) % len(rpc.get_worker_infos())
    return 1 + int(rpc.rpc_async(to, call_around_async, (depth - 1,)).wait())


def tree(depth: int) -> int:
    if depth == 0:
        return 1
    futures = [rpc.rpc_async(worker, tree, (depth - 1,)) for worker in range(3)]
    return sum(torch.futures.wait_all(futures))


def check_nested_calls() -> None:
    assert call_around(40) == 40
    assert call_around_async(30) == 30
    assert tree(3) == 27
    threads = [threading.Thread(target=call_around, args=(10,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    # While one request is slow, others are executed.
    slow = rpc.rpc_async(worker_name(1), sleep, (2.0, "slow"))
    assert [rpc.rpc_sync(worker_name(1), echo, (n,)) for n in range(20)] == list(range(20))
    assert not slow.done()
    assert slow.wait() == "slow"


def test_nested_calls(ranks: RankServer) -> None:
    ranks.run(3, run_on_all, check_nested_calls)


@rpc.functions.async_execution
def add_async(to: str, number: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, echo, (number,)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def fail_async() -> torch.futures.Future[int]:
    return rpc.rpc_async(worker_name(0), raise_key, ("deep",))


@rpc.functions.async_execution
def return_no_future() -> int:
    return 3


class Batch:
    """A batch as in PyTorch's example: the last caller completes the future of all."""

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


def check_async_execution() -> None:
    assert rpc.rpc_sync(worker_name(1), add_async, (worker_name(0), 4)) == 5
    assert rpc.remote(worker_name(1), add_async, (worker_name(0), 4)).to_here() == 5
    with pytest.raises(KeyError):
        rpc.rpc_sync(worker_name(1), fail_async)
    with pytest.raises(KeyError):
        rpc.remote(worker_name(1), fail_async).to_here()
    with pytest.raises(TypeError, match=r"got int from .*return_no_future"):
        rpc.rpc_sync(worker_name(1), return_no_future)
    batch = rpc.remote(worker_name(1), Batch, (30,))
    futures = [batch.rpc_async().add(number) for number in range(29)]
    assert batch.rpc_sync().add(29) == list(range(30))
    assert torch.futures.wait_all(futures) == [list(range(30))] * 29


def test_async_execution(ranks: RankServer) -> None:
    ranks.run(2, run_as_worker, check_async_execution)


def check_errors() -> None:
    with pytest.raises(KeyError, match="here") as raised:
        rpc.rpc_sync(worker_name(1), raise_key, ("here",))
    text = str(raised.value.__cause__)
    assert f"worker {worker_name(1)!r}" in text
    assert "in raise_key" in text
    with pytest.raises(KeyError):
        rpc.rpc_async(worker_name(1), raise_key, ("here",)).wait()
    with pytest.raises(KeyError):
        rpc.rpc_sync(worker_name(1), rpc.rpc_sync, (worker_name(0), raise_key, ("deep",)))
    for function, message in (
        (raise_not_unpicklable, "NotUnpicklable: 1 and 2"),
        (raise_local, "so local"),
    ):
        with pytest.raises(RemoteError, match=message):
            rpc.rpc_sync(worker_name(1), function)
    with pytest.raises(
        RemoteError, match=r"only_here\.Private: its own text: it cannot be loaded .*only_here"
    ) as raised:
        rpc.rpc_sync(worker_name(1), of_a_module_that_is_only_here, (True,))
    assert "in of_a_module_that_is_only_here" in str(raised.value.__cause__)
    with pytest.raises(
        UsageError, match=r"the result from worker 'worker-1'.* cannot be loaded .*only_here"
    ):
        rpc.rpc_sync(worker_name(1), of_a_module_that_is_only_here, (False,))
    with pytest.raises(UsageError, match=r"the result cannot be sent: TypeError: .*lock"):
        rpc.rpc_sync(worker_name(1), make_lock)
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        rpc.rpc_sync(worker_name(1), exit, (3,))
    before = rpc.rpc_sync(worker_name(1), agent_activity)
    with pytest.raises(UsageError, match=r"echo on worker 'worker-1'.*cannot be sent: .*lock"):
        rpc.rpc_sync(worker_name(1), echo, (threading.Lock(),))
    with pytest.raises(UsageError, match="cannot be sent"):
        rpc.rpc_async(worker_name(1), threading.Lock().acquire)
    with pytest.raises(UsageError, match="cannot be sent"):
        rpc.remote(worker_name(1), echo, (rpc.RRef(1), threading.Lock()))
    with pytest.raises(
        UsageError, match=r"could not find destination 'x': the workers are 'worker-0'"
    ):
        rpc.rpc_sync("x", echo, (1,))
    with pytest.raises(UsageError, match="could not find destination 7"):
        rpc.remote(7, echo, (1,))
    with pytest.raises(UsageError, match=r"args of type int .* args=\(x,\)"):
        rpc.rpc_sync(worker_name(1), echo, 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a function"):
        rpc.rpc_sync(worker_name(1), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout=-2"):
        rpc.rpc_sync(worker_name(1), pid, timeout=-2)
    with pytest.raises(UsageError, match="RPC is already initialized"):
        rpc.init_rpc("again")
    assert rpc.rpc_sync(worker_name(1), agent_activity) == before + 1


def agent_activity() -> int:
    return agent().activity


def check_timeouts() -> None:
    tensor = torch.randn(100_000)
    with pytest.raises(CallTimeout, match=r"sleep on worker 'worker-1' .* longer than 0\.2 s"):
        rpc.rpc_sync(worker_name(1), sleep, (0.5, tensor), timeout=0.2)
    # The late answer is dropped, and not taken for that of the next call.
    assert rpc.rpc_sync(worker_name(1), sleep, (0.5, "next"), timeout=30) == "next"
    futures = [
        rpc.rpc_async(worker_name(1), sleep, (0.6, tensor), timeout=t) for t in (0.3, 0.1, 0)
    ]
    for future in futures[:2]:
        with pytest.raises(CallTimeout):
            future.wait()
    assert torch.equal(futures[2].wait(), tensor)
    rref = rpc.remote(worker_name(1), sleep, (0.5, 3), timeout=0.1)
    with pytest.raises(CallTimeout):
        rref.to_here(timeout=0.1)
    assert rref.to_here() == 3
    del futures, future
    rpc.rpc_sync(worker_name(1), pid)
    wait_for(lambda: leased_count() == 0 == rpc.rpc_sync(worker_name(1), leased_count))


def test_errors_and_timeouts(ranks: RankServer) -> None:
    def run_all() -> None:
        check_errors()
        check_timeouts()

    ranks.run(2, run_as_worker, run_all)


def check_uninitialized() -> None:
    for call in (partial(rpc.rpc_sync, "x", pid), partial(rpc.RRef, 3), rpc.shutdown):
        with pytest.raises(
            UsageError, match=r"RPC has not been initialized .*phalanx\.rpc\.init_rpc"
        ):
            call()
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


def test_init_and_shutdown(ranks: RankServer) -> None:
    ranks.run(2, check_uninitialized)


def run_without_group() -> None:
    """Use RPC without a process group; then with one worker missing."""
    rank = int(os.environ["RANK"])
    folder = f"file://{os.environ['FOLDER']}"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.3, init_method=f"{folder}/other")
    rpc.init_rpc(worker_name(rank), rpc_backend_options=options)
    if rank == 0:
        with pytest.raises(CallTimeout, match=r"0\.3 s"):
            rpc.rpc_sync(worker_name(1), sleep, (1.0,))
    rpc.shutdown()
    options.init_method = f"{folder}/third"
    with pytest.raises(PhalanxError, match=r"of 3 workers, 2 did not join init_rpc within 0\.5"):
        rpc.init_rpc(worker_name(rank), None, rank, 3, options, timeout=0.5)


def test_without_a_group(ranks: RankServer) -> None:
    ranks.run(2, run_without_group, timeout=None)
