"""`RRef`s between processes, and workers that die or leave."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout, PeerLost, UsageError
from phalanx.rpc import local_connection
from phalanx.rpc.agent import agent
from phalanx.rpc.reference_counting import OwnedValue, OwnedValues, RefCountDelta
from phalanx.rpc.server import RpcServer
from tests.ranks import RankServer
from tests.seeds import fresh_seed
from tests.waiting import stop, wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def worker_name(rank: int) -> str:
    return f"worker-{rank}"


def run_as_worker(function: Any, *arguments: Any) -> Any:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    value = function(*arguments) if rank == 0 else None
    rpc.shutdown(timeout=30)
    return value


class Box:
    def __init__(self, content: Any = None) -> None:
        self.content = content

    def set(self, content: Any) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content

    def fail(self) -> None:
        raise LookupError("nothing in it")


def echo(value: Any) -> Any:
    return value


def owned_count() -> int:
    gc.collect()
    return len(agent().owned_values)


def make_reference(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


KEPT: list[Any] = []


def keep(value: Any) -> None:
    KEPT.append(value)


def drop_kept() -> None:
    KEPT.clear()


def read_kept() -> Any:
    return KEPT[0].to_here()


def return_kept() -> Any:
    return KEPT[0]


def fail_to_create() -> None:
    raise LookupError("it cannot be created")


def wait_until_all_freed() -> None:
    gc.collect()
    wait_for(lambda: all(rpc.rpc_sync(each, owned_count) == 0 for each in rpc.get_worker_infos()))


released = threading.Event()


def wait_for_release() -> bool:
    return released.wait(60)


def check_use() -> None:
    box = rpc.remote(worker_name(1), Box, (torch.ones(3),))
    assert (box.owner_name(), box.owner().id, box.is_owner()) == (worker_name(1), 1, False)
    assert box.rpc_sync().get().sum() == 3
    assert box.rpc_async().get().wait().sum() == 3
    assert box.remote().get().to_here().sum() == 3
    box.rpc_sync().set(content=5)
    assert box.to_here().get() == 5
    wait_for(box.confirmed_by_owner)
    with pytest.raises(LookupError, match="nothing in it"):
        box.rpc_sync().fail()
    with pytest.raises(AttributeError):
        box.rpc_sync().missing()
    with pytest.raises(
        UsageError, match=r"can't call localValue\(\) on user .* to_here\(\) copies"
    ):
        box.local_value()
    failed = rpc.remote(worker_name(1), fail_to_create)
    with pytest.raises(LookupError, match="cannot be created"):
        failed.to_here()
    own = rpc.RRef([1])
    assert own.is_owner()
    assert own.to_here() is own.local_value()
    assert rpc.rpc_sync(worker_name(1), rpc.RRef.to_here, (own,)) == [1]
    assert rpc.rpc_sync(worker_name(1), echo, (own,)).local_value() is own.local_value()
    local = rpc.remote(worker_name(0), Box, (7,))
    assert local.local_value().get() == local.to_here().get() == local.rpc_sync().get() == 7
    late = rpc.remote(worker_name(0), wait_for_release)
    with pytest.raises(CallTimeout, match=r"did not exist after 0\.2 s"):
        late.to_here(timeout=0.2)
    released.set()
    assert late.to_here(timeout=0) is True
    for copy_function in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match="rref can only be pickled when using RPC"):
            copy_function(box)


def check_counts() -> None:
    """A value is freed when its last reference ends, on any worker, and not before."""
    wait_until_all_freed()
    box = rpc.remote(worker_name(1), Box, (4,))
    wait_for(box.confirmed_by_owner)  # a blocking call uses another connection, and may be first
    assert rpc.rpc_sync(worker_name(1), owned_count) == 1
    rpc.rpc_sync(worker_name(2), keep, (box,))
    del box
    gc.collect()
    # The owner receives this worker's messages in order: these follow the release of the reference.
    for _ in range(3):
        assert rpc.rpc_async(worker_name(1), owned_count).wait() == 1
    assert rpc.rpc_sync(worker_name(2), read_kept).get() == 4
    returned = rpc.rpc_sync(worker_name(2), return_kept)
    rpc.rpc_sync(worker_name(2), drop_kept)
    assert returned.to_here().get() == 4
    del returned
    wait_until_all_freed()
    # A reference returned by its owner, and references that are passed on and released at once.
    created = rpc.rpc_sync(worker_name(2), make_reference, ([3],))
    assert created.to_here() == [3]
    for _ in range(30):
        assert rpc.rpc_sync(worker_name(1), echo, ([created, created],))[0].to_here() == [3]
        assert rpc.rpc_sync(worker_name(2), echo, (created,)).to_here() == [3]
    for worker in (1, 2):
        rpc.rpc_async(worker, keep, (created,)).wait()
    del created
    assert rpc.rpc_sync(worker_name(1), read_kept) == [3]
    for worker in (1, 2):
        rpc.rpc_sync(worker, drop_kept)
    wait_until_all_freed()
    with pytest.raises(UsageError, match="cannot be sent"):
        rpc.rpc_sync(worker_name(1), echo, (rpc.RRef(1), gc.collect.__self__, os.scandir(".")))
    wait_until_all_freed()


def test_references(ranks: RankServer) -> None:
    def run_all() -> None:
        check_use()
        check_counts()

    ranks.run(3, run_as_worker, run_all)


def pass_references() -> None:
    """Release a reference on a worker while the worker receives it again, many times."""
    for _ in range(15):
        created = rpc.rpc_sync(2, make_reference, ([3],))
        for _ in range(30):
            assert rpc.rpc_sync(1, echo, ([created, created],))[0].to_here() == [3]
            assert rpc.rpc_sync(2, echo, (created,)).to_here() == [3]
        del created
        wait_until_all_freed()


def test_references_passed_repeatedly(ranks: RankServer) -> None:
    ranks.run(3, run_as_worker, pass_references, hosts="ab")


def test_references_between_hosts(ranks: RankServer) -> None:
    ranks.run(3, run_as_worker, check_counts, hosts="ab")


# ---- order ----


def give(owner: str) -> rpc.RRef[torch.Tensor]:
    return rpc.remote(owner, torch.add, args=(torch.ones(2, 2), 1))


def pass_on(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    return rref


def pause_at_hand_overs(seed: int) -> None:
    """Let each thread that handles a request, or counts a reference, lose its core for a while."""
    chosen, handle, apply = random.Random(seed), RpcServer._handle, OwnedValues.apply
    begin = RpcServer._begin

    def pausing_begin(self: RpcServer, *arguments: Any) -> Any:
        time.sleep(chosen.choice((0, 0, 0.005)))
        return begin(self, *arguments)

    def pausing_handle(self: RpcServer, *arguments: Any) -> None:
        time.sleep(chosen.choice((0, 0, 0.002, 0.005)))
        handle(self, *arguments)

    def pausing_apply(self: OwnedValues, delta: RefCountDelta) -> OwnedValue | None:
        time.sleep(chosen.choice((0, 0.005)) if delta.amount > 0 else 0)
        return apply(self, delta)

    RpcServer._begin = pausing_begin  # type: ignore[method-assign]
    RpcServer._handle = pausing_handle  # type: ignore[method-assign]
    OwnedValues.apply = pausing_apply  # type: ignore[method-assign]


def check_order() -> None:
    """Values of worker 2 reach this worker by way of worker 1, and back, and none is lost."""
    for number in range(60):
        rref = rpc.rpc_sync(1, give, ("worker-2",))
        if number % 2:
            rref = rpc.rpc_sync(1, pass_on, (rref,))
        assert rref.to_here().sum() == 8
    del rref
    wait_for(lambda: rpc.rpc_sync(2, owned_count) == 0)


def check_values_of_their_creator() -> None:
    """Workers call themselves: the references may come and go before the call arrives."""
    for number in range(120):
        rref = rpc.rpc_sync(number % 3, give, (f"worker-{number % 3}",))
        assert rref.to_here().sum() == 8
    del rref
    for worker in range(3):
        wait_for(lambda worker=worker: rpc.rpc_sync(worker, owned_count) == 0)  # type: ignore[misc]


def run_with_pauses(seed: int, check: Callable[[], None]) -> None:
    pause_at_hand_overs(seed + int(os.environ["RANK"]))
    run_as_worker(check)


@pytest.mark.parametrize("check", [check_order, check_values_of_their_creator])
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_no_value_is_lost(ranks: RankServer, hosts: str, check: Callable[[], None]) -> None:
    ranks.run(3, run_with_pauses, fresh_seed(), check, hosts=hosts)


# ---- death ----


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def keep_reference_to(worker: int) -> None:
    keep(rpc.remote(worker, Box))


def check_death() -> str:
    """Worker 2 dies; pending and later calls to it raise an error that says so."""
    pattern = r"worker 'worker-2' \(id 2, pid \d+ on .*\) (died|is lost)"
    box = rpc.remote(2, Box, (3,))
    assert box.rpc_sync().get() == 3
    rpc.rpc_sync(2, keep_reference_to, (0,))
    wait_for(lambda: owned_count() == 1)
    shm_sender = agent().shm_sender
    rpc.rpc_sync(2, keep, (torch.ones(100_000),))
    is_remote = bool(os.environ.get("PHALANX_HOST_ID"))
    assert shm_sender.leased_count == (0 if is_remote else 1)
    pending = [rpc.rpc_async(2, sleep, (60,)) for _ in range(3)]
    with pytest.raises(PeerLost, match=pattern + ".* while this worker waited for die"):
        rpc.rpc_sync(2, die)
    for future in pending:
        with pytest.raises(PeerLost, match=pattern):
            future.wait()
    for call in (
        lambda: rpc.rpc_sync(2, echo, (1,)),
        lambda: rpc.rpc_async(2, echo, (1,)).wait(),
        lambda: rpc.remote(2, Box).to_here(),
        box.to_here,
        lambda: box.rpc_sync().get(),
    ):
        with pytest.raises(PeerLost, match=pattern):
            call()
    # Its references and the memory that it had mapped are released.
    wait_for(lambda: owned_count() == 0 == shm_sender.leased_count)
    assert rpc.rpc_sync(1, echo, (5,)) == 5
    with pytest.raises(PeerLost, match=pattern):
        rpc.rpc_sync(1, rpc.rpc_sync, (2, echo, (1,)))
    rpc.rpc_sync(1, keep, ("done",))
    return "done"


def run_with_death() -> Any:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    value = check_death() if rank == 0 else None
    if rank == 1:
        wait_for(lambda: KEPT, 50)
    # Worker 0 leaves once it knows that a worker is lost, so that others may lose it.
    with pytest.raises(PeerLost, match=r"worker 'worker-[02]'"):
        rpc.shutdown()
    with pytest.raises(UsageError, match="left it by shutdown"):
        rpc.rpc_sync(0, echo, (1,))
    # The process group cannot shut down: a rank is dead.
    os._exit(0 if rank or value == "done" else 1)


@pytest.mark.parametrize("hosts", ["", "aab"])
def test_dead_worker(ranks: RankServer, hosts: str) -> None:
    exits = ranks.start(3, run_with_death, hosts=hosts).join()
    assert [rank.code for rank in exits] == [0, 0, -signal.SIGKILL], "\n".join(
        each.report() for each in exits
    )


def leave_early() -> None:
    """If a worker leaves without waiting, the others know at once."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    if rank == 1:
        assert rpc.rpc_sync(0, echo, (1,)) == 1
        rpc.shutdown(graceful=False)
        return
    wait_for(lambda: agent().peers[1].loss_reason)
    with pytest.raises(PeerLost, match=r"worker 'worker-1' .* left RPC"):
        rpc.rpc_sync(1, echo, (1,))
    with pytest.raises(PeerLost, match="left RPC"):
        rpc.shutdown()


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_leaving_worker(ranks: RankServer, hosts: str) -> None:
    ranks.run(2, leave_early, hosts=hosts)


