"""Who there is: the workers tell each other through the store by which the group, or they, meet.

A worker listens at a socket of its host, and, if others are on another host, at a port of the
interface that faces the store. Nothing else listens: there is no second rendezvous.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    TCPStore,
)

from phalanx import env_hosts, key
from phalanx.address import address_towards
from phalanx.errors import PhalanxError, UsageError
from phalanx.rpc import mapped, near

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from phalanx.rpc.arena import Arena

__all__ = [
    "Card",
    "WorkerInfo",
    "agree_on_key",
    "interface_towards",
    "meet",
    "own_card",
    "refuse",
]

_LONGEST_NAME = 128
_MOMENT_MILLISECONDS = 1000


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its name, unique among all, and its id, which is its rank."""

    name: str
    id: int


@dataclass(frozen=True)
class Card:
    """What a worker tells of itself."""

    size: int
    """How many workers it expects."""
    name: str
    pid: int
    host: str
    """A name, for people."""
    machine: str
    """Workers of different ones can't share memory."""
    address: str
    """Of its socket for workers of its host."""
    descriptor: int
    """Of a piece of memory; who can open it shares the host."""
    nonce: str
    """What stands there."""
    main: str
    """Which program it runs, so that functions of the main program need not travel."""

    @property
    def process(self) -> str:
        """As in "pid 812 on node-a"."""
        return f"pid {self.pid} on {self.host}"

    def shares_host(self, own: Card) -> bool:
        """Whether this process and the worker can share memory, or could while it lived."""
        if self.machine != own.machine:
            return False
        nonce = bytes.fromhex(self.nonce)
        return mapped.opens(self.pid, self.descriptor, nonce) or _has_ended(self.pid)


def own_card(name: object, arena: Arena) -> Card:
    """This process.

    Raises:
        UsageError: The name is none.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise UsageError(f"the name {name!r}: expected a string of 1 to {_LONGEST_NAME} characters")
    return Card(
        0,
        name,
        os.getpid(),
        socket.gethostname(),
        _machine(),
        f"phalanx-rpc-{secrets.token_hex(16)}",
        arena.probe,
        arena.nonce.hex(),
        _main(),
    )


def meet(store: Store, rank: int, size: int, card: Card, timeout: float) -> list[Card]:
    """Exchange cards; blocks until all workers are there.

    Args:
        store: Where.
        rank: This worker's id.
        size: How many workers there are.
        card: This worker's.
        timeout: Seconds.

    Raises:
        UsageError: Two workers have one name or one rank, not all expect as many, or one can't join
            and has said why.
        PhalanxError: Some didn't come in time.
    """
    if store.add(f"here/{rank}", 1) > 1:
        error = UsageError(f"rank {rank} was given to two workers: give each its own, from 0 on")
        refuse(store, rank, size, card, error)
        raise error
    store.set(f"worker/{rank}", json.dumps(dataclasses.asdict(card) | {"size": size}))
    # The first one alone at first: one that expects more workers than there are is told so.
    (first,) = _cards(told(store, ["worker/0"], timeout))
    _check_size(0, first, rank, size)
    cards = _cards(told(store, [f"worker/{each}" for each in range(size)], timeout))
    named: dict[str, int] = {}
    for each, other in enumerate(cards):
        _check_size(each, other, rank, size)
        if named.setdefault(other.name, each) != each:
            raise UsageError(
                f"workers {named[other.name]} ({cards[named[other.name]].process}) and {each} "
                f"({other.process}) have the same name, {other.name!r}: give each its own"
            )
    return cards


def refuse(store: Store, rank: int, size: int, card: Card, error: Exception) -> None:
    """Tell all who wait for workers, whichever, that this one can't join, and why."""
    words = f"worker {card.name!r} (rank {rank}, {card.process}) can't join: {error}"
    for each in range(size):
        store.set(f"worker/{each}", json.dumps({"refused": words}))


def _cards(texts: list[bytes]) -> list[Card]:
    found = [json.loads(text) for text in texts]
    for each in found:
        if "refused" in each:
            raise UsageError(each["refused"])
    return [Card(**each) for each in found]


def _check_size(other: int, card: Card, rank: int, size: int) -> None:
    if card.size != size:
        raise UsageError(
            f"worker {rank} expects {size} workers, worker {other} ({card.process}) {card.size}: "
            "give all the same world_size"
        )


def told(store: Store, names: list[str], timeout: float) -> list[bytes]:
    """What workers have put into the store; blocks until they have.

    Raises:
        PhalanxError: Some haven't in time.
    """
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError:  # which one depends on the store
        missing = [name.rpartition("/")[2] for name in names if not store.check([name])]
        if not missing:
            raise
        raise PhalanxError(
            f"of {len(names)} workers, {', '.join(missing)} didn't come to init_rpc "
            f"within {timeout:g} s: were they started, with the same world size and rendezvous?"
        ) from None
    return [store.get(name) for name in names]


def agree_on_key(store: Store, rank: int, timeout: float) -> bytes:
    """The key of the job; where it has none, one that worker 0 makes and the store carries.

    Raises:
        UsageError: Some workers have the job's key, others don't, or have another.
    """
    own = key.inherited()
    if rank == 0:
        made = secrets.token_bytes(key.SIZE)
        store.set("key/0", f"inherited {_proof(own)}" if own else f"made {made.hex()}")
    (says,) = told(store, ["key/0"], timeout)
    how, _, what = says.decode().partition(" ")
    if how == "made" and own is None:
        return bytes.fromhex(what)
    if how == "inherited" and own is not None and what == _proof(own):
        return own
    given = "has none" if own is None else "has another" if how == "inherited" else "has one"
    raise UsageError(
        f"worker 0 {'has' if how == 'inherited' else 'has no'} key of the job, worker {rank} "
        f"{given}: start all with `phalanx run`, or give all the same PHALANX_KEY_FILE"
    )


def interface_towards(store: Store) -> str:
    """The address to listen on for workers of other hosts: of the interface that faces the store.

    Raises:
        UsageError: `PHALANX_INTERFACE` names nothing of this machine.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    way = env_hosts.gate() or (store.host if isinstance(store, TCPStore) else "")
    return address_towards(way) or "127.0.0.1"


def in_url(address: str) -> str:
    """An address as it stands in front of a port."""
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address


def _proof(own: bytes) -> str:
    return key.derived(own, "rpc same key").hex()


def _has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # What it had open is closed a moment before it has ended.
        return near.is_readable(process, _MOMENT_MILLISECONDS)
    finally:
        os.close(process)


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = (os.stat(f"/proc/self/ns/{space}").st_ino for space in ("pid", "net"))
    return f"{boot} {' '.join(map(str, spaces))} {env_hosts.host_id()}"


def _main() -> str:
    """The main program: its text, told by a digest; empty if it is no file."""
    main = sys.modules.get("__mp_main__") or sys.modules.get("__main__")
    try:
        with open(getattr(main, "__file__", None) or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
