"""The tunnel between hosts, over real sockets: it admits only connections with the key."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.errors import LaunchError
from phalanx.launcher import tunnel, tunnel_encryption
from phalanx.launcher.store import HOST, host_store
from phalanx.launcher.tunnel import TunnelClient, TunnelServer, make_handshake
from tests.ports import find_free_port

KEY = b"k" * 32
LIMIT = 20.0


class GuardedStore:
    """A store behind a tunnel server, and the notices that the server shows to the user."""

    def __init__(self, key: bytes) -> None:
        self.notices: list[str] = []
        self.rejection = ""
        self.store = host_store()
        self.port = find_free_port()
        self.server = TunnelServer(
            HOST, self.port, key, self.store.port, lambda _: self.rejection, self.notices.append
        )

    def connect(self) -> socket.socket:
        """Connect without authentication."""
        return socket.create_connection((HOST, self.port), timeout=LIMIT)


@pytest.fixture
def guarded_store() -> Iterator[GuardedStore]:
    store = GuardedStore(KEY)
    yield store
    store.server.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., TunnelClient]]:
    with contextlib.ExitStack() as stack:

        def make(port: int, key: bytes = KEY, number: int = 1, **hello: Any) -> TunnelClient:
            client = TunnelClient(HOST, port, key, {"number": number, **hello}, lambda _: None)
            stack.callback(client.close)
            return client

        yield make


def join_and_use_store(client: TunnelClient) -> None:
    """Join the job, and use the store from this host."""
    client.connect(LIMIT)
    limit = timedelta(seconds=LIMIT)
    store = dist.TCPStore(HOST, client.store_port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    big = "x" * 3_000_000
    store.set("big", big)
    assert store.get("big").decode() == big


def read_until_closed(connection: socket.socket) -> bytes:
    """Return all data up to the end of the connection."""
    text = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            text += part
    return text


def test_clients_with_the_key_reach_the_store(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    join_and_use_store(make_client(guarded_store.port))
    assert guarded_store.store.get("big")[:3] == b"xxx"
    assert guarded_store.notices == []


def test_clients_with_a_different_key_are_rejected(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    for key in (b"another key, also of 32 bytes ...", b""):
        with pytest.raises(
            LaunchError, match=r"can't join the job at .*: the two hosts have different keys"
        ):
            make_client(guarded_store.port, key).connect(LIMIT)
    assert guarded_store.notices == [f"rejected {HOST}: it has a different key or none"]
    join_and_use_store(make_client(guarded_store.port))


def test_unauthenticated_connections_have_no_effect(
    guarded_store: GuardedStore,
    make_client: Callable[..., TunnelClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes idle ones, of which there are more than the limit of pending handshakes."""
    monkeypatch.setattr(tunnel, "_MAX_PENDING", 64)
    guarded_store.store.set("own", "value")
    keys = guarded_store.store.num_keys()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(guarded_store.connect()) for _ in range(80)]
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, bytes(range(256)) * 40):
            stranger = stack.enter_context(guarded_store.connect())
            with contextlib.suppress(ConnectionError):
                stranger.sendall(garbage)
                stranger.shutdown(socket.SHUT_WR)
            assert read_until_closed(stranger) == b""
        join_and_use_store(make_client(guarded_store.port))
        assert guarded_store.store.num_keys() == keys + 1  # the entry of `join_and_use_store`
        # The first idle connection was dropped in favour of later ones.
        assert read_until_closed(idle[0]) == b""


