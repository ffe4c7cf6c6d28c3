"""The relay beyond the conformance suite of transports."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

import phalanx
from phalanx import key, transports
from phalanx.transports import TransportError
from phalanx.transports.relay.connection import RelayConnection
from phalanx.transports.relay.protocol import (
    Frame,
    Kind,
    LeaveReason,
    client_key_pair,
    server_key_pair,
)
from phalanx.transports.relay.server import ChannelRegistry, RelayServer
from phalanx.transports.relay.transport import _MAX_EAGER_BYTES
from tests.fault.test_again import check_group
from tests.fault.test_shrink import fail_until_lost
from tests.ports import find_free_port
from tests.ranks import RankServer, connect_ranks, marker_file, wait_for_file
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LIMIT = 30.0
KEY = b"k" * key.SIZE
CHANNEL = b"c" * 16


class RecordingListener:
    """A listener that records the frames of a channel."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, int, bytes]] = []
        self.reason = ""
        self._change = threading.Condition()

    def handle_frame(self, frame: Frame, data: memoryview) -> None:
        with self._change:
            self.frames.append((frame.kind, frame.peer, bytes(data)))
            self._change.notify()

    def handle_disconnect(self, reason: str) -> None:
        with self._change:
            self.reason = reason
            self._change.notify()

    def wait_for(self, count: int) -> list[tuple[Kind, int, bytes]]:
        with self._change:
            assert self._change.wait_for(lambda: len(self.frames) >= count, LIMIT), self.frames
            return self.frames


@pytest.fixture
def server() -> Iterator[RelayServer]:
    relay = RelayServer(KEY, "tcp://127.0.0.1:*")
    yield relay
    relay.close()


def join_channel(
    server: RelayServer, rank: int, size: int = 0
) -> tuple[RelayConnection, RecordingListener]:
    connection, listener = RelayConnection(server.endpoint, KEY), RecordingListener()
    connection.send(Frame(Kind.JOIN, CHANNEL, rank, value=size))
    connection.add_listener(CHANNEL, listener)
    return connection, listener


def exchange(server: RelayServer) -> None:
    """Check that two ranks can exchange a message."""
    (first, one), (second, two) = join_channel(server, 0), join_channel(server, 1)
    first.send(Frame(Kind.SUBSCRIBE, CHANNEL, 1))
    assert one.wait_for(1) == [(Kind.PRESENT, 1, b"")]
    first.send(Frame(Kind.EAGER, CHANNEL, 1), b"text")
    assert two.wait_for(1) == [(Kind.EAGER, 0, b"text")]
    second.close()
    assert one.wait_for(2)[1:] == [(Kind.GONE, 1, b"")]
    first.close()


