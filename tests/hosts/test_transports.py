"""What every transport must do, run over all of them."""

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

from phalanx import key, transports
from phalanx.transports import Transfer, Transport, TransportError
from phalanx.transports.gloo import GlooTransport
from tests.conformance.cases import fresh_seed
from tests.mpi import MpiRanks
from tests.ranks import RankServer

LIMIT = 20.0


def opened(name: str) -> tuple[Transport, int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/transport", size)  # type: ignore[attr-defined]
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(bytes(key.SIZE)))
    return transports.open_transport(name, store, rank, size, "127.0.0.1"), rank, size


def done(*transfers: Transfer) -> None:
    for transfer in transfers:
        assert transfer.wait(LIMIT), "it hasn't ended"


def text(seed: int, source: int, target: int, number: int, size: int) -> bytearray:
    return bytearray(Random(f"{seed} {source} {target} {number}").randbytes(size))


def all_pairs(name: str, seed: int) -> None:
    """Every rank sends to every other, of all sizes, posted in an order of its own."""
    transport, rank, size = opened(name)
    sizes = (1, 7, 256, 4096, 65_537, 3_000_001)
    others = [peer for peer in range(size) if peer != rank]
    posts = [(peer, tag, is_send) for peer in others for tag in range(6) for is_send in (0, 1)]
    Random(seed + rank).shuffle(posts)
    under_way, taken = [], []
    for peer, tag, is_send in posts:
        if is_send:
            data = text(seed, rank, peer, tag, sizes[tag])
            under_way.append(transport.send(memoryview(data), peer, tag))
        else:
            place = bytearray(sizes[tag])
            taken.append((peer, tag, place))
            under_way.append(transport.recv(memoryview(place), peer, tag))
    done(*under_way)
    for peer, tag, place in taken:
        assert place == text(seed, peer, rank, tag, sizes[tag])
    transport.close()


def in_order(name: str, seed: int) -> None:
    """Those of one tag meet in the order of their posts; another tag's overtake them."""
    transport, rank, _ = opened(name)
    count = 200
    if rank == 0:
        sent = [transport.send(memoryview(text(seed, 0, 1, n, 64)), 1, 3) for n in range(count)]
        last = transport.send(memoryview(text(seed, 0, 1, count, 64)), 1, 4)
        done(last, *sent)
    else:
        first = bytearray(64)
        done(transport.recv(memoryview(first), 0, 4))
        assert first == text(seed, 0, 1, count, 64)
        places = [bytearray(64) for _ in range(count)]
        done(*[transport.recv(memoryview(place), 0, 3) for place in places])
        assert places == [text(seed, 0, 1, n, 64) for n in range(count)]
    transport.close()


def nothing_comes(name: str, seed: int) -> float:
    """A wait ends at its limit, and the transfer goes on."""
    transport, rank, _ = opened(name)
    place = bytearray(8)
    took = 0.0
    if rank == 0:
        transfer = transport.recv(memoryview(place), 1, 1)
        start = time.monotonic()
        assert not transfer.wait(0)
        assert not transfer.wait(0.2)
        took = time.monotonic() - start
        done(transport.send(memoryview(bytearray(b"go on...")), 1, 2))
        done(transfer)
        assert place == b"here it "
    else:
        done(transport.recv(memoryview(place), 0, 2))
        done(transport.send(memoryview(bytearray(b"here it ")), 0, 1))
    transport.close()
    return took


def told_when_done(name: str, seed: int) -> None:
    """`then` calls when a transfer has ended, well or not."""
    transport, rank, _ = opened(name)
    import threading

    events = [threading.Event(), threading.Event()]
    place = bytearray(4)
    if rank == 0:
        first = transport.recv(memoryview(place), 1, 1)
        first.add_done_callback(events[0].set)
        assert events[0].wait(LIMIT)
        assert first.wait(0)
        assert place == b"text"
        never = transport.recv(memoryview(place), 1, 1)
        never.add_done_callback(events[1].set)
        transport.abort()
        assert events[1].wait(LIMIT)
        with pytest.raises(TransportError):
            never.wait(0)
    else:
        done(transport.send(memoryview(bytearray(b"text")), 0, 1))
        with pytest.raises(TransportError):
            transport.recv(memoryview(place), 0, 5).wait(LIMIT)
    transport.close()


def aborted(name: str, seed: int) -> None:
    """Who waits is woken, on the peer too; the transport carries nothing afterwards."""
    transport, rank, _ = opened(name)
    place = bytearray(8)
    transfer = transport.recv(memoryview(place), 1 - rank, 1)
    if rank == 0:
        done(transport.recv(memoryview(bytearray(1)), 1, 2))
        start = time.monotonic()
        transport.abort()
    else:
        done(transport.send(memoryview(bytearray(b"x")), 0, 2))
        start = time.monotonic()
    with pytest.raises(TransportError):
        transfer.wait(LIMIT)
    assert time.monotonic() - start < 5
    with pytest.raises(TransportError):
        done(
            transport.send(memoryview(bytearray(b"x")), 1 - rank, 3),
            transport.recv(memoryview(place), 1 - rank, 4),
        )
    transport.close()


