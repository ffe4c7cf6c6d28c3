"""Unauthenticated connections: nothing that they send is executed, and the worker works on."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from phalanx import rpc
from phalanx.errors import PhalanxError
from phalanx.rpc import local_connection, workers
from phalanx.rpc.agent import agent
from phalanx.rpc.event_loop import Reactor
from phalanx.rpc.message import Kind, encode_frame
from tests.fuzz.attack import run_attack
from tests.ranks import RankServer
from tests.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    ranks.preload("phalanx.rpc")


def echo(value: Any) -> Any:
    return value


@pytest.mark.parametrize("hosts", ["", "aba"])
def test_garbage(ranks: RankServer, hosts: str) -> None:
    """Run a short form of `make fuzz`."""
    seed = random.randrange(2**32)
    lines, _, _ = ranks.run(3, run_attack, 1500, seed, hosts=hosts)[0]
    # Only the first of many is logged.
    assert sum("rejected a connection" in line for line in lines) == 1, (seed, lines)
    assert sum("dropped a malformed message" in line for line in lines) == 1, (seed, lines)
    assert len(lines) == 2, (seed, lines)


# ---- on a host ----

KEY = bytes(range(32))


class AcceptorThread:
    """An acceptor with an event loop of its own."""

    def __init__(self) -> None:
        self.address = f"phalanx-test-{os.urandom(16).hex()}"
        self.rejected_count = 0
        self.authenticated: list[local_connection.LocalConnection] = []
        self._reactor = Reactor(lambda _: None, lambda: None)
        self.acceptor = local_connection.Acceptor(
            KEY, self.address, self._reactor, self.authenticated.append, self._reject
        )
        self.acceptor.open()
        self._reactor.threads.start()

    def _reject(self) -> None:
        self.rejected_count += 1

    def close(self) -> None:
        self._reactor.stop()
        self.acceptor.close()
        for connection in self.authenticated:
            connection.close()
        self._reactor.close()


@pytest.fixture
def acceptor() -> Any:
    acceptor = AcceptorThread()
    yield acceptor
    acceptor.close()


def connect(address: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(20)
    client.connect("\0" + address)
    return client


def receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := client.recv(size - len(data))):
        data += part
    return data


def is_rejected(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_proof_is_valid_for_one_connection(acceptor: AcceptorThread) -> None:
    """Neither the listener's proof nor that of another connection authenticates a connection."""
    initiator = local_connection.make_handshake(KEY, acceptor.address, is_initiator=True)
    hello, size = initiator.begin(), initiator.missing
    with connect(acceptor.address) as first, connect(acceptor.address) as second:
        first.sendall(hello)
        data = receive(first, size)
        nonce, proof = data[-64:-32], data[-32:]
        # Its own challenge, reflected by a second connection, proves nothing.
        second.sendall(hello[:-32] + nonce)
        reflected = receive(second, size)[-32:]
        first.sendall(reflected)
        second.sendall(proof)
        assert is_rejected(first)
        assert is_rejected(second)
    # A recorded proof of an accepted connection.
    with connect(acceptor.address) as good, connect(acceptor.address) as replay:
        good.sendall(hello)
        proof = initiator.receive(receive(good, size))
        good.sendall(proof)
        wait_for(lambda: len(acceptor.authenticated) == 1)
        replay.sendall(hello)
        receive(replay, size)
        replay.sendall(proof)
        assert is_rejected(replay)
    wait_for(lambda: (len(acceptor.authenticated), acceptor.rejected_count) == (1, 3))


def test_proof_is_valid_at_one_address(acceptor: AcceptorThread) -> None:
    """A relay at the address of a dead worker cannot use the proofs that it forwards."""
    fake_address = f"phalanx-test-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + fake_address)
        listener.listen()

        def relay() -> None:
            caller, _ = listener.accept()
            with caller, connect(acceptor.address) as server:
                server.sendall(receive(caller, 40))
                caller.sendall(receive(server, 72))
                receive(caller, 1)

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(PhalanxError, match="does not know the job's key"):
            local_connection.connect(KEY, fake_address)
        thread.join(60)
    assert not acceptor.authenticated


def test_listener_must_prove_the_key(acceptor: AcceptorThread) -> None:
    with pytest.raises(PhalanxError, match="does not know the job's key"):
        local_connection.connect(bytes(32), acceptor.address)
    with pytest.raises(OSError, match="refused"):
        local_connection.connect(KEY, "phalanx-test-nobody")


