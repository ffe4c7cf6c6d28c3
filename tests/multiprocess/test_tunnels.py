"""The gate between hosts, by real sockets: who has the key comes in, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.errors import LaunchError
from phalanx.launcher import handshake, tunnel_server
from phalanx.launcher.store import HOST, host_store
from phalanx.launcher.tunnel_client import Way
from phalanx.launcher.tunnel_server import Gate

KEY = b"k" * 32
LIMIT = 20.0


class Guarded:
    """A store behind a gate, and what the gate's user was told."""

    def __init__(self, key: bytes) -> None:
        self.told: list[str] = []
        self.wrong = ""
        self.store = host_store()
        with socket.create_server((HOST, 0)) as free:
            self.port = int(free.getsockname()[1])
        self.gate = Gate(
            HOST, self.port, key, self.store.port, lambda _: self.wrong, self.told.append
        )

    def connect(self) -> socket.socket:
        """As a stranger does."""
        return socket.create_connection((HOST, self.port), timeout=LIMIT)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded(KEY)
    yield made
    made.gate.close()


@pytest.fixture
def way() -> Iterator[Callable[..., Way]]:
    with contextlib.ExitStack() as stack:

        def make(port: int, key: bytes = KEY, number: int = 1, **hello: Any) -> Way:
            made = Way(HOST, port, key, {"number": number, **hello}, lambda _: None)
            stack.callback(made.close)
            return made

        yield make