def test_a_flood_from_one_address_spares_other_addresses(
    guarded_store: GuardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_MAX_PENDING", 8)
    with contextlib.ExitStack() as stack:
        slow = socket.create_connection((HOST, guarded_store.port), LIMIT, ("127.0.0.2", 0))
        stack.enter_context(slow)
        initiator = make_handshake(KEY, is_initiator=True)
        slow.sendall(initiator.begin())
        slow.recv(initiator.missing, socket.MSG_WAITALL)
        idle = [stack.enter_context(guarded_store.connect()) for _ in range(12)]
        for connection in idle[:4]:
            read_until_closed(connection)
        slow.sendall(bytes(64))
        read_until_closed(slow)
        assert guarded_store.notices == ["rejected 127.0.0.2: it has a different key or none"], (
            "the handshake was dropped"
        )


@pytest.mark.parametrize("hello", (b"[" * 4000, b"[]", b"{", bytes(9)))
def test_a_malformed_hello(guarded_store: GuardedStore, hello: bytes) -> None:
    with guarded_store.connect() as client_socket:
        initiator = make_handshake(KEY, is_initiator=True)
        client_socket.sendall(initiator.begin())
        answer = client_socket.recv(initiator.missing, socket.MSG_WAITALL)
        client_socket.sendall(initiator.receive(answer))
        client_socket.sendall(len(hello).to_bytes(4, "big") + hello)
        assert read_until_closed(client_socket) == b""
    assert guarded_store.notices
    assert "its hello" in guarded_store.notices[0]


def test_user_timeout_of_all_services_but_the_relay(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    with socket.socket(socket.AF_UNIX) as relay:
        relay.bind(guarded_store.server.relay_socket.replace("@", "\0"))
        relay.listen()
        client = make_client(guarded_store.port)
        client.connect(LIMIT)
        limits = {}
        for service in ("join", "store", "relay"):
            client._hello["number"] = 7  # as if it were another host
            _, writer = client._call(client._open_service(service))
            connection = writer.get_extra_info("socket")
            limits[service] = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            client._loop.call_soon_threadsafe(writer.close)
    assert limits == {"join": 30_000, "store": 30_000, "relay": 0}


@pytest.mark.slow
def test_a_proof_cannot_be_replayed(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    """An eavesdropper cannot repeat a handshake."""
    with socket.create_server((HOST, 0)) as listener:
        client = make_client(listener.getsockname()[1])
        with contextlib.ExitStack() as stack:
            joining = threading.Thread(target=lambda: _connect_ignoring_errors(client))
            joining.start()
            client_socket = stack.enter_context(listener.accept()[0])
            opening = client_socket.recv(1024)
            first = stack.enter_context(guarded_store.connect())
            first.sendall(opening)
            answer = first.recv(1024)
            client_socket.sendall(answer)
            proof = client_socket.recv(32, socket.MSG_WAITALL)
            replay = stack.enter_context(guarded_store.connect())
            replay.sendall(opening)
            assert replay.recv(len(answer), socket.MSG_WAITALL) != answer
            replay.sendall(proof)
            assert read_until_closed(replay) == b""
            assert guarded_store.notices == [f"rejected {HOST}: it has a different key or none"]
            client_socket.close()
            joining.join(LIMIT)
            assert not joining.is_alive()


def _connect_ignoring_errors(client: TunnelClient) -> None:
    with contextlib.suppress(LaunchError):
        client.connect(1)


def test_a_rejection_is_reported_on_both_hosts(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    guarded_store.rejection = "node-b has torch 2.9, node-a 2.13"
    with pytest.raises(LaunchError, match=r"the job at .*: node-b has torch 2\.9, node-a 2\.13"):
        make_client(guarded_store.port).connect(LIMIT)
    assert guarded_store.notices == [f"rejected {HOST}: node-b has torch 2.9, node-a 2.13"]


def test_a_duplicate_node_rank(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    first = make_client(guarded_store.port, number=1)
    join_and_use_store(first)
    for number, holder in ((1, HOST), (0, "the host of the rendezvous")):
        with pytest.raises(LaunchError, match=f"host number {number} is taken by {holder}: give"):
            make_client(guarded_store.port, number=number).connect(LIMIT)
    join_and_use_store(make_client(guarded_store.port, number=2))


def test_a_host_that_comes_again_waits_for_its_number(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    """The server may not know yet that the host's old connection is lost."""
    first = TunnelClient(HOST, guarded_store.port, KEY, {"number": 1}, lambda _: None)
    first.connect(LIMIT)
    again = make_client(guarded_store.port, number=1)
    with ThreadPoolExecutor() as threads:
        joined = threads.submit(again.connect, LIMIT, again=True)
        with pytest.raises(FutureTimeout):
            joined.result(0.5)
        first.close()
        joined.result(LIMIT)
    assert guarded_store.notices == []
    with pytest.raises(LaunchError, match=r"0\.5 s \(its old connection is not lost yet\)"):
        make_client(guarded_store.port, number=1).connect(0.5, again=True)
    guarded_store.rejection = "node-b has another version"
    with pytest.raises(LaunchError, match="node-b has another version"):
        make_client(guarded_store.port, number=2).connect(LIMIT, again=True)


class RecordingForwarder:
    """A forwarder of connections to a port, which records all bytes in both directions."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.recorded = bytearray()
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((HOST, self._target))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.recorded += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("key", (KEY, b""), ids=("key", "no key"))
def test_the_store_is_encrypted_if_there_is_a_key(
    key: bytes, make_client: Callable[..., TunnelClient]
) -> None:
    store = GuardedStore(key)
    with contextlib.closing(store.server), contextlib.closing(RecordingForwarder(store.port)) as it:
        client = make_client(it.port, key=key)
        join_and_use_store(client)
        assert len(it.recorded) > 3_000_000
        assert (b"x" * 1000 in it.recorded) == (not key)


def test_a_certificate_of_another_key_is_refused(
    guarded_store: GuardedStore,
    make_client: Callable[..., TunnelClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a program between the hosts, which has passed on the authentication."""
    other = tunnel_encryption.make_context(b"other" * 8, is_server=False)
    monkeypatch.setattr(tunnel, "make_context", lambda *_, **__: other)
    with pytest.raises(LaunchError, match=r"can't be encrypted \(CERTIFICATE_VERIFY_FAILED\)"):
        make_client(guarded_store.port).connect(LIMIT)


def test_an_unreachable_server(
    guarded_store: GuardedStore, make_client: Callable[..., TunnelClient]
) -> None:
    port = find_free_port()
    with pytest.raises(LaunchError, match=rf"{HOST}:{port} was not reachable for 1 s \(.*refused"):
        make_client(port).connect(1)
    with pytest.raises(LaunchError, match="was not reachable for 1 s"):
        TunnelClient("no-such-host.invalid", port, KEY, {}, lambda _: None).connect(1)
    with pytest.raises(LaunchError, match=r"invalid endpoint a\.\.b:\d+: bad host name 'a\.\.b'"):
        TunnelClient("a..b", port, KEY, {}, lambda _: None).connect(1)


def test_another_program_on_the_port(make_client: Callable[..., TunnelClient]) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def answer_as_ssh() -> None:
            with listener.accept()[0] as other:
                other.sendall(b"SSH-2.0-OpenSSH_9.2 and much more than that, to be read\r\n")
                read_until_closed(other)

        thread = threading.Thread(target=answer_as_ssh)
        thread.start()
        with pytest.raises(LaunchError, match="the program there is not `phalanx run`"):
            make_client(listener.getsockname()[1]).connect(LIMIT)
        thread.join(LIMIT)
        assert not thread.is_alive()