def test_process_of_another_user(acceptor: AcceptorThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with processes of another user are rejected in both directions."""
    initiator, seen_by_initiator = threading.current_thread(), iter((4242,))
    seen_by_listener = iter((os.geteuid(), 4242))

    def peer_user(_: socket.socket) -> int:
        is_initiator = threading.current_thread() is initiator
        return next(seen_by_initiator if is_initiator else seen_by_listener)

    monkeypatch.setattr(local_connection, "_peer_user", peer_user)
    with pytest.raises(PhalanxError, match="another user"):
        local_connection.connect(KEY, acceptor.address)
    with connect(acceptor.address) as client:
        assert is_rejected(client)
    wait_for(lambda: acceptor.rejected_count == 1)


def test_a_peer_that_gives_up_is_no_stranger(acceptor: AcceptorThread) -> None:
    """A caller whose timeout passes while it connects does not lack the key."""
    initiator = local_connection.make_handshake(KEY, acceptor.address, is_initiator=True)
    for hello in (b"", initiator.begin()[:5], initiator.begin()):
        with connect(acceptor.address) as client:
            client.sendall(hello)
            wait_for(lambda: len(acceptor.acceptor._pending) == 1)
        wait_for(lambda: not acceptor.acceptor._pending)
    assert acceptor.rejected_count == 0


def test_many_silent_connections(acceptor: AcceptorThread) -> None:
    """Silent connections are closed to make room; authenticated ones still succeed."""
    silent: list[socket.socket] = []
    try:
        for number in range(300):
            silent.append(connect(acceptor.address))
            silent[-1].send(local_connection._PROTOCOL[:1])
            if number % 50 == 0:
                local_connection.connect(KEY, acceptor.address).close()
        wait_for(lambda: acceptor.rejected_count >= 300 - local_connection._MAX_HANDSHAKES)
        assert len(acceptor.acceptor._pending) <= local_connection._MAX_HANDSHAKES
    finally:
        for client in silent:
            client.close()


def test_announced_length_is_not_trusted() -> None:
    """An announced length is not allocated; one beyond the limit ends the connection."""
    for length in (2**28 + 1, 10**12, 2**64 - 1):
        first, second = socket.socketpair()
        connection = local_connection.LocalConnection(first)
        with second:
            second.sendall(local_connection._LENGTH.pack(length) + b"and little more")
            assert connection.read() is None
        connection.close()
    first, second = socket.socketpair()
    connection = local_connection.LocalConnection(first)
    with second:
        second.sendall(local_connection._LENGTH.pack(2**28) + bytes(1000))
        assert connection.read() == []
        assert connection._buffer.__sizeof__() < 10_000
    connection.close()


def test_peer_that_does_not_read_blocks_one_thread() -> None:
    first, second = socket.socketpair()
    connection = local_connection.LocalConnection(first)
    answers = [os.urandom(50_000) for _ in range(40)]
    threads = [threading.Thread(target=connection.send_answer, args=(each,)) for each in answers]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(thread.is_alive() for thread in threads) == 1)
    reader, received = local_connection.LocalConnection(second), []
    while len(received) < len(answers):
        message = reader.receive(time.monotonic() + 20)
        assert message is not None
        received.append(message[0])
    assert sorted(received) == sorted(answers)
    for thread in threads:
        thread.join(60)
    connection.close()
    reader.close()


# ---- logging, and the key that workers generate ----


def log_rejections() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.rpc").addHandler(handler)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}")
    if rank == 0:
        victim = agent().peers[1]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        canary = f"{os.environ['FOLDER']}/canary"
        bomb = encode_frame(
            Kind.CALL, 0, 1, payload=pickle.dumps((Path.touch, (Path(canary),), {}, 1))
        )
        for _ in range(5):
            client = context.socket(zmq.DEALER)
            client.connect(victim.address)
            with contextlib.suppress(zmq.Again):  # rejected before it could send
                client.send(bomb, zmq.NOBLOCK)
            assert rpc.rpc_sync(1, echo, (3,)) == 3
            assert torch.equal(rpc.rpc_sync(1, echo, (torch.ones(9000),)), torch.ones(9000))
            client.poll(100)
            client.close(0)
        context.destroy(0)
        assert not os.path.exists(canary)
    rpc.shutdown(timeout=30)
    return lines


def test_rejections_are_logged_once(ranks: RankServer) -> None:
    lines = ranks.run(2, log_rejections, hosts="ab")
    assert [len(each) for each in lines] == [0, 1]
    assert "'worker-1' rejected a connection without the job's key" in lines[1][0]


def test_generated_keys_differ(tmp_path: Path) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    keys = {workers.agree_on_key(HashStore(), 0, 5.0) for _ in range(5)}
    assert [len(each) for each in keys] == [32] * 5