def test_wrong_key(server: RelayServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        for _ in range(2):
            with pytest.raises(TransportError, match="do both have the same job key"):
                RelayConnection(server.endpoint, b"another" * 4 + b"key.")
        exchange(server)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "rejected a connection without the job's key" in messages[0]


def test_client_without_its_own_key(server: RelayServer) -> None:
    """The public key of the relay is not enough: the relay authenticates each client's key."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.CURVE_SERVERKEY, server_key_pair(KEY).public)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(server.endpoint)
        assert monitor.poll(LIMIT * 1000)
        stranger.disable_monitor()


def test_foreign_connections_are_harmless(server: RelayServer) -> None:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    silent = [socket.create_connection((host, int(port)), LIMIT) for _ in range(20)]
    garbage = [socket.create_connection((host, int(port)), LIMIT) for _ in range(3)]
    for number, connection in enumerate(garbage):
        connection.sendall(Random(number).randbytes(10_000))
    exchange(server)
    for connection in (*silent, *garbage):
        connection.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"text"],
        [bytes(42)],
        [Frame(Kind.EAGER, CHANNEL, 0).pack(), b"a", b"b"],
        [Frame(Kind.GONE, CHANNEL, 0).pack()],
        [Frame(Kind.LEAVE, CHANNEL, 0).pack()],
        [Frame(Kind.EAGER, CHANNEL, -7).pack(), b"data"],
        [Frame(Kind.JOIN, CHANNEL, 5).pack(), b"data"],
    ],
)
def test_invalid_frames(server: RelayServer, frames: list[bytes]) -> None:
    """Invalid frames from a process that has the key have no effect on others."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.setsockopt(zmq.LINGER, 0)
        pair = client_key_pair(KEY)
        other.setsockopt(zmq.CURVE_SERVERKEY, server_key_pair(KEY).public)
        other.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        other.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        other.connect(server.endpoint)
        for _ in range(3):
            other.send_multipart(frames)
        exchange(server)


def test_relay_that_ends(server: RelayServer) -> None:
    connection, listener = join_channel(server, 0)
    connection.send(Frame(Kind.SUBSCRIBE, CHANNEL, 0))
    listener.wait_for(1)
    server.close()
    with listener._change:
        assert listener._change.wait_for(lambda: listener.reason, LIMIT)
    assert listener.reason == "the connection is gone"
    connection.close()


def test_relay_that_ends_when_unused(server: RelayServer) -> None:
    (first, one), (second, two) = join_channel(server, 0), join_channel(server, 1)
    first.send(Frame(Kind.SUBSCRIBE, CHANNEL, 1))
    assert one.wait_for(1) == [(Kind.PRESENT, 1, b"")]
    server.end_when_unused()
    first.close()
    second.send(Frame(Kind.SUBSCRIBE, CHANNEL, 0))
    assert two.wait_for(1) == [(Kind.GONE, 0, b"")]
    assert server.keep()
    server.end_when_unused()
    second.close()
    assert server.wait(LIMIT)
    assert not server.keep()
    successor = RelayServer(KEY, server.endpoint)
    exchange(successor)
    successor.close()


def test_message_for_a_rank_that_never_joins(
    server: RelayServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for as long as the rank may take to connect, and its loss is reported."""
    monkeypatch.setattr("phalanx.transports.relay.server.CONNECT_SECONDS", 0.1)
    connection, _ = join_channel(server, 0, size=3)
    for peer in (1, 2, 2):
        connection.send(Frame(Kind.EAGER, CHANNEL, peer), b"text")
    connection.send(Frame(Kind.LEAVE, CHANNEL, 0, value=LeaveReason.CLOSED))
    connection.close()
    late, listener = join_channel(server, 1)
    assert listener.wait_for(1) == [(Kind.EAGER, 0, b"text")]
    with caplog.at_level(logging.WARNING, "phalanx"):
        server.end_when_unused()
        late.close()
        assert server.wait(LIMIT)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "2 messages that it could not deliver" in message
    assert "ranks 2 of" in message


def open_transport(name: str = "relay") -> tuple[transports.Transport, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(KEY))
    store = dist.FileStore(f"{os.environ['FOLDER']}/transport", size)  # type: ignore[attr-defined]
    return transports.open_transport(name, store, rank, size, "127.0.0.1"), rank


def make_data(number: int, size: int) -> bytearray:
    return bytearray(Random(number).randbytes(size))


def send_to_slow_receiver() -> int:
    """Return the growth of memory while a receiver does not request data that were sent to it."""
    transport, rank = open_transport()
    count, size = 24, 4_000_000
    if rank == 0:
        sends = [transport.send(memoryview(make_data(n, size)), 1, n) for n in range(count)]
        before = psutil.Process().memory_info().rss
        last = transport.send(memoryview(make_data(count, 8)), 1, count)
        assert all(send.wait(LIMIT) for send in (last, *sends))
        grown = psutil.Process().memory_info().rss - before
    else:
        before = psutil.Process().memory_info().rss
        # This message was sent after all others.
        buffer = bytearray(8)
        assert transport.recv(memoryview(buffer), 0, count).wait(LIMIT)
        grown = psutil.Process().memory_info().rss - before
        for number in reversed(range(count)):
            buffer = bytearray(size)
            assert transport.recv(memoryview(buffer), 0, number).wait(LIMIT)
            assert buffer == make_data(number, size)
    transport.close()
    return grown


def test_slow_receiver_does_not_buffer(ranks: RankServer) -> None:
    sender, receiver = ranks.run(2, send_to_slow_receiver, timeout=None)
    assert receiver < 10_000_000
    assert sender < 40_000_000  # the relay is in this process


def many_eager_messages() -> None:
    """More than may be buffered at a receiver: the rest stays at the sender, in order."""
    transport, rank = open_transport()
    count, size = 300, 20_000
    if rank == 0:
        sends = [transport.send(memoryview(make_data(n, size)), 1, 1) for n in range(count)]
        assert not sends[-1].wait(0)
        assert transport.send(memoryview(bytearray(b"x")), 1, 2).wait(LIMIT)
        assert all(send.wait(LIMIT) for send in sends)
    else:
        assert transport.recv(memoryview(bytearray(1)), 0, 2).wait(LIMIT)
        for number in range(count):
            buffer = bytearray(size)
            assert transport.recv(memoryview(buffer), 0, 1).wait(LIMIT)
            assert buffer == make_data(number, size)
    transport.close()


def test_many_eager_messages(ranks: RankServer) -> None:
    ranks.run(2, many_eager_messages, timeout=None)


def die_before_a_message_is_taken() -> None:
    """No later message of the same tag and size takes the place of one that is lost."""
    transport, rank = open_transport()
    count, size, later = _MAX_EAGER_BYTES // 20_000, 20_000, 1000
    if rank == 1:
        sends = [transport.send(memoryview(make_data(n, size)), 0, 1) for n in range(count + 1)]
        assert not sends[-1].wait(0)  # it waits at the sender
        marker_file("sent").touch()
        wait_for_file("taken")
        peer: Any = transport._peers[0]  # type: ignore[attr-defined]
        wait_for(lambda: peer._eager_bytes <= (count - 10) * size)
        assert transport.send(memoryview(make_data(later, size)), 0, 1).wait(0)
        assert transport.send(memoryview(bytearray(b"x")), 0, 2).wait(LIMIT)
        wait_for_file("arrived")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_file("sent")
    for number in range(10):
        buffer = bytearray(size)
        assert transport.recv(memoryview(buffer), 1, 1).wait(LIMIT)
        assert buffer == make_data(number, size)
    marker_file("taken").touch()
    assert transport.recv(memoryview(bytearray(1)), 1, 2).wait(LIMIT)
    marker_file("arrived").touch()
    with pytest.raises(TransportError):
        transport.recv(memoryview(bytearray(1)), 1, 3).wait(LIMIT)
    for number in range(10, count):
        buffer = bytearray(size)
        assert transport.recv(memoryview(buffer), 1, 1).wait(LIMIT)
        assert buffer == make_data(number, size)
    with pytest.raises(TransportError):
        transport.recv(memoryview(bytearray(size)), 1, 1).wait(LIMIT)
    transport.close()


def test_a_message_is_lost_with_its_sender(ranks: RankServer) -> None:
    first, second = ranks.start(2, die_before_a_message_is_taken, timeout=None).join()
    assert first.code == 0, first.report()
    assert second.code == -signal.SIGKILL


def mismatched_sizes() -> list[str]:
    transport, rank = open_transport()
    errors = []
    for tag, (sent, expected) in enumerate([(10, 11), (1_000_000, 999_999)]):
        data = memoryview(bytearray(sent if rank == 0 else expected))
        transfer = transport.send(data, 1, tag) if rank == 0 else transport.recv(data, 0, tag)
        try:
            assert transfer.wait(LIMIT)
        except TransportError as error:
            errors.append(str(error))
    transport.close()
    return errors


def test_receive_of_a_different_size(ranks: RankServer) -> None:
    sender, receiver = ranks.run(2, mismatched_sizes, timeout=None)
    assert sender == ["it expects a different size than was sent"]
    assert receiver == [
        "it sends 10 B, but 11 B are expected",
        "it sends 1000000 B, but 999999 B are expected",
    ]


def receive_while_joining() -> bytes:
    """Frames to a rank that has just joined are not lost, even if that rank is slow."""
    folder = Path(os.environ["FOLDER"])
    add = RelayConnection.add_listener

    def slow(connection: RelayConnection, channel: bytes, listener: Any) -> None:
        end = time.monotonic() + 0.5
        while not (folder / "sent").exists() and time.monotonic() < end:
            time.sleep(0.001)
        add(connection, channel, listener)

    if os.environ["RANK"] == "1":
        RelayConnection.add_listener = slow  # type: ignore[method-assign]
    transport, rank = open_transport()
    buffer = bytearray(b"hello" if rank == 0 else b".....")
    if rank == 0:
        assert transport.send(memoryview(buffer), 1, 0).wait(LIMIT)
        peer: Any = transport._peers[1]  # type: ignore[attr-defined]
        end = time.monotonic() + LIMIT
        while peer._queued_frames:
            assert time.monotonic() < end
            time.sleep(0.001)
        (folder / "sent").touch()
    else:
        assert transport.recv(memoryview(buffer), 0, 0).wait(LIMIT)
    transport.close()
    return bytes(buffer)


def test_frames_that_arrive_while_joining(ranks: RankServer) -> None:
    assert ranks.run(2, receive_while_joining, timeout=None) == [b"hello", b"hello"]


def lose_peer_silently() -> float:
    transport, rank = open_transport()
    pid = bytearray(os.getpid().to_bytes(8, "little"))
    if rank == 0:
        assert transport.recv(memoryview(pid), 1, 1).wait(LIMIT)
    assert transport.send(memoryview(pid), 1 - rank, 1).wait(LIMIT)
    if rank == 1:
        assert transport.recv(memoryview(bytearray(8)), 0, 1).wait(LIMIT)
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(TransportError, match="its connection to the relay is gone") as caught:
        transport.recv(memoryview(bytearray(8)), 1, 2).wait(60)
    assert caught.value.peer == 1
    took = time.monotonic() - start
    os.kill(int.from_bytes(pid, "little"), signal.SIGKILL)
    return took


def test_peer_that_vanishes(ranks: RankServer) -> None:
    """The connection stays open but silent, as with a severed link."""
    first, second = ranks.start(2, lose_peer_silently, timeout=None).join()
    assert first.value > 1
    assert second.code == -signal.SIGKILL


def receive_late() -> None:
    """Rank 1 opens its transport when all others have sent to it and left, with the relay."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        for other in (0, 2):
            wait_for_file(f"left{other}")
    transport, _ = open_transport()
    for number in range(10):
        if rank == 1:
            for other in (0, 2):
                buffer = bytearray(100)
                assert transport.recv(memoryview(buffer), other, 3).wait(LIMIT)
                assert buffer == make_data(10 * other + number, 100)
        else:
            data = make_data(10 * rank + number, 100)
            assert transport.send(memoryview(data), 1, 3).wait(LIMIT)
    transport.close()
    marker_file(f"left{rank}").touch()


def test_messages_to_a_rank_that_connects_late(ranks: RankServer) -> None:
    ranks.run(3, receive_late, timeout=None)


def join_over_relay(size: int) -> int:
    """Form the default group over the relay, and return this rank."""
    rank = int(os.environ["RANK"])
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(KEY))
    url = f"file://{os.environ['FOLDER']}/store"
    options = phalanx.Options("relay")
    dist.init_process_group(
        "phalanx", init_method=url, rank=rank, world_size=size, pg_options=options
    )
    return rank


def several_groups() -> int:
    """All groups share one connection to one port. Return the number of listening ports."""
    join_over_relay(4)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [1, 2, 3])]
    for group in (None, *groups):
        if group is None or dist.get_rank(group) >= 0:
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor, group=group)
            assert (tensor == dist.get_world_size(group)).all()
    process = psutil.Process()
    listening = sum(each.status == "LISTEN" for each in process.net_connections())
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("phalanx-relay-connection") == 1
    dist.barrier()
    dist.destroy_process_group()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("phalanx-relay-")])
    return listening