def closed_after_sending(name: str, seed: int) -> None:
    """What was sent arrives, though its sender has left."""
    transport, rank, _ = opened(name)
    size = 5_000_000
    if rank == 0:
        done(transport.send(memoryview(text(seed, 0, 1, 0, size)), 1, 1))
        transport.close()
    else:
        place = bytearray(size)
        done(transport.recv(memoryview(place), 0, 1))
        assert place == text(seed, 0, 1, 0, size)
        transport.close()


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
    transport, rank, _ = opened(name)
    if rank == 1:
        # A send that has ended needn't have left the process: an answer has.
        done(transport.send(memoryview(bytearray(b"x")), 0, 1))
        done(transport.recv(memoryview(bytearray(1)), 0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    done(transport.recv(memoryview(bytearray(1)), 1, 1))
    done(transport.send(memoryview(bytearray(b"y")), 1, 1))
    with pytest.raises(TransportError) as caught:
        transport.recv(memoryview(bytearray(8)), 1, 2).wait(LIMIT)
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ("gloo", "relay"))
def test_a_dead_peer(ranks: RankServer, name: str) -> None:
    first, second = ranks.start(2, dies, name, timeout=None).join()
    assert first.value
    assert second.code == -signal.SIGKILL


def aborts_while_it_connects(late: int) -> bool:
    """Of ranks 0 and 1 one is late in connecting; the other, connected with 2, aborts."""
    transport, rank, _ = opened("gloo")
    assert isinstance(transport, GlooTransport)
    if rank != late:
        other = 2 if rank != 2 else 1 - late
        place = memoryview(bytearray(1))
        done(transport.send(memoryview(bytearray(b"x")), other, 1), transport.recv(place, other, 1))
    if rank == 2:
        transport._store.wait(["aborted"], timedelta(seconds=LIMIT))
        transport.close()
        return True
    wanted, go_on, look = threading.Event(), threading.Event(), transport._await_peer

    def await_peer(peer: int) -> bool:
        found = look(peer)
        wanted.set()
        assert rank != late or go_on.wait(LIMIT)
        return found

    transport._await_peer = await_peer  # type: ignore[method-assign]
    transfer = transport.recv(memoryview(bytearray(1)), 1 - rank, 1)
    assert wanted.wait(LIMIT)
    if rank == late:
        transport._store.wait(["aborting"], timedelta(seconds=LIMIT))
        go_on.set()
        assert transport._posts[1 - rank].settled.wait(LIMIT)
        transport._store.wait(["aborted"], timedelta(seconds=LIMIT))
        transport._store.set("connected", "")
    else:
        aborting = threading.Thread(target=transport.abort)
        aborting.start()
        aborting.join(0.3)
        transport._store.set("aborting", "")
        aborting.join(LIMIT)
        assert not aborting.is_alive()
        transport._store.set("aborted", "")
        transport._store.wait(["connected"], timedelta(seconds=LIMIT))
    with pytest.raises(TransportError):
        transfer.wait(LIMIT)
    transport.close()
    return rank == late or transport._posts[1 - rank].connected


@pytest.mark.parametrize("late", (0, 1))
def test_gloo_aborts_no_connection_that_is_being_made(ranks: RankServer, late: int) -> None:
    """Else Gloo would abort the process when it is made."""
    assert ranks.run(3, aborts_while_it_connects, late, timeout=None) == [True] * 3


def is_not_wanted() -> bool:
    transport, rank, _ = opened("gloo")
    assert isinstance(transport, GlooTransport)
    if rank == 1:
        transport._store.wait(["ended"], timedelta(seconds=LIMIT))
        transport.close()
        return False
    transfer = transport.recv(memoryview(bytearray(1)), 1, 1)
    assert not transfer.wait(0.05)
    transport.abort()
    with pytest.raises(TransportError):
        transfer.wait(LIMIT)
    transport._store.set("ended", "")
    transport.close()
    return transport._posts[1].entered


def test_gloo_connects_with_no_peer_that_wants_nothing(ranks: RankServer) -> None:
    """A connection that nobody answers could not be aborted safely."""
    assert ranks.run(2, is_not_wanted, timeout=None) == [False, False]


def leaves_unconnected() -> str:
    transport, rank, _ = opened("gloo")
    if rank == 1:
        transport.close()
        return ""
    with pytest.raises(TransportError) as caught:
        transport.recv(memoryview(bytearray(1)), 1, 1).wait(LIMIT)
    transport.close()
    assert caught.value.peer == 1
    return str(caught.value)


def test_gloo_knows_of_a_peer_that_left_unconnected(ranks: RankServer) -> None:
    assert ranks.run(2, leaves_unconnected, timeout=None) == ["it has left", ""]


def dies_unconnected(when: str) -> str:
    """Rank 1 dies before or while rank 0 waits for it."""
    transport, rank, _ = opened("gloo")
    assert isinstance(transport, GlooTransport)
    if rank == 1:
        transport._store.set("pid", str(os.getpid()))
        transport._store.wait(["die"], timedelta(seconds=LIMIT))
        os.kill(os.getpid(), signal.SIGKILL)
    peer = os.pidfd_open(int(transport._store.get("pid")))
    if when == "before":
        transport._store.set("die", "")
        assert select.select([peer], [], [], LIMIT)[0]
    transfer = transport.recv(memoryview(bytearray(1)), 1, 1)
    if when == "while":
        assert not transfer.wait(0.3)  # it lives, but wants nothing
        transport._store.set("die", "")
    with pytest.raises(TransportError) as caught:
        transfer.wait(LIMIT)
    transport.close()
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


def no_such_transport() -> str:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="transport is 'carrier pigeon': expected") as caught:
        transports.open_transport("carrier pigeon", store, 0, 1, "127.0.0.1")
    return str(caught.value)


def test_a_name_that_is_none(ranks: RankServer) -> None:
    assert "gloo" in ranks.run(1, no_such_transport, timeout=None)[0]
