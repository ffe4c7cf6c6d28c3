"""The conformance suite of transports, run over all of them."""

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
from phalanx.system.polling import wait_until
from phalanx.transports import Transfer, Transport, TransportError
from phalanx.transports.gloo import GlooTransport
from tests.mpi import MpiRanks
from tests.ranks import RankServer
from tests.seeds import fresh_seed

LIMIT = 20.0


def open_transport(name: str) -> tuple[Transport, int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['FOLDER']}/transport", size)  # type: ignore[attr-defined]
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(bytes(key.SIZE)))
    return transports.open_transport(name, store, rank, size, "127.0.0.1"), rank, size


def wait_all(*transfers: Transfer) -> None:
    for transfer in transfers:
        assert transfer.wait(LIMIT), "the transfer has not completed"


def make_data(seed: int, source: int, target: int, number: int, size: int) -> bytearray:
    return bytearray(Random(f"{seed} {source} {target} {number}").randbytes(size))


def all_pairs(name: str, seed: int) -> None:
    """Every rank sends data of all sizes to every other rank, posted in a random order."""
    transport, rank, size = open_transport(name)
    sizes = (1, 7, 256, 4096, 65_537, 3_000_001)
    others = [peer for peer in range(size) if peer != rank]
    operations = [(peer, tag, is_send) for peer in others for tag in range(6) for is_send in (0, 1)]
    Random(seed + rank).shuffle(operations)
    transfers, receives = [], []
    for peer, tag, is_send in operations:
        if is_send:
            data = make_data(seed, rank, peer, tag, sizes[tag])
            transfers.append(transport.send(memoryview(data), peer, tag))
        else:
            buffer = bytearray(sizes[tag])
            receives.append((peer, tag, buffer))
            transfers.append(transport.recv(memoryview(buffer), peer, tag))
    wait_all(*transfers)
    for peer, tag, buffer in receives:
        assert buffer == make_data(seed, peer, rank, tag, sizes[tag])
    transport.close()


def in_order(name: str, seed: int) -> None:
    """Transfers with one tag match in the order of their posts; another tag may overtake them."""
    transport, rank, _ = open_transport(name)
    count = 200
    if rank == 0:
        sent = [
            transport.send(memoryview(make_data(seed, 0, 1, n, 64)), 1, 3) for n in range(count)
        ]
        last = transport.send(memoryview(make_data(seed, 0, 1, count, 64)), 1, 4)
        wait_all(last, *sent)
    else:
        first = bytearray(64)
        wait_all(transport.recv(memoryview(first), 0, 4))
        assert first == make_data(seed, 0, 1, count, 64)
        buffers = [bytearray(64) for _ in range(count)]
        wait_all(*[transport.recv(memoryview(buffer), 0, 3) for buffer in buffers])
        assert buffers == [make_data(seed, 0, 1, n, 64) for n in range(count)]
    transport.close()


def wait_times_out(name: str, seed: int) -> float:
    """A wait ends at its timeout, and the transfer continues."""
    transport, rank, _ = open_transport(name)
    buffer = bytearray(8)
    took = 0.0
    if rank == 0:
        transfer = transport.recv(memoryview(buffer), 1, 1)
        start = time.monotonic()
        assert not transfer.wait(0)
        assert not transfer.wait(0.2)
        took = time.monotonic() - start
        wait_all(transport.send(memoryview(bytearray(b"go on...")), 1, 2))
        wait_all(transfer)
        assert buffer == b"here it "
    else:
        wait_all(transport.recv(memoryview(buffer), 0, 2))
        wait_all(transport.send(memoryview(bytearray(b"here it ")), 0, 1))
    transport.close()
    return took


def done_callbacks(name: str, seed: int) -> None:
    """Done callbacks are called after a success and after a failure."""
    transport, rank, _ = open_transport(name)
    import threading

    events = [threading.Event(), threading.Event()]
    buffer = bytearray(4)
    if rank == 0:
        first = transport.recv(memoryview(buffer), 1, 1)
        first.add_done_callback(events[0].set)
        assert events[0].wait(LIMIT)
        assert first.wait(0)
        assert buffer == b"text"
        never = transport.recv(memoryview(buffer), 1, 1)
        never.add_done_callback(events[1].set)
        transport.abort()
        assert events[1].wait(LIMIT)
        with pytest.raises(TransportError):
            never.wait(0)
    else:
        wait_all(transport.send(memoryview(bytearray(b"text")), 0, 1))
        with pytest.raises(TransportError):
            transport.recv(memoryview(buffer), 0, 5).wait(LIMIT)
    transport.close()