def test_one_port_for_all_groups(ranks: RankServer) -> None:
    assert ranks.run(4, several_groups, timeout=None, hosts="aabb") == [1, 0, 0, 0]


def lose_relay() -> str:
    rank = join_over_relay(5)
    for _ in range(3):
        dist.all_reduce(torch.ones(100_000))
    dist.barrier()
    if rank == 0:
        for other in (1, 2, 3, 4):
            dist.recv(torch.empty(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.ones(1), 0)
    with pytest.raises(phalanx.PeerLost) as caught:
        # Rank 0 takes part in this only by running the relay.
        dist.recv(torch.empty(1), 5 - rank)
    return str(caught.value)


def test_rank_with_the_relay_dies(ranks: RankServer) -> None:
    """The error names that rank, not the peer of the operation."""
    run = ranks.start(5, lose_relay, timeout=None, hosts="abcde")
    first, *others = run.join()
    assert first.code == -signal.SIGKILL
    for other in others:
        assert f"rank 0 (pid {first.pid} on " in other.value


def form_group(size: int, name: str = "store") -> int:
    rank = int(os.environ["RANK"])
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(KEY))
    url = f"file://{os.environ['FOLDER']}/{name}"
    options = phalanx.Options("relay")
    dist.init_process_group(
        "phalanx", init_method=url, rank=rank, world_size=size, pg_options=options
    )
    return rank


