"""A worker among strangers of other hosts: they get no further than the handshake."""

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

from phalanx.rpc.transport.remote import RemoteConnection, RemoteContext, RemoteDealer, RemoteRouter
from tests.waiting import wait_for

KEY = bytes(range(32))


class Served:
    """An inbox, and what comes into it."""

    def __init__(self) -> None:
        self.far = RemoteContext(KEY, "127.0.0.1")
        self.inbox: RemoteRouter = self.far.router
        self.come: list[bytes] = []
        self.mishaps = 0
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over:
            for who, (frame, behind) in self.inbox.receive():
                self.come.append(frame)
                self.inbox.send(who, frame, behind)
            self.mishaps += self.inbox.has_event()
            time.sleep(0.001)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.far.close()


@pytest.fixture
def served() -> Any:
    made = Served()
    yield made
    made.close()


def without_curve(socket: zmq.Socket[bytes], far: RemoteContext) -> None:
    pass


def with_a_password(socket: zmq.Socket[bytes], far: RemoteContext) -> None:
    socket.plain_username, socket.plain_password = b"worker", b"key"


def with_another_key(socket: zmq.Socket[bytes], far: RemoteContext) -> None:
    socket.curve_serverkey, _ = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def with_the_secret_of_another_job(socket: zmq.Socket[bytes], far: RemoteContext) -> None:
    socket.curve_serverkey = zmq.curve_public(z85.encode(bytes(32)))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def called(served: Served) -> None:
    """One who has the key is served all the while."""
    line = RemoteConnection(RemoteContext(KEY, "127.0.0.1"), served.inbox.address, os.eventfd(0))
    line.send(b"mine", [])
    assert line.receive(time.monotonic() + 20) == (b"mine", [])
    line.close()


def say(stranger: zmq.Socket[bytes], words: bytes) -> None:
    """What can't be said by who has been turned away already: its queue is gone."""
    with contextlib.suppress(zmq.Again):
        stranger.send(words, zmq.NOBLOCK)


def test_who_does_not_know_the_key_says_nothing(served: Served) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for number, how in enumerate(
        (without_curve, with_a_password, with_another_key, with_the_secret_of_another_job)
    ):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        how(stranger, served.far)
        stranger.connect(served.inbox.address)
        say(stranger, b"a stranger's")
        wait_for(lambda number=number: served.mishaps > number)  # type: ignore[misc]
        called(served)
        stranger.close()
    context.term()
    assert set(served.come) == {b"mine"}


def test_a_stranger_who_has_the_address_of_a_peer() -> None:
    """It is a mishap, and who sends to it isn't held."""
    far = RemoteContext(KEY, "127.0.0.1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.ROUTER)
    stranger.bind("tcp://127.0.0.1:*")
    # Which of the two ends the connection is a race: a queue is gone only where this one does.
    boxes = [RemoteDealer(far, stranger.getsockopt_string(zmq.LAST_ENDPOINT)) for _ in range(20)]
    for box in boxes:
        wait_for(box.has_event)
    wait_for(lambda: not all(box._socket.poll(0, zmq.POLLOUT) for box in boxes))

    def send() -> None:
        for box in boxes:
            box.send(b"a call", [memoryview(b"1")])

    sends = threading.Thread(target=send, daemon=True)
    sends.start()
    sends.join(20)
    assert not sends.is_alive()
    for box in boxes:
        box.close()
    far.close()
    context.destroy(0)


class Between:
    """One on the way who sees, keeps and may change all that goes between two hosts."""

    def __init__(self, to: str, change: Callable[[int, bytes], bytes]) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._to, self._change = (host, int(port)), change
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listens.getsockname()[1]}"
        self.said: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        caller, _ = self._listens.accept()
        real = socket.create_connection(self._to)
        threading.Thread(target=self._pass_on, args=(real, caller, None), daemon=True).start()
        self._pass_on(caller, real, self.said)

    def _pass_on(self, one: socket.socket, other: socket.socket, kept: list[bytes] | None) -> None:
        passed = 0
        while True:
            try:
                data = one.recv(65536)
                if kept is not None:
                    kept.append(data)
                    data = self._change(passed, data)
                passed += len(data)
                other.sendall(data)
            except OSError:
                data = b""
            if not data:
                break
        for each in (one, other):
            each.close()

    def close(self) -> None:
        self._listens.close()


def test_who_records_or_changes_what_is_said(served: Served) -> None:
    """What was recorded is worth nothing later on; what was changed is never read."""
    far = RemoteContext(KEY, "127.0.0.1")
    between = Between(served.inbox.address, lambda _, data: data)
    line = RemoteConnection(far, between.address, os.eventfd(0))
    line.send(b"a secret", [])
    assert line.receive(time.monotonic() + 20) == (b"a secret", [])
    line.close()
    between.close()
    recorded = b"".join(between.said)
    assert len(recorded) > 64 + 200
    assert b"a secret" not in recorded
    public = z85.decode(far._public)
    assert public not in recorded  # the key of the server, which who knows it may connect with
    host, _, port = served.inbox.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as replay:
        replay.sendall(recorded)
        while replay.recv(65536):  # until it is turned away
            pass
    assert served.come.count(b"a secret") == 1
    flipped = Between(
        served.inbox.address,
        lambda passed, data: data[:-1] + bytes([data[-1] ^ 1]) if passed > 300 else data,
    )
    box = RemoteDealer(far, flipped.address)
    box.send(b"to be changed", [])
    wait_for(box.has_event)  # the connection ends
    assert b"to be changed" not in served.come
    called(served)
    box.close()
    flipped.close()
    far.close()