def stop_during_handshake(pid: int) -> None:
    """Stop a process when it has answered the handshake of a connection from this process."""
    make = local_connection.make_handshake

    def make_stopping(*arguments: Any, **options: Any) -> Any:
        handshake = make(*arguments, **options)
        receive = handshake.receive

        def receive_and_stop(data: bytes) -> bytes:
            stop(pid)
            return receive(data)

        handshake.receive = receive_and_stop
        return handshake

    local_connection.make_handshake = make_stopping


def leave_and_exit(is_new: bool) -> None:
    """Worker 0 learns at the same time that worker 1 has left and that its process has exited.

    If `is_new`, worker 1 announces it through a new connection.
    """
    rank = int(os.environ["RANK"])
    rpc.init_rpc(worker_name(rank))
    peers = agent().peers
    if rank == 1:
        assert rpc.rpc_async(0, echo, (1,)).wait() == 1
        if is_new:
            peers[0].async_connection = None
            stop_during_handshake(peers[0].record.pid)
        else:
            stop(peers[0].record.pid)
        rpc.shutdown(graceful=False)
        os._exit(0)
    wait_for(lambda: peers[1].has_died)
    if rank == 2:
        os.kill(peers[0].record.pid, signal.SIGCONT)
    wait_for(lambda: peers[1].loss_reason)
    if rank == 0:
        reason = peers[1].loss_reason
        assert re.search("worker 'worker-1' .* left RPC", reason), reason
    rpc.shutdown(graceful=False)
    os._exit(0)  # the process group cannot shut down


@pytest.mark.parametrize("is_new", [False, True])
def test_worker_that_leaves_and_exits(ranks: RankServer, is_new: bool) -> None:
    for each in ranks.start(3, leave_and_exit, is_new).join():
        assert each.code == 0, each.report()


def chain(hops: int) -> None:
    """Call the other worker without waiting for it."""
    time.sleep(0.02)
    if hops:
        rpc.rpc_async(1 - rpc.get_worker_info().id, chain, (hops - 1,))
    else:
        with open(f"{os.environ['FOLDER']}/end", "w") as file:
            file.write("here")


def shut_down_with_pending_calls() -> bool:
    rpc.init_rpc(worker_name(int(os.environ["RANK"])))
    if os.environ["RANK"] == "0":
        rpc.rpc_async(1, chain, (20,))
    rpc.shutdown()
    return os.path.exists(f"{os.environ['FOLDER']}/end")


def test_graceful_shutdown_waits_for_pending_calls(ranks: RankServer) -> None:
    assert ranks.run(2, shut_down_with_pending_calls) == [True, True]