def go_on_without_rank_0(is_destroyed: bool) -> None:
    rank = form_group(3)
    connect_ranks()
    if rank == 0:
        if is_destroyed:
            dist.destroy_process_group()
        marker_file("left").touch()
        return
    wait_for_file("left")
    tensor, end = torch.ones(100_000), time.monotonic() + 4
    while tensor.any():
        if rank == 1:
            dist.recv(tensor, 2)
        else:
            tensor.fill_(time.monotonic() < end)
            dist.send(tensor, 1)
    dist.destroy_process_group()


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "exited"])
def test_rank_with_the_relay_leaves_first(ranks: RankServer, is_destroyed: bool) -> None:
    ranks.run(3, go_on_without_rank_0, is_destroyed, timeout=None, hosts="abc")


def die_after_rank_0_has_left() -> None:
    rank = form_group(3)
    connect_ranks()
    if rank == 1:
        wait_for_file("left")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    marker_file("left").touch()


def test_relay_does_not_wait_for_a_rank_that_died(ranks: RankServer) -> None:
    run = ranks.start(3, die_after_rank_0_has_left, timeout=None, hosts="abc")
    assert [each.code for each in run.join()] == [0, -signal.SIGKILL, 0]


def wait_for_rank_0() -> str:
    """Rank 0 ends without leaving the group, and its process goes on, since rank 2 does."""
    rank = form_group(3)
    connect_ranks()
    error = ""
    if rank == 1:
        with pytest.raises(phalanx.CollectiveMismatch, match="has left the group") as caught:
            dist.recv(torch.empty(1), 0)
        error = str(caught.value)
        marker_file("known").touch()
    elif rank == 2:
        wait_for_file("known")
    return error