def use(way: Way) -> None:
    """Enter, and use the store from this host."""
    way.enter(LIMIT)
    limit = timedelta(seconds=LIMIT)
    store = dist.TCPStore(HOST, way.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    big = "x" * 3_000_000
    store.set("big", big)
    assert store.get("big").decode() == big


def until_closed(connection: socket.socket) -> bytes:
    """All that comes there."""
    text = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            text += part
    return text


def test_who_has_the_key_reaches_the_store(guarded: Guarded, way: Callable[..., Way]) -> None:
    use(way(guarded.port))
    assert guarded.store.get("big")[:3] == b"xxx"
    assert guarded.told == []


def test_another_key(guarded: Guarded, way: Callable[..., Way]) -> None:
    start = time.monotonic()
    for key in (b"another key, also of 32 bytes ...", b""):
        with pytest.raises(LaunchError, match="doesn't let this host in: it has another key"):
            way(guarded.port, key).enter(LIMIT)
    assert time.monotonic() - start < LIMIT
    assert guarded.told == [f"turned {HOST} away: it has another key, or none"]
    use(way(guarded.port))


def test_strangers_change_nothing(
    guarded: Guarded, way: Callable[..., Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who say nothing, too: more of them than may be in their handshake at once."""
    monkeypatch.setattr(tunnel_server, "_MOST_PENDING", 64)
    guarded.store.set("own", "value")
    keys = guarded.store.num_keys()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(guarded.connect()) for _ in range(80)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, bytes(range(256)) * 40):
            stranger = stack.enter_context(guarded.connect())
            with contextlib.suppress(ConnectionError):
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            # A challenge and "no" are all that it hears.
            assert len(until_closed(stranger)) <= len("phalanx gate 1\n") + 32 + 1
        start = time.monotonic()
        use(way(guarded.port))
        assert time.monotonic() - start < 5
        assert guarded.store.num_keys() == keys + 1  # what `use` has set
        # The first of the silent ones had to go for those who came after them.
        assert len(until_closed(silent[0])) <= len("phalanx gate 1\n") + 32


def test_many_strangers_leave_others_their_time(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_server, "_MOST_PENDING", 8)
    with contextlib.ExitStack() as stack:
        slow = socket.create_connection((HOST, guarded.port), LIMIT, ("127.0.0.2", 0))
        stack.enter_context(slow)
        slow.recv(15 + 32, socket.MSG_WAITALL)
        silent = [stack.enter_context(guarded.connect()) for _ in range(12)]
        for each in silent[:4]:
            until_closed(each)
        slow.sendall(bytes(64))
        assert until_closed(slow) == b"\0", "it was heard"


@pytest.mark.parametrize("hello", (b"[" * 4000, b"[]", b"{", bytes(9)))
def test_a_hello_that_makes_no_sense(guarded: Guarded, hello: bytes) -> None:
    with guarded.connect() as guest:
        theirs = guest.recv(15 + 32, socket.MSG_WAITALL)[15:]
        own = bytes(32)
        guest.sendall(own + handshake._proof(KEY, "guest", theirs, own))
        guest.sendall(len(hello).to_bytes(4, "big") + hello)
        assert len(until_closed(guest)) == 1 + 32
    assert guarded.told
    assert "its hello" in guarded.told[0]


def test_silence_has_a_limit_but_for_the_relay(guarded: Guarded, way: Callable[..., Way]) -> None:
    with socket.socket(socket.AF_UNIX) as relay:
        relay.bind(guarded.gate.relay.replace("@", "\0"))
        relay.listen()
        entered = way(guarded.port)
        entered.enter(LIMIT)
        limits = {}
        for service in ("join", "store", "relay"):
            entered._hello["number"] = 7  # another host's, as far as the gate knows
            _, writer = entered._connections.call(entered._through(service))
            connection = writer.get_extra_info("socket")
            limits[service] = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            entered._connections.call(entered._leave(writer))
    assert limits == {"join": 30_000, "store": 30_000, "relay": 0}


def test_an_answer_cannot_be_used_again(guarded: Guarded, way: Callable[..., Way]) -> None:
    """Who has listened to a handshake can't do it once more."""
    with socket.create_server((HOST, 0)) as listener:
        between = way(listener.getsockname()[1])
        with contextlib.ExitStack() as stack:
            entering = threading.Thread(target=lambda: _suppressed(between))
            entering.start()
            guest = stack.enter_context(listener.accept()[0])
            first = stack.enter_context(guarded.connect())
            greeting = first.recv(15 + 32, socket.MSG_WAITALL)
            guest.sendall(greeting)
            answer = guest.recv(64, socket.MSG_WAITALL)
            again = stack.enter_context(guarded.connect())
            assert again.recv(15 + 32, socket.MSG_WAITALL) != greeting
            again.sendall(answer)
            assert until_closed(again) == b"\0"
            guest.sendall(b"\0")
            entering.join(LIMIT)
            assert not entering.is_alive()


def _suppressed(way: Way) -> None:
    with contextlib.suppress(LaunchError):
        way.enter(1)


def test_what_is_wrong_with_a_host_is_told_on_both(
    guarded: Guarded, way: Callable[..., Way]
) -> None:
    guarded.wrong = "node-b has torch 2.9, node-a 2.13"
    with pytest.raises(LaunchError, match=r"in: node-b has torch 2\.9, node-a 2\.13"):
        way(guarded.port).enter(LIMIT)
    assert guarded.told == [f"turned {HOST} away: node-b has torch 2.9, node-a 2.13"]


def test_a_number_that_is_taken(guarded: Guarded, way: Callable[..., Way]) -> None:
    first = way(guarded.port, number=1)
    use(first)
    for number, whose in ((1, HOST), (0, "the one with the rendezvous")):
        with pytest.raises(LaunchError, match=f"host {number} is {whose} already"):
            way(guarded.port, number=number).enter(LIMIT)
    use(way(guarded.port, number=2))


def test_nobody_there(guarded: Guarded, way: Callable[..., Way]) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LaunchError, match=rf"{HOST}:{port} can't be reached for 1 s \(.*refused"):
        way(port).enter(1)
    with pytest.raises(LaunchError, match="can't be reached for 1 s"):
        Way("no-such-host.invalid", port, KEY, {}, lambda _: None).enter(1)
    with pytest.raises(LaunchError, match=r"'a..b' is no name"):
        Way("a..b", port, KEY, {}, lambda _: None).enter(1)


def test_somebody_else_there(way: Callable[..., Way]) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def answers() -> None:
            with listener.accept()[0] as other:
                other.sendall(b"SSH-2.0-OpenSSH_9.2 and much more than that, to be read\r\n")
                until_closed(other)

        thread = threading.Thread(target=answers)
        thread.start()
        with pytest.raises(LaunchError, match="what answers there isn't `phalanx run`"):
            way(listener.getsockname()[1]).enter(LIMIT)
        thread.join(LIMIT)
        assert not thread.is_alive()
