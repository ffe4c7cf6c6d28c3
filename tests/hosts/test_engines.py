"""What every engine must do, run over all of them."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random

import pytest
import torch.distributed as dist

from phalanx import engines, key
from phalanx.engines import Engine, EngineError, Transfer
from phalanx.engines.gloo import GlooEngine
from tests.conformance.cases import fresh_seed
from tests.mpi import MpiRanks
from tests.ranks import RankServer

LIMIT = 20.0


def opened(name: str) -> tuple[Engine, int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/engine", size)  # type: ignore[attr-defined]
    os.environ["PHALANX_KEY_FD"] = str(key.sealed(bytes(key.SIZE)))
    return engines.open_engine(name, store, rank, size, "127.0.0.1"), rank, size


def done(*transfers: Transfer) -> None:
    for transfer in transfers:
        assert transfer.wait(LIMIT), "it hasn't ended"


def text(seed: int, source: int, target: int, number: int, size: int) -> bytearray:
    return bytearray(Random(f"{seed} {source} {target} {number}").randbytes(size))


def all_pairs(name: str, seed: int) -> None:
    """Every rank sends to every other, of all sizes, posted in an order of its own."""
    engine, rank, size = opened(name)
    sizes = (1, 7, 256, 4096, 65_537, 3_000_001)
    others = [peer for peer in range(size) if peer != rank]
    posts = [(peer, tag, is_send) for peer in others for tag in range(6) for is_send in (0, 1)]
    Random(seed + rank).shuffle(posts)
    under_way, taken = [], []
    for peer, tag, is_send in posts:
        if is_send:
            data = text(seed, rank, peer, tag, sizes[tag])
            under_way.append(engine.send(memoryview(data), peer, tag))
        else:
            place = bytearray(sizes[tag])
            taken.append((peer, tag, place))
            under_way.append(engine.recv(memoryview(place), peer, tag))
    done(*under_way)
    for peer, tag, place in taken:
        assert place == text(seed, peer, rank, tag, sizes[tag])
    engine.close()


def in_order(name: str, seed: int) -> None:
    """Those of one tag meet in the order of their posts; another tag's overtake them."""
    engine, rank, _ = opened(name)
    count = 200
    if rank == 0:
        sent = [engine.send(memoryview(text(seed, 0, 1, n, 64)), 1, 3) for n in range(count)]
        last = engine.send(memoryview(text(seed, 0, 1, count, 64)), 1, 4)
        done(last, *sent)
    else:
        first = bytearray(64)
        done(engine.recv(memoryview(first), 0, 4))
        assert first == text(seed, 0, 1, count, 64)
        places = [bytearray(64) for _ in range(count)]
        done(*[engine.recv(memoryview(place), 0, 3) for place in places])
        assert places == [text(seed, 0, 1, n, 64) for n in range(count)]
    engine.close()


def nothing_comes(name: str, seed: int) -> float:
    """A wait ends at its limit, and the transfer goes on."""
    engine, rank, _ = opened(name)
    place = bytearray(8)
    took = 0.0
    if rank == 0:
        transfer = engine.recv(memoryview(place), 1, 1)
        start = time.monotonic()
        assert not transfer.wait(0)
        assert not transfer.wait(0.2)
        took = time.monotonic() - start
        done(engine.send(memoryview(bytearray(b"go on...")), 1, 2))
        done(transfer)
        assert place == b"here it "
    else:
        done(engine.recv(memoryview(place), 0, 2))
        done(engine.send(memoryview(bytearray(b"here it ")), 0, 1))
    engine.close()
    return took


def told_when_done(name: str, seed: int) -> None:
    """`then` calls when a transfer has ended, well or not."""
    engine, rank, _ = opened(name)
    import threading

    events = [threading.Event(), threading.Event()]
    place = bytearray(4)
    if rank == 0:
        first = engine.recv(memoryview(place), 1, 1)
        first.then(events[0].set)
        assert events[0].wait(LIMIT)
        assert first.wait(0)
        assert place == b"text"
        never = engine.recv(memoryview(place), 1, 1)
        never.then(events[1].set)
        engine.abort()
        assert events[1].wait(LIMIT)
        with pytest.raises(EngineError):
            never.wait(0)
    else:
        done(engine.send(memoryview(bytearray(b"text")), 0, 1))
        with pytest.raises(EngineError):
            engine.recv(memoryview(place), 0, 5).wait(LIMIT)
    engine.close()