def test_rank_on_the_host_of_a_relay_that_goes_on(ranks: RankServer) -> None:
    """It learns that the rank does no more, although its process has not ended."""
    first, second, third = ranks.start(3, wait_for_rank_0, timeout=None, hosts="aab").join()
    assert (first.code, third.code) == (0, 0)
    assert "this process has the relay that other ranks still use" in first.stderr
    assert f"rank 0 (pid {first.pid})" in second.value


def form_groups_again(port: int) -> int:
    """Each group has its relay on the same port, on which the former may still be in use."""
    os.environ["PHALANX_ADVERTISE_ADDR"] = f"localhost:{port}"
    used = set()
    for number in range(4):
        rank = form_group(2, f"store{number}")
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
        connections = psutil.Process().net_connections()
        used |= {each.laddr.port for each in connections if each.status == "LISTEN"}
        if rank == number % 2:
            dist.destroy_process_group()
            marker_file(f"left{number}").touch()
        else:
            wait_for_file(f"left{number}")
            dist.destroy_process_group()
    assert used == ({port} if rank == 0 else set())
    return len(used)


def test_relay_after_relay(ranks: RankServer) -> None:
    assert ranks.run(2, form_groups_again, find_free_port(), timeout=None, hosts="ab") == [1, 0]


def shrink_behind_the_relay(rounds: list[list[int]]) -> None:
    """In each round, ranks die whose end others know only from the relay, which a rank may have."""
    rank = join_over_relay(4)
    for victims in rounds:
        connect_ranks()
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        fail_until_lost()
        phalanx.shrink()
        check_group()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "rounds", [[[3]], [[2, 3]], [[0]], [[0], [3]], [[3], [0]]], ids=lambda each: str(each)
)
def test_survivors_go_on(ranks: RankServer, rounds: list[list[int]]) -> None:
    """On two hosts with two ranks each; in one case a whole host dies, in others its relay."""
    run = ranks.start(4, shrink_behind_the_relay, rounds, timeout=None, hosts="aabb")
    for each in run.join():
        is_victim = any(each.rank in victims for victims in rounds)
        assert each.code == (-signal.SIGKILL if is_victim else 0), each.report()