def abort(name: str, seed: int) -> None:
    """An abort fails pending transfers on both ranks, and all later ones."""
    transport, rank, _ = open_transport(name)
    buffer = bytearray(8)
    transfer = transport.recv(memoryview(buffer), 1 - rank, 1)
    if rank == 0:
        wait_all(transport.recv(memoryview(bytearray(1)), 1, 2))
        transport.abort()
    else:
        wait_all(transport.send(memoryview(bytearray(b"x")), 0, 2))
    with pytest.raises(TransportError):
        transfer.wait(LIMIT)
    with pytest.raises(TransportError):
        wait_all(
            transport.send(memoryview(bytearray(b"x")), 1 - rank, 3),
            transport.recv(memoryview(buffer), 1 - rank, 4),
        )
    transport.close()


def close_after_send(name: str, seed: int) -> None:
    """Data that were sent arrive even if their sender has left."""
    transport, rank, _ = open_transport(name)
    size = 5_000_000
    if rank == 0:
        wait_all(transport.send(memoryview(make_data(seed, 0, 1, 0, size)), 1, 1))
        transport.close()
    else:
        buffer = bytearray(size)
        wait_all(transport.recv(memoryview(buffer), 0, 1))
        assert buffer == make_data(seed, 0, 1, 0, size)
        transport.close()


CASES = (
    (2, all_pairs),
    (4, all_pairs),
    (2, in_order),
    (2, wait_times_out),
    (2, done_callbacks),
    (2, abort),
    (2, close_after_send),
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ("gloo", "relay"))
@pytest.mark.parametrize(("size", "function"), CASES)
def test_gloo_and_relay(
    ranks: RankServer, size: int, function: Callable[[str, int], object], name: str
) -> None:
    ranks.run(size, function, name, fresh_seed(), timeout=None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("size", "function"), CASES)
def test_mpi(under_mpirun: MpiRanks, size: int, function: Callable[[str, int], object]) -> None:
    under_mpirun.run(size, function, "mpi", fresh_seed())


