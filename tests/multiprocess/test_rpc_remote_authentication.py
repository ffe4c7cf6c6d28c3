"""Unauthenticated connections from other hosts: they fail at the handshake."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from phalanx.rpc.remote_connection import (
    RemoteConnection,
    RemoteContext,
    RemoteDealer,
    RemoteRouter,
)
from tests.waiting import wait_for

KEY = bytes(range(32))


class EchoRouter:
    """A router that echoes and records the frames that it receives."""

    def __init__(self) -> None:
        self.context = RemoteContext(KEY, "127.0.0.1")
        self.router: RemoteRouter = self.context.router
        self.received: list[bytes] = []
        self.failures = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_stopped:
            for identity, (frame, out_of_band) in self.router.receive():
                self.received.append(frame)
                self.router.send(identity, frame, out_of_band)
            self.failures += self.router.has_event()
            time.sleep(0.001)

    def close(self) -> None:
        self._is_stopped = True
        self._thread.join()
        self.context.close()


@pytest.fixture
def echo_router() -> Any:
    router = EchoRouter()
    yield router
    router.close()


def without_curve(socket: zmq.Socket[bytes], context: RemoteContext) -> None:
    pass


def with_password(socket: zmq.Socket[bytes], context: RemoteContext) -> None:
    socket.plain_username, socket.plain_password = b"worker", b"key"


def with_another_key(socket: zmq.Socket[bytes], context: RemoteContext) -> None:
    socket.curve_serverkey, _ = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def with_key_of_another_job(socket: zmq.Socket[bytes], context: RemoteContext) -> None:
    socket.curve_serverkey = zmq.curve_public(z85.encode(bytes(32)))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def check_service(echo_router: EchoRouter) -> None:
    """A peer with the key is served meanwhile."""
    connection = RemoteConnection(
        RemoteContext(KEY, "127.0.0.1"), echo_router.router.address, os.eventfd(0)
    )
    connection.send(b"mine", [])
    assert connection.receive(time.monotonic() + 20) == (b"mine", [])
    connection.close()


def try_to_send(client: zmq.Socket[bytes], frame: bytes) -> None:
    """Send a frame; do nothing if the connection is already rejected and its queue deleted."""
    with contextlib.suppress(zmq.Again):
        client.send(frame, zmq.NOBLOCK)


def test_unauthenticated_peers_are_rejected(echo_router: EchoRouter) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for number, set_up in enumerate(
        (without_curve, with_password, with_another_key, with_key_of_another_job)
    ):
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        set_up(client, echo_router.context)
        client.connect(echo_router.router.address)
        try_to_send(client, b"unauthenticated")
        wait_for(lambda number=number: echo_router.failures > number)  # type: ignore[misc]
        check_service(echo_router)
        client.close()
    context.term()
    assert set(echo_router.received) == {b"mine"}


def test_impostor_at_the_address_of_a_peer() -> None:
    """A failed handshake is counted, and senders are not blocked."""
    remote_context = RemoteContext(KEY, "127.0.0.1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.bind("tcp://127.0.0.1:*")
    # Either side may end the connection first: a queue is deleted only if this side does.
    dealers = [
        RemoteDealer(remote_context, impostor.getsockopt_string(zmq.LAST_ENDPOINT))
        for _ in range(20)
    ]
    for dealer in dealers:
        wait_for(dealer.has_event)
    wait_for(lambda: not all(dealer._socket.poll(0, zmq.POLLOUT) for dealer in dealers))

    def send() -> None:
        for dealer in dealers:
            dealer.send(b"a call", [memoryview(b"1")])

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(60)
    assert not sender.is_alive()
    for dealer in dealers:
        dealer.close()
    remote_context.close()
    context.destroy(0)


class Proxy:
    """A proxy between two hosts that records and may change all data."""

    def __init__(self, to: str, change: Callable[[int, bytes], bytes]) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._to, self._change = (host, int(port)), change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        caller, _ = self._listener.accept()
        server = socket.create_connection(self._to)
        threading.Thread(target=self._forward, args=(server, caller, None), daemon=True).start()
        self._forward(caller, server, self.recorded)

    def _forward(
        self, source: socket.socket, destination: socket.socket, recorded: list[bytes] | None
    ) -> None:
        forwarded = 0
        while True:
            try:
                data = source.recv(65536)
                if recorded is not None:
                    recorded.append(data)
                    data = self._change(forwarded, data)
                forwarded += len(data)
                destination.sendall(data)
            except OSError:
                data = b""
            if not data:
                break
        for each in (source, destination):
            each.close()

    def close(self) -> None:
        self._listener.close()


def test_recorded_and_changed_data(echo_router: EchoRouter) -> None:
    """Recorded data cannot be replayed; changed data is never read."""
    context = RemoteContext(KEY, "127.0.0.1")
    proxy = Proxy(echo_router.router.address, lambda _, data: data)
    connection = RemoteConnection(context, proxy.address, os.eventfd(0))
    connection.send(b"a secret", [])
    assert connection.receive(time.monotonic() + 20) == (b"a secret", [])
    connection.close()
    proxy.close()
    recorded = b"".join(proxy.recorded)
    assert len(recorded) > 64 + 200
    assert b"a secret" not in recorded
    public = z85.decode(context._server.public)
    assert public not in recorded  # with the key of the server anyone could connect
    host, _, port = echo_router.router.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as replay:
        replay.sendall(recorded)
        while replay.recv(65536):  # until it is rejected
            pass
    assert echo_router.received.count(b"a secret") == 1
    corrupting_proxy = Proxy(
        echo_router.router.address,
        lambda forwarded, data: data[:-1] + bytes([data[-1] ^ 1]) if forwarded > 300 else data,
    )
    dealer = RemoteDealer(context, corrupting_proxy.address)
    dealer.send(b"to be changed", [])
    wait_for(dealer.has_event)  # the connection ends
    assert b"to be changed" not in echo_router.received
    check_service(echo_router)
    dealer.close()
    corrupting_proxy.close()
    context.close()