def leave_another_group_before_shrinking() -> None:
    """Rank 0 leaves another group, its last one that works, before rank 2 agrees on who is left."""
    rank = join_over_relay(3)
    other: Any = dist.new_group(backend="phalanx")
    dist.all_reduce(torch.ones(1), group=other)
    connect_ranks()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fail_until_lost(other)
    world: Any = dist.group.WORLD
    if rank == 0:
        wait_for_file("left2")
    world._membership.native.abort("")
    other.abort()
    dist.destroy_process_group(other)
    marker_file(f"left{rank}").touch()
    wait_for_file("left0")
    change = phalanx.shrink()
    assert (change.world_size, change.lost_ranks) == (2, (1,))
    check_group()
    dist.barrier()
    dist.destroy_process_group()


def test_the_relay_stays_for_ranks_that_have_aborted(ranks: RankServer) -> None:
    run = ranks.start(3, leave_another_group_before_shrinking, timeout=None, hosts="abc")
    for each in run.join():
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), each.report()


def test_the_end_of_a_rank_that_has_aborted() -> None:
    """It is reported after the abort, also to those that ask only then, and that aborted too."""
    registry = ChannelRegistry()
    for rank, process in enumerate((b"p0", b"p1", b"p2")):
        assert registry.handle_frame(process, Frame(Kind.JOIN, CHANNEL, rank)) == []
    assert registry.handle_frame(b"p0", Frame(Kind.SUBSCRIBE, CHANNEL, 1))
    leave = Frame(Kind.LEAVE, CHANNEL, 1, value=LeaveReason.ABORTED)
    aborted = Frame(Kind.GONE, CHANNEL, 1, value=LeaveReason.ABORTED)
    assert registry.handle_frame(b"p1", leave) == [(aborted, b"p0")]
    registry.handle_frame(b"p2", leave._replace(peer=2))
    assert registry.handle_frame(b"p2", Frame(Kind.SUBSCRIBE, CHANNEL, 1)) == [(aborted, b"p2")]
    died = Frame(Kind.GONE, CHANNEL, 1, value=LeaveReason.DIED)
    assert registry.remove_process(b"p1") == [(died, b"p0"), (died, b"p2")]
    assert registry.handle_frame(b"p2", Frame(Kind.SUBSCRIBE, CHANNEL, 1)) == [(died, b"p2")]
    closed = Frame(Kind.LEAVE, CHANNEL, 2, value=LeaveReason.CLOSED)
    registry.handle_frame(b"p0", Frame(Kind.SUBSCRIBE, CHANNEL, 2))
    gone = Frame(Kind.GONE, CHANNEL, 2, value=LeaveReason.CLOSED)
    assert registry.handle_frame(b"p2", closed) == [(gone, b"p0")]
    assert registry.remove_process(b"p2") == []
    assert registry.handle_frame(b"p2", Frame(Kind.SUBSCRIBE, CHANNEL, 1)) == []


