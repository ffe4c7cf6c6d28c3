"""The location of a group's relay: starting it, finding it through the store, connecting to it."""

from __future__ import annotations

import json
import logging
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
from typing import NamedTuple

import zmq
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from phalanx import env, key
from phalanx.address import url_host
from phalanx.errors import UsageError
from phalanx.system.host_identity import host_identity
from phalanx.system.polling import attempts
from phalanx.transports.interface import TransportError
from phalanx.transports.relay.connection import RelayConnection
from phalanx.transports.relay.protocol import CHANNEL_BYTES
from phalanx.transports.relay.server import RelayServer
from phalanx.transports.shutdown_hooks import prepare_long_wait, register_shutdown_hook

_KEY = "relay"
_TUNNEL = "tunnel"
"""The remote endpoint of a relay that other hosts reach through the tunnel of `phalanx run`."""
_EXCEPTION_SECONDS = 2.0
"""The time for which a process that ends by an exception keeps its relay, in seconds."""
_NOTICE_SECONDS = 5.0
"""The time after which a process that only runs the relay any more says so, in seconds."""
_log = logging.getLogger("phalanx")


class RelayAccess(NamedTuple):
    """A rank's access to the relay of its group.

    Attributes:
        channel: The identifier of the channel that only this group uses.
        connection: The connection to the relay.
        host_rank: The rank of the group whose process runs the relay; -1 if no rank does.
    """

    channel: bytes
    connection: RelayConnection
    host_rank: int