def peer_dies(name: str) -> str:
    transport, rank, _ = open_transport(name)
    if rank == 1:
        # A completed send may still be in this process. A reply shows that it has arrived.
        wait_all(transport.send(memoryview(bytearray(b"x")), 0, 1))
        wait_all(transport.recv(memoryview(bytearray(1)), 0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_all(transport.recv(memoryview(bytearray(1)), 1, 1))
    wait_all(transport.send(memoryview(bytearray(b"y")), 1, 1))
    with pytest.raises(TransportError) as caught:
        transport.recv(memoryview(bytearray(8)), 1, 2).wait(LIMIT)
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ("gloo", "relay"))
def test_dead_peer(ranks: RankServer, name: str) -> None:
    first, second = ranks.start(2, peer_dies, name, timeout=None).join()
    assert first.value
    assert second.code == -signal.SIGKILL


def abort_while_peer_connects(late: int) -> bool:
    """One of ranks 0 and 1 connects late; the other, which is connected with 2, aborts."""
    transport, rank, _ = open_transport("gloo")
    assert isinstance(transport, GlooTransport)
    if rank != late:
        other = 2 if rank != 2 else 1 - late
        buffer = memoryview(bytearray(1))
        wait_all(
            transport.send(memoryview(bytearray(b"x")), other, 1), transport.recv(buffer, other, 1)
        )
    if rank == 2:
        transport._store.wait(["aborted"], timedelta(seconds=LIMIT))
        transport.close()
        return True
    peer_ready, may_connect = threading.Event(), threading.Event()
    original = transport._wait_for_peer

    def wait_for_peer(peer: int) -> bool:
        is_ready = original(peer)
        peer_ready.set()
        assert rank != late or may_connect.wait(LIMIT)
        return is_ready

    transport._wait_for_peer = wait_for_peer  # type: ignore[method-assign]
    transfer = transport.recv(memoryview(bytearray(1)), 1 - rank, 1)
    assert peer_ready.wait(LIMIT)
    if rank == late:
        transport._store.wait(["aborting"], timedelta(seconds=LIMIT))
        may_connect.set()
        assert transport._connections[1 - rank].resolved.wait(LIMIT)
        transport._store.wait(["aborted"], timedelta(seconds=LIMIT))
        transport._store.set("connected", "")
    else:
        assert wait_until(lambda: transport._connections[1 - rank].is_started, LIMIT)
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
    return rank == late or transport._connections[1 - rank].is_connected


@pytest.mark.parametrize("late", (0, 1))
def test_gloo_abort_waits_for_connections_in_progress(ranks: RankServer, late: int) -> None:
    """Otherwise, Gloo would abort the process when the connection is made."""
    assert ranks.run(3, abort_while_peer_connects, late, timeout=None) == [True] * 3


def peer_does_not_connect() -> bool:
    transport, rank, _ = open_transport("gloo")
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
    return transport._connections[1].is_started


def test_gloo_does_not_connect_to_a_peer_without_transfers(ranks: RankServer) -> None:
    """A connection attempt without an answer could not be aborted safely."""
    assert ranks.run(2, peer_does_not_connect, timeout=None) == [False, False]


def leave_unconnected() -> str:
    transport, rank, _ = open_transport("gloo")
    if rank == 1:
        transport.close()
        return ""
    with pytest.raises(TransportError) as caught:
        transport.recv(memoryview(bytearray(1)), 1, 1).wait(LIMIT)
    transport.close()
    assert caught.value.peer == 1
    return str(caught.value)


def test_gloo_detects_a_peer_that_left_unconnected(ranks: RankServer) -> None:
    assert ranks.run(2, leave_unconnected, timeout=None) == ["it has left", ""]


def die_unconnected(when: str) -> str:
    """Rank 1 dies before or while rank 0 waits for it."""
    transport, rank, _ = open_transport("gloo")
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
        assert not transfer.wait(0.3)  # the peer is alive, but has posted no transfer
        transport._store.set("die", "")
    with pytest.raises(TransportError) as caught:
        transfer.wait(LIMIT)
    transport.close()
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("when", "message"),
    [("before", "Connection refused"), ("while", "Connection reset by peer")],
)
def test_gloo_detects_a_peer_that_died_unconnected(
    ranks: RankServer, when: str, message: str
) -> None:
    survivor, victim = ranks.start(2, die_unconnected, when, timeout=None).join()
    assert survivor.value == message
    assert victim.code == -signal.SIGKILL


def die_connecting() -> None:
    """Rank 0 requests connections and dies; the others have begun to make them by then."""
    transport, rank, size = open_transport("gloo")
    assert isinstance(transport, GlooTransport)
    if rank == 0:
        for peer in range(1, size):
            transport._store.set(f"0/wants/{peer}", "")
        transport._store.wait([f"started/{peer}" for peer in range(1, size)])
        os.kill(os.getpid(), signal.SIGKILL)
    transfer = transport.recv(memoryview(bytearray(1)), 0, 1)
    assert wait_until(lambda: transport._connections[0].is_started, LIMIT)
    transport._store.set(f"started/{rank}", "")
    with pytest.raises(TransportError) as caught:
        transfer.wait(LIMIT)
    assert caught.value.peer == 0
    with pytest.raises(TransportError):
        transport.send(memoryview(bytearray(b"x")), 0, 1).wait(LIMIT)
    transport.close()
    os._exit(0)  # a thread of Gloo waits for rank 0


def test_gloo_detects_a_peer_that_died_connecting(ranks: RankServer) -> None:
    """Which of two ranks waits for the other, Gloo decides by random ports: there are five."""
    victim, *survivors = ranks.start(6, die_connecting, timeout=None).join()
    assert victim.code == -signal.SIGKILL
    assert [each.code for each in survivors] == [0] * 5, [each.report() for each in survivors]


def unknown_name() -> str:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="transport is 'carrier pigeon': expected") as caught:
        transports.open_transport("carrier pigeon", store, 0, 1, "127.0.0.1")
    return str(caught.value)


def test_unknown_name(ranks: RankServer) -> None:
    assert "gloo" in ranks.run(1, unknown_name, timeout=None)[0]