def aborted(name: str, seed: int) -> None:
    """Who waits is woken, on the peer too; the engine carries nothing afterwards."""
    engine, rank, _ = opened(name)
    place = bytearray(8)
    transfer = engine.recv(memoryview(place), 1 - rank, 1)
    if rank == 0:
        done(engine.recv(memoryview(bytearray(1)), 1, 2))
        start = time.monotonic()
        engine.abort()
    else:
        done(engine.send(memoryview(bytearray(b"x")), 0, 2))
        start = time.monotonic()
    with pytest.raises(EngineError):
        transfer.wait(LIMIT)
    assert time.monotonic() - start < 5
    with pytest.raises(EngineError):
        done(
            engine.send(memoryview(bytearray(b"x")), 1 - rank, 3),
            engine.recv(memoryview(place), 1 - rank, 4),
        )
    engine.close()


def closed_after_sending(name: str, seed: int) -> None:
    """What was sent arrives, though its sender has left."""
    engine, rank, _ = opened(name)
    size = 5_000_000
    if rank == 0:
        done(engine.send(memoryview(text(seed, 0, 1, 0, size)), 1, 1))
        engine.close()
    else:
        place = bytearray(size)
        done(engine.recv(memoryview(place), 0, 1))
        assert place == text(seed, 0, 1, 0, size)
        engine.close()


CASES = (
    (2, all_pairs),
    (4, all_pairs),
    (2, in_order),
    (2, nothing_comes),
    (2, told_when_done),
    (2, aborted),
    (2, closed_after_sending),
)


@pytest.mark.parametrize("name", ("gloo", "relay"))
@pytest.mark.parametrize(("size", "function"), CASES)
def test_gloo_and_relay(
    ranks: RankServer, size: int, function: Callable[[str, int], object], name: str
) -> None:
    ranks.run(size, function, name, fresh_seed(), timeout=None)


@pytest.mark.parametrize(("size", "function"), CASES)
def test_mpi(under_mpirun: MpiRanks, size: int, function: Callable[[str, int], object]) -> None:
    under_mpirun.run(size, function, "mpi", fresh_seed())