def advertised(port: int) -> list[int]:
    os.environ["PHALANX_ADVERTISE_ADDR"] = f"localhost:{port}"
    transport, rank = open_transport()
    transfer = (transport.recv if rank else transport.send)(memoryview(bytearray(8)), 1 - rank, 1)
    assert transfer.wait(LIMIT)
    found = [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    transport.close()
    return found


def test_advertised_address(ranks: RankServer) -> None:
    port = find_free_port()
    assert ranks.run(2, advertised, port, timeout=None) == [[port], []]


def open_refused(name: str, variables: dict[str, str], message: str) -> None:
    os.environ.update(variables)
    if "PHALANX_KEY_FILE" in variables:
        store = dist.HashStore()  # type: ignore[attr-defined]
        with pytest.raises(phalanx.UsageError, match=message):
            transports.open_transport(name, store, 0, 1, "127.0.0.1")
        return
    with pytest.raises(phalanx.UsageError, match=message):
        open_transport(name)


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("relay", {"PHALANX_KEY_FILE": ""}, "needs the job's key: .* --key-file"),
        ("relay", {"PHALANX_ADVERTISE_ADDR": "a:b"}, "expected HOST or HOST:PORT"),
        ("relay", {"PHALANX_ADVERTISE_ADDR": "a:99999"}, "expected HOST or HOST:PORT"),
        ("relay", {"PHALANX_RELAY": "/tmp/relay"}, "expected listen:SOCKET or connect:SOCKET"),
        ("gloo", {"PHALANX_ADVERTISE_ADDR": "a:1"}, "use the transport relay"),
        ("gloo", {"PHALANX_ADVERTISE_ADDR": "::1"}, "an IPv6 address in brackets"),
    ],
)
def test_usage_errors(
    ranks: RankServer, name: str, variables: dict[str, str], message: str
) -> None:
    ranks.run(1, open_refused, name, variables, message, timeout=None)


def shrink_before_the_loss_of_the_relay_is_seen() -> None:
    """Rank 0 dies with the relay; rank 1, on its host, forms the next group before it sees that."""
    rank = join_over_relay(3)
    connect_ranks()
    if rank == 1:
        asks = threading.Event()
        disconnect, is_answered = RelayConnection._disconnect, RelayConnection.is_answered

        def disconnect_later(connection: RelayConnection, reason: str) -> None:
            asks.wait()
            disconnect(connection, reason)

        def ask(connection: RelayConnection) -> bool:
            asks.set()
            return is_answered(connection)

        RelayConnection._disconnect = disconnect_later  # type: ignore[method-assign]
        RelayConnection.is_answered = ask  # type: ignore[method-assign]
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fail_until_lost()
    phalanx.shrink()
    check_group()
    assert dist.get_world_size() == 2
    dist.barrier()
    dist.destroy_process_group()


def test_the_next_group_does_not_use_a_relay_that_has_died(ranks: RankServer) -> None:
    run = ranks.start(3, shrink_before_the_loss_of_the_relay_is_seen, timeout=None, hosts="aab")
    ends = run.join()
    reports = "\n".join(each.report() for each in ends)
    assert [each.code for each in ends] == [-signal.SIGKILL, 0, 0], reports