class _ProcessState:
    """The connections of this process by endpoint and number, and its relay.

    A forked child has none.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.connections: dict[tuple[str, int], RelayConnection] = {}
        self.server: RelayServer | None = None
        self.locations: dict[str, dict[str, str]] = {}
        """The published location of each relay, by the endpoint to which this process connects."""


_lock = threading.Lock()
_process = _ProcessState()


def connect(store: Store, rank: int, address: str, number: int = 0) -> RelayAccess:
    """Connect this rank to the relay of its group.

    Rank 0 publishes the address of the relay. It uses the relay of another group if it knows one,
    and starts a relay otherwise. Blocks until rank 0 has published the address.

    Args:
        store: The store of this transport.
        rank: This rank in the group.
        address: The address on which this rank listens if it starts the relay.
        number: The number of the connection, if this process has several to the relay.

    Raises:
        UsageError: The job has no key, or an environment variable is malformed.
        TransportError: The relay cannot be started or reached.
    """
    secret = key.from_environment()
    try:
        env.relay(), env.advertised_address()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if secret is None:
        raise UsageError(
            "the transport relay needs the job's key: start the job with `phalanx run`, on several "
            "hosts with --key-file, or set PHALANX_KEY_FILE; `phalanx key PATH` creates a key"
        )
    location = {} if rank == 0 else _wait_for_location(store)
    with _lock:
        state = _process_state()
        # A group that is broken since its relay has ended may not have left yet.
        state.connections = {at: it for at, it in state.connections.items() if not it.is_lost}
        location = location or _publish(state, store, secret, address)
        if "error" in location:
            raise TransportError(0, f"rank 0 cannot start the relay: {location['error']}")
        endpoint = _endpoint_for_this_host(location)
        if (endpoint, number) not in state.connections:
            state.connections[endpoint, number] = RelayConnection(endpoint, secret)
        connection = state.connections[endpoint, number]
        names = ("remote", "local", "network")
        state.locations[endpoint] = {name: location[name] for name in names}
        channel, host_rank = bytes.fromhex(location["channel"]), 0 if location["hosted"] else -1
        return RelayAccess(channel, connection, host_rank)


def disconnect(access: RelayAccess) -> None:
    """Leave the channel of the group.

    A relay of this process continues in the background until no rank uses it any more.
    """
    with _lock:
        if access.connection.remove_listener(access.channel):
            for at in [at for at, it in _process.connections.items() if it is access.connection]:
                del _process.connections[at]
            access.connection.close()
        if _process.server is not None and not _process.connections:
            _process.server.end_when_unused()


def _process_state() -> _ProcessState:
    global _process  # noqa: PLW0603 - there is one process
    if _process.pid != os.getpid():
        _process = _ProcessState()
    return _process


def _publish(state: _ProcessState, store: Store, secret: bytes, address: str) -> dict[str, str]:
    """Publish the location of the relay, or the reason why there is none, and return it."""
    location: dict[str, str] = {"channel": secrets.token_hex(CHANNEL_BYTES)}
    try:
        for (endpoint, _), connection in state.connections.items():
            if connection.is_answered():
                location |= state.locations[endpoint]
                break
        else:
            if state.server is not None and not state.server.keep():
                state.server.wait()  # until its port is free
                state.server = None
            if state.server is None:
                state.server = _start_server(secret, address)
            location |= _endpoints(state.server, address)
        is_own = state.server is not None and state.server.endpoint == location["local"]
        location["hosted"] = "yes" if is_own else ""
    except (UsageError, zmq.ZMQError) as error:
        store.set(_KEY, json.dumps({"error": str(error)}))
        raise TransportError(0, f"the relay cannot be started: {error}") from None
    store.set(_KEY, json.dumps(location))
    return location


def _wait_for_location(store: Store) -> dict[str, str]:
    """Return the location of the relay once rank 0 has published it."""
    for _ in attempts(time.monotonic() + store.timeout.total_seconds()):  # type: ignore[attr-defined]
        if store.check([_KEY]):
            location: dict[str, str] = json.loads(store.get(_KEY))
            return location
    raise TransportError(0, "rank 0 has not published the address of the relay")


def _start_server(secret: bytes, address: str) -> RelayServer:
    if multiprocessing.parent_process() is not None:  # a child process may exit without atexit
        multiprocessing.util.Finalize(None, _end_relay_if_left, exitpriority=-1)
    mode, path = env.relay()
    if mode == "listen":
        return RelayServer(secret, f"ipc://{path}")
    _, port = env.advertised_address()
    return RelayServer(secret, f"tcp://{url_host(address)}:{port or '*'}")


def _end_relay_if_left() -> None:
    if not _process.connections:
        _end_relay()


def _end_relay() -> None:
    """Wait at the end of this process until no rank uses its relay."""
    server = _process.server
    if server is None or _process.pid != os.getpid():
        return
    for connection in _process.connections.values():
        connection.close()
    _process.connections.clear()
    server.end_when_unused()
    if hasattr(sys, "last_value"):  # what started this process should learn of its end
        server.wait(_EXCEPTION_SECONDS)
    elif not server.wait(_NOTICE_SECONDS):
        prepare_long_wait()
        _log.warning(
            "this process has the relay that other ranks still use; it ends when they have left"
        )
        server.wait()
    server.close()
    _process.server = None


def _endpoints(server: RelayServer, address: str) -> dict[str, str]:
    """Return the relay's endpoints for other hosts and for this host, and its network."""
    if env.relay()[0] == "listen":
        return {"remote": _TUNNEL, "local": server.endpoint, "network": ""}
    host, _ = env.advertised_address()
    port = server.endpoint.rpartition(":")[2]
    remote = f"tcp://{url_host(host or address)}:{port}"
    return {"remote": remote, "local": server.endpoint, "network": _network()}


def _endpoint_for_this_host(location: dict[str, str]) -> str:
    mode, path = env.relay()
    if location["remote"] == _TUNNEL:
        if not mode:
            raise TransportError(
                0,
                "the relay is reached through the tunnel of `phalanx run`, which did not start "
                "this rank",
            )
        return f"ipc://{path}"
    return location["local" if location["network"] == _network() else "remote"]


def _network() -> str:
    """Return an identifier of this host and its network namespace.

    Processes with the same identifier can reach each other at any of their addresses.
    """
    return host_identity("net")


register_shutdown_hook(_end_relay)