def dies(name: str) -> str:
    engine, rank, _ = opened(name)
    if rank == 1:
        # A send that has ended needn't have left the process: an answer has.
        done(engine.send(memoryview(bytearray(b"x")), 0, 1))
        done(engine.recv(memoryview(bytearray(1)), 0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    done(engine.recv(memoryview(bytearray(1)), 1, 1))
    done(engine.send(memoryview(bytearray(b"y")), 1, 1))
    with pytest.raises(EngineError) as caught:
        engine.recv(memoryview(bytearray(8)), 1, 2).wait(LIMIT)
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ("gloo", "relay"))
def test_a_dead_peer(ranks: RankServer, name: str) -> None:
    first, second = ranks.start(2, dies, name, timeout=None).join()
    assert first.value
    assert second.code == -signal.SIGKILL


def aborts_while_it_connects(late: int) -> bool:
    """Of ranks 0 and 1 one is late in connecting; the other, connected with 2, aborts."""
    engine, rank, _ = opened("gloo")
    assert isinstance(engine, GlooEngine)
    if rank != late:
        other = 2 if rank != 2 else 1 - late
        place = memoryview(bytearray(1))
        done(engine.send(memoryview(bytearray(b"x")), other, 1), engine.recv(place, other, 1))
    if rank == 2:
        engine._store.wait(["aborted"], timedelta(seconds=LIMIT))
        engine.close()
        return True
    wanted, go_on, look = threading.Event(), threading.Event(), engine._await_peer

    def await_peer(peer: int) -> bool:
        found = look(peer)
        wanted.set()
        assert rank != late or go_on.wait(LIMIT)
        return found

    engine._await_peer = await_peer  # type: ignore[method-assign]
    transfer = engine.recv(memoryview(bytearray(1)), 1 - rank, 1)
    assert wanted.wait(LIMIT)
    if rank == late:
        engine._store.wait(["aborting"], timedelta(seconds=LIMIT))
        go_on.set()
        assert engine._posts[1 - rank].settled.wait(LIMIT)
        engine._store.wait(["aborted"], timedelta(seconds=LIMIT))
        engine._store.set("connected", "")
    else:
        aborting = threading.Thread(target=engine.abort)
        aborting.start()
        aborting.join(0.3)
        engine._store.set("aborting", "")
        aborting.join(LIMIT)
        assert not aborting.is_alive()
        engine._store.set("aborted", "")
        engine._store.wait(["connected"], timedelta(seconds=LIMIT))
    with pytest.raises(EngineError):
        transfer.wait(LIMIT)
    engine.close()
    return rank == late or engine._posts[1 - rank].connected


@pytest.mark.parametrize("late", (0, 1))
def test_gloo_aborts_no_connection_that_is_being_made(ranks: RankServer, late: int) -> None:
    """Else Gloo would abort the process when it is made."""
    assert ranks.run(3, aborts_while_it_connects, late, timeout=None) == [True] * 3


def is_not_wanted() -> bool:
    engine, rank, _ = opened("gloo")
    assert isinstance(engine, GlooEngine)
    if rank == 1:
        engine._store.wait(["ended"], timedelta(seconds=LIMIT))
        engine.close()
        return False
    transfer = engine.recv(memoryview(bytearray(1)), 1, 1)
    assert not transfer.wait(0.05)
    engine.abort()
    with pytest.raises(EngineError):
        transfer.wait(LIMIT)
    engine._store.set("ended", "")
    engine.close()
    return engine._posts[1].entered


def test_gloo_connects_with_no_peer_that_wants_nothing(ranks: RankServer) -> None:
    """A connection that nobody answers could not be aborted safely."""
    assert ranks.run(2, is_not_wanted, timeout=None) == [False, False]


def leaves_unconnected() -> str:
    engine, rank, _ = opened("gloo")
    if rank == 1:
        engine.close()
        return ""
    with pytest.raises(EngineError) as caught:
        engine.recv(memoryview(bytearray(1)), 1, 1).wait(LIMIT)
    engine.close()
    assert caught.value.peer == 1
    return str(caught.value)


def test_gloo_knows_of_a_peer_that_left_unconnected(ranks: RankServer) -> None:
    assert ranks.run(2, leaves_unconnected, timeout=None) == ["it has left", ""]


def dies_unconnected(when: str) -> str:
    """Rank 1 dies before or while rank 0 waits for it."""
    engine, rank, _ = opened("gloo")
    assert isinstance(engine, GlooEngine)
    if rank == 1:
        engine._store.set("pid", str(os.getpid()))
        engine._store.wait(["die"], timedelta(seconds=LIMIT))
        os.kill(os.getpid(), signal.SIGKILL)
    peer = os.pidfd_open(int(engine._store.get("pid")))
    if when == "before":
        engine._store.set("die", "")
        assert select.select([peer], [], [], LIMIT)[0]
    transfer = engine.recv(memoryview(bytearray(1)), 1, 1)
    if when == "while":
        assert not transfer.wait(0.3)  # it lives, but wants nothing
        engine._store.set("die", "")
    with pytest.raises(EngineError) as caught:
        transfer.wait(LIMIT)
    engine.close()
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("when", "words"),
    [("before", "Connection refused"), ("while", "Connection reset by peer")],
)
def test_gloo_knows_of_a_peer_that_died_unconnected(
    ranks: RankServer, when: str, words: str
) -> None:
    survivor, victim = ranks.start(2, dies_unconnected, when, timeout=None).join()
    assert survivor.value == words
    assert victim.code == -signal.SIGKILL


def no_such_engine() -> str:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="engine is 'carrier pigeon': expected") as caught:
        engines.open_engine("carrier pigeon", store, 0, 1, "127.0.0.1")
    return str(caught.value)


def test_a_name_that_is_none(ranks: RankServer) -> None:
    assert "gloo" in ranks.run(1, no_such_engine, timeout=None)[0]
