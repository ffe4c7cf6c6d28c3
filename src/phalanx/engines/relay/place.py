"""Where the relay of a group is: started, found through the store, connected to."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq

from phalanx import env_hosts, key
from phalanx.engines.ending import at_the_end
from phalanx.engines.interface import EngineError
from phalanx.engines.relay.line import Line
from phalanx.engines.relay.server import Server
from phalanx.engines.relay.words import CHANNEL_BYTES
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["Place", "find", "leave"]

_KEY = "relay"
_GATE = "gate"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_PARTING_SECONDS = 2.0


class Place(NamedTuple):
    """What a rank needs to talk to its group.

    Attributes:
        channel: The group's, in which nobody else talks.
        line: To the relay.
        host: The rank of the group that has the relay; -1 if it is none of them.
        server: The relay, if this process has it.
    """

    channel: bytes
    line: Line
    host: int
    server: Server | None


class _Process:
    """What this process has: lines by address, and a relay. A child of a fork has nothing."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lines: dict[str, Line] = {}
        self.server: Server | None = None
        self.told: dict[str, str] = {}


_lock = threading.Lock()
_process = _Process()


def find(store: Store, rank: int, address: str) -> Place:
    """Connect this rank to the relay of its group; blocks until rank 0 has said where it is.

    Rank 0 says where. Where it knows none, from another group, it starts one.

    Args:
        store: The engine's own.
        rank: This rank in the group.
        address: Where this rank listens, if it has to.

    Raises:
        UsageError: There is no key, or a variable is malformed.
        EngineError: The relay can't be started or reached.
    """
    secret = key.inherited()
    try:
        env_hosts.relay(), env_hosts.advertised()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if secret is None:
        raise UsageError(
            "the engine relay needs the job's key: start the job with `phalanx run`, on several "
            "hosts with --key-file, or set PHALANX_KEY_FILE; `phalanx key PATH` makes one"
        )
    told = {} if rank == 0 else _hear(store)
    with _lock:
        mine = _mine()
        told = told or _tell(mine, store, secret, address)
        if "wrong" in told:
            raise EngineError(0, f"rank 0 can't start the relay: {told['wrong']}")
        where = _address(told)
        if where not in mine.lines:
            mine.lines[where] = Line(where, secret)
        line = mine.lines[where]
        mine.told = {name: told[name] for name in ("far", "near", "network")}
        return Place(bytes.fromhex(told["channel"]), line, 0 if told["has"] else -1, mine.server)


def leave(place: Place, rank: int) -> None:
    """Let go of it; who has the relay waits two seconds at most, until the others have left too."""
    if place.server is not None:
        end = time.monotonic() + _PARTING_SECONDS
        while place.server.others(place.channel, rank) and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE)
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
    """Say where the relay is, or why there is none."""
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
        raise EngineError(0, f"the relay can't be started: {error}") from None
    store.set(_KEY, json.dumps(told))
    return told


def _hear(store: Store) -> dict[str, str]:
    """What rank 0 says. The store's own wait would let nobody else use it meanwhile."""
    pause, end = _FIRST_PAUSE, time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    while not store.check([_KEY]):
        if time.monotonic() > end:
            raise EngineError(0, "rank 0 hasn't said where the relay is")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    told: dict[str, str] = json.loads(store.get(_KEY))
    return told


def _serve(secret: bytes, address: str) -> Server:
    how, path = env_hosts.relay()
    if how == "listen":
        server = Server(secret, f"ipc://{path}")
    else:
        _, port = env_hosts.advertised()
        server = Server(secret, f"tcp://{_bracketed(address)}:{port or '*'}")
    return server


def _part() -> None:
    """At the end of this process, let others finish what they do with its relay."""
    server = _process.server
    if server is not None and _process.pid == os.getpid():
        end = time.monotonic() + _PARTING_SECONDS
        while server.anybody and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE)
        server.close()


def _places(server: Server, address: str) -> dict[str, str]:
    """Where it is for other hosts, for this one, and which this one is."""
    if env_hosts.relay()[0] == "listen":
        return {"far": _GATE, "near": server.where, "network": ""}
    host, _ = env_hosts.advertised()
    port = server.where.rpartition(":")[2]
    far = f"tcp://{_bracketed(host or address)}:{port}"
    return {"far": far, "near": server.where, "network": _network()}


def _address(told: dict[str, str]) -> str:
    how, path = env_hosts.relay()
    if told["far"] == _GATE:
        if not how:
            raise EngineError(
                0, "the relay is behind the gate of `phalanx run`, which didn't start this rank"
            )
        return f"ipc://{path}"
    return told["near" if told["network"] == _network() else "far"]


def _network() -> str:
    """Processes that say the same reach each other by any address."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


at_the_end(_part)
