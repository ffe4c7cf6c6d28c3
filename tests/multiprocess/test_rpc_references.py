"""`RRef`s between real processes, and workers that die or leave."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import time
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import PeerLost, UsageError
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def name_of(rank: int) -> str:
    return f"worker-{rank}"


def as_worker(function: Any, *arguments: Any) -> Any:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
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


def owned() -> int:
    gc.collect()
    return len(agent().owned_values)


def own_reference(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


KEPT: list[Any] = []


def keep(value: Any) -> None:
    KEPT.append(value)


def let_go() -> None:
    KEPT.clear()


def read_kept() -> Any:
    return KEPT[0].to_here()


def give_kept() -> Any:
    return KEPT[0]


def broken() -> None:
    raise LookupError("it can't be made")


def all_freed() -> None:
    gc.collect()
    wait_for(lambda: all(rpc.rpc_sync(each, owned) == 0 for each in rpc.get_worker_infos()))


def use() -> None:
    box = rpc.remote(name_of(1), Box, (torch.ones(3),))
    assert (box.owner_name(), box.owner().id, box.is_owner()) == (name_of(1), 1, False)
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
    failed = rpc.remote(name_of(1), broken)
    with pytest.raises(LookupError, match="can't be made"):
        failed.to_here()
    mine = rpc.RRef([1])
    assert mine.is_owner()
    assert mine.to_here() is mine.local_value()
    assert rpc.rpc_sync(name_of(1), rpc.RRef.to_here, (mine,)) == [1]
    assert rpc.rpc_sync(name_of(1), echo, (mine,)).local_value() is mine.local_value()
    here = rpc.remote(name_of(0), Box, (7,))
    assert here.local_value().get() == here.to_here().get() == here.rpc_sync().get() == 7
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match="rref can only be pickled when using RPC"):
            way(box)


def count() -> None:
    """Freed when the last reference goes, wherever it is; not before."""
    all_freed()
    box = rpc.remote(name_of(1), Box, (4,))
    wait_for(box.confirmed_by_owner)  # a blocking call has a way of its own, and may be first
    assert rpc.rpc_sync(name_of(1), owned) == 1
    rpc.rpc_sync(name_of(2), keep, (box,))
    del box
    gc.collect()
    # This worker's words to the owner come in order: behind what its end of the reference said.
    for _ in range(3):
        assert rpc.rpc_async(name_of(1), owned).wait() == 1
    assert rpc.rpc_sync(name_of(2), read_kept).get() == 4
    back = rpc.rpc_sync(name_of(2), give_kept)
    rpc.rpc_sync(name_of(2), let_go)
    assert back.to_here().get() == 4
    del back
    all_freed()
    # A reference that its owner returned, and one that goes round and is let go at once.
    made = rpc.rpc_sync(name_of(2), own_reference, ([3],))
    assert made.to_here() == [3]
    for _ in range(30):
        assert rpc.rpc_sync(name_of(1), echo, ([made, made],))[0].to_here() == [3]
        assert rpc.rpc_sync(name_of(2), echo, (made,)).to_here() == [3]
    for worker in (1, 2):
        rpc.rpc_async(worker, keep, (made,)).wait()
    del made
    assert rpc.rpc_sync(name_of(1), read_kept) == [3]
    for worker in (1, 2):
        rpc.rpc_sync(worker, let_go)
    all_freed()
    with pytest.raises(UsageError, match="can't be sent"):
        rpc.rpc_sync(name_of(1), echo, (rpc.RRef(1), gc.collect.__self__, os.scandir(".")))
    all_freed()


def test_references(ranks: RankServer) -> None:
    def all_of_it() -> None:
        use()
        count()

    ranks.run(3, as_worker, all_of_it)


def pass_on() -> None:
    """One that is let go on a worker while it comes there again, many times."""
    for _ in range(15):
        made = rpc.rpc_sync(2, own_reference, ([3],))
        for _ in range(30):
            assert rpc.rpc_sync(1, echo, ([made, made],))[0].to_here() == [3]
            assert rpc.rpc_sync(2, echo, (made,)).to_here() == [3]
        del made
        all_freed()


def test_references_that_come_and_go(ranks: RankServer) -> None:
    ranks.run(3, as_worker, pass_on, hosts="ab")


def test_references_between_hosts(ranks: RankServer) -> None:
    ranks.run(3, as_worker, count, hosts="ab")


# ---- death ----


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def hold_of(worker: int) -> None:
    keep(rpc.remote(worker, Box))


def mourn() -> str:
    """Worker 2 dies; what was under way to it, and what comes later, says so."""
    words = r"worker 'worker-2' \(id 2, pid \d+ on .*\) (has died|is lost)"
    box = rpc.remote(2, Box, (3,))
    assert box.rpc_sync().get() == 3
    rpc.rpc_sync(2, hold_of, (0,))
    wait_for(lambda: owned() == 1)
    shm_sender = agent().shm_sender
    rpc.rpc_sync(2, keep, (torch.ones(100_000),))
    far = bool(os.environ.get("PHALANX_HOST_ID"))
    assert shm_sender.leased_count == (0 if far else 1)
    pending = [rpc.rpc_async(2, sleep, (60,)) for _ in range(3)]
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=words + ".*, while this worker waited for die"):
        rpc.rpc_sync(2, die)
    for future in pending:
        with pytest.raises(PeerLost, match=words):
            future.wait()
    for later in (
        lambda: rpc.rpc_sync(2, echo, (1,)),
        lambda: rpc.rpc_async(2, echo, (1,)).wait(),
        lambda: rpc.remote(2, Box).to_here(),
        box.to_here,
        lambda: box.rpc_sync().get(),
    ):
        with pytest.raises(PeerLost, match=words):
            later()
    assert time.monotonic() - begun < 20
    # What it had is free: the value whose only reference was its, and the memory it viewed.
    wait_for(lambda: owned() == 0 == shm_sender.leased_count)
    assert rpc.rpc_sync(1, echo, (5,)) == 5
    with pytest.raises(PeerLost, match=words):
        rpc.rpc_sync(1, rpc.rpc_sync, (2, echo, (1,)))
    rpc.rpc_sync(1, keep, ("it may go",))
    return "mourned"


def live_on() -> Any:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
    value = mourn() if rank == 0 else None
    if rank == 1:
        wait_for(lambda: KEPT, 50)
    # Worker 0 leaves as soon as it knows that not all can come: who comes later misses it.
    with pytest.raises(PeerLost, match=r"worker 'worker-[02]'"):
        rpc.shutdown()
    with pytest.raises(UsageError, match="left it by shutdown"):
        rpc.rpc_sync(0, echo, (1,))
    os._exit(0 if rank or value == "mourned" else 1)  # the group can't end: one of it is dead


@pytest.mark.parametrize("hosts", ["", "aab"])
def test_a_worker_that_dies(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(3, live_on, hosts=hosts).join()
    assert [rank.code for rank in ended] == [0, 0, -signal.SIGKILL], "\n".join(
        each.report() for each in ended
    )


def leave_alone() -> None:
    """Leaving without waiting for others: they hear of it at once."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
    if rank == 1:
        assert rpc.rpc_sync(0, echo, (1,)) == 1
        rpc.shutdown(graceful=False)
        return
    wait_for(lambda: agent().peers[1].loss_reason)
    with pytest.raises(PeerLost, match=r"worker 'worker-1' .* has left RPC"):
        rpc.rpc_sync(1, echo, (1,))
    with pytest.raises(PeerLost, match="has left RPC"):
        rpc.shutdown()


