"""The location of a group's relay: starting it, finding it through the store, connecting to it."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq

from phalanx import env_hosts, key
from phalanx.errors import UsageError
from phalanx.system.host_identity import boot_id, namespace_id
from phalanx.system.polling import attempts
from phalanx.transports.interface import TransportError
from phalanx.transports.relay.connection import Line
from phalanx.transports.relay.frames import CHANNEL_BYTES
from phalanx.transports.relay.server import Server
from phalanx.transports.shutdown_hooks import at_the_end

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["Place", "find", "leave"]

_KEY = "relay"
_GATE = "gate"
_PAUSE = 0.001
_PARTING_SECONDS = 2.0


class Place(NamedTuple):
    """A rank's access to the relay of its group.

    Attributes:
        channel: The identifier of the channel that only this group uses.
        line: The connection to the relay.
        host: The rank of the group whose process runs the relay; -1 if there is none.
        server: The relay, if this process runs it.
    """

    channel: bytes
    line: Line
    host: int
    server: Server | None


class _Process:
    """The lines of this process by address, and its relay; a forked child begins with none."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lines: dict[str, Line] = {}
        self.server: Server | None = None
        self.told: dict[str, str] = {}


_lock = threading.Lock()
_process = _Process()


def find(store: Store, rank: int, address: str) -> Place:
    """Connect this rank to the relay of its group.

    Rank 0 publishes the address of the relay. It uses the relay of another group if it knows one,
    and starts a relay otherwise. Blocks until rank 0 has published the address.

    Args:
        store: The store of this transport.
        rank: This rank in the group.
        address: The address on which this rank listens if it starts the relay.

    Raises:
        UsageError: There is no key, or an environment variable is malformed.
        TransportError: The relay cannot be started or reached.
    """
    secret = key.from_environment()
    try:
        env_hosts.relay(), env_hosts.advertised_address()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if secret is None:
        raise UsageError(
            "the transport relay needs the job's key: start the job with `phalanx run`, on several "
            "hosts with --key-file, or set PHALANX_KEY_FILE; `phalanx key PATH` makes one"
        )
    told = {} if rank == 0 else _hear(store)
    with _lock:
        mine = _mine()
        told = told or _tell(mine, store, secret, address)
        if "wrong" in told:
            raise TransportError(0, f"rank 0 can't start the relay: {told['wrong']}")
        where = _address(told)
        if where not in mine.lines:
            mine.lines[where] = Line(where, secret)
        line = mine.lines[where]
        mine.told = {name: told[name] for name in ("far", "near", "network")}
        return Place(bytes.fromhex(told["channel"]), line, 0 if told["has"] else -1, mine.server)


def leave(place: Place, rank: int) -> None:
    """Leave the channel of the group.

    The process that runs the relay first waits until the other ranks have left, for 2 s at most.
    """
    if place.server is not None:
        end = time.monotonic() + _PARTING_SECONDS
        while place.server.others(place.channel, rank) and time.monotonic() < end:
            time.sleep(_PAUSE)
    with _lock:
        if place.line.remove(place.channel):
            for where in [where for where, line in _process.lines.items() if line is place.line]:
                del _process.lines[where]
            place.line.close()
        if _process.server is not None and not _process.server.anybody:
            _process.server.close()
            _process.server = None


def _mine() -> _Process:
    global _process  # noqa: PLW0603 - there is one process
    if _process.pid != os.getpid():
        _process = _Process()
    return _process


def _tell(mine: _Process, store: Store, secret: bytes, address: str) -> dict[str, str]:
    """Publish the location of the relay, or the reason why there is none, and return it."""
    told: dict[str, str] = {"channel": secrets.token_hex(CHANNEL_BYTES)}
    try:
        if mine.lines:
            told |= mine.told
        else:
            if mine.server is None:
                mine.server = _serve(secret, address)
            told |= _places(mine.server, address)
        told["has"] = "it" if mine.server is not None else ""
    except (UsageError, zmq.ZMQError) as error:
        store.set(_KEY, json.dumps({"wrong": str(error)}))
        raise TransportError(0, f"the relay can't be started: {error}") from None
    store.set(_KEY, json.dumps(told))
    return told


def _hear(store: Store) -> dict[str, str]:
    """Wait until rank 0 has published the location of the relay, and return it.

    Raises:
        TransportError: Nothing was published within the timeout of the store.
    """
    for _ in attempts(time.monotonic() + store.timeout.total_seconds()):  # type: ignore[attr-defined]
        if store.check([_KEY]):
            told: dict[str, str] = json.loads(store.get(_KEY))
            return told
    raise TransportError(0, "rank 0 hasn't said where the relay is")


def _serve(secret: bytes, address: str) -> Server:
    how, path = env_hosts.relay()
    if how == "listen":
        server = Server(secret, f"ipc://{path}")
    else:
        _, port = env_hosts.advertised_address()
        server = Server(secret, f"tcp://{_bracketed(address)}:{port or '*'}")
    return server


def _part() -> None:
    """Wait at the end of this process, for 2 s at most, until no rank uses its relay."""
    server = _process.server
    if server is not None and _process.pid == os.getpid():
        end = time.monotonic() + _PARTING_SECONDS
        while server.anybody and time.monotonic() < end:
            time.sleep(_PAUSE)
        server.close()


def _places(server: Server, address: str) -> dict[str, str]:
    """Return the relay's address for other hosts and for this one, and its network."""
    if env_hosts.relay()[0] == "listen":
        return {"far": _GATE, "near": server.where, "network": ""}
    host, _ = env_hosts.advertised_address()
    port = server.where.rpartition(":")[2]
    far = f"tcp://{_bracketed(host or address)}:{port}"
    return {"far": far, "near": server.where, "network": _network()}


def _address(told: dict[str, str]) -> str:
    how, path = env_hosts.relay()
    if told["far"] == _GATE:
        if not how:
            raise TransportError(
                0, "the relay is behind the gate of `phalanx run`, which didn't start this rank"
            )
        return f"ipc://{path}"
    return told["near" if told["network"] == _network() else "far"]


def _network() -> str:
    """Return an identifier of this host and its network namespace.

    Processes with the same identifier can reach each other at any of their addresses.
    """
    return f"{boot_id()} {namespace_id('net')}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


at_the_end(_part)