@pytest.mark.parametrize("hosts", ["", "ab"])
def test_a_worker_that_leaves(ranks: RankServer, hosts: str) -> None:
    ranks.run(2, leave_alone, hosts=hosts)


def leave_and_end() -> None:
    """Worker 0 hears at once that worker 1 has left and that its process is no more."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(name_of(rank))
    peers = agent().peers
    if rank == 1:
        assert rpc.rpc_async(0, echo, (1,)).wait() == 1
        os.kill(peers[0].record.pid, signal.SIGSTOP)
        rpc.shutdown(graceful=False)
        os._exit(0)
    wait_for(lambda: peers[1].has_died)
    if rank == 2:
        os.kill(peers[0].record.pid, signal.SIGCONT)
    wait_for(lambda: peers[1].loss_reason)
    if rank == 0:
        reason = peers[1].loss_reason
        assert re.search("worker 'worker-1' .* has left RPC", reason), reason
    rpc.shutdown(graceful=False)
    os._exit(0)  # the group can't end


def test_a_worker_that_leaves_and_ends(ranks: RankServer) -> None:
    for each in ranks.start(3, leave_and_end).join():
        assert each.code == 0, each.report()


def chain(hops: int) -> None:
    """Passes on, and doesn't wait for it."""
    time.sleep(0.02)
    if hops:
        rpc.rpc_async(1 - rpc.get_worker_info().id, chain, (hops - 1,))
    else:
        with open(f"{os.environ['FOLDER']}/end", "w") as file:
            file.write("here")


def finish_what_is_under_way() -> bool:
    rpc.init_rpc(name_of(int(os.environ["RANK"])))
    if os.environ["RANK"] == "0":
        rpc.rpc_async(1, chain, (20,))
    rpc.shutdown()
    return os.path.exists(f"{os.environ['FOLDER']}/end")


def test_a_graceful_end_waits_for_what_is_under_way(ranks: RankServer) -> None:
    assert ranks.run(2, finish_what_is_under_way) == [True, True]
