"""Processes that join a group after its start, in the place of ranks that are lost.

A newcomer announces itself in the store of the default group, and waits for a plan: the ranks of a
group with it. The ranks of the old group write it while they agree on those that go on
(`phalanx.replace`). Then all of them form the group. The newcomer cannot see whether the old ranks
have all reached their agreement, so the group begins with a broadcast from an old rank: if that
fails, the newcomer announces itself again. The old ranks in turn see the end of a newcomer by a
connection to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx import env
from phalanx.address import is_loopback
from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.system.host_identity import host_identity
from phalanx.system.polling import attempts
from phalanx.system.processes import ProcessIdentity
from phalanx.topology.layout import own_address
from phalanx.transports.liveness import LivenessProbes, process_endpoint
from phalanx.transports.store_query import StoreLost, query_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
    from typing_extensions import Self

_logger = logging.getLogger("phalanx")

_RANKS = "phalanx/newcomers/ranks"
_COUNT = "phalanx/newcomers/count"
_FIRST = "phalanx/newcomers/first"
"""The key of a number up to which all newcomers are in plans or have gone."""
_CLOSED = "phalanx/newcomers/closed"
_LONGEST_PAUSE = 0.01
"""The longest time between two looks into the store, in seconds."""
_CHECK_SECONDS = 0.5
"""The time between two looks at the ranks for which a newcomer waits, in seconds."""


class Process(NamedTuple):
    """A process whose end others can see.

    Attributes:
        identity: The process, for others on its host.
        network: The network namespace in which it runs.
        endpoint: The port and the address on which it listens until its end; empty if others
            cannot connect to it.
    """

    identity: ProcessIdentity
    network: str
    endpoint: str

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> Process:
        """Return the process that JSON gives back."""
        identity, network, endpoint = fields
        return cls(ProcessIdentity(*identity), network, endpoint)

    @classmethod
    def own(cls, store: Store, transport: str) -> Process:
        """Return this process, a rank of a group with this transport between hosts."""
        # With the relay, no other host can connect.
        endpoint = "" if transport == "relay" else process_endpoint(own_address(store, []))
        return cls(ProcessIdentity.own(), host_identity("net"), endpoint)


class Probes:
    """The view of a process on the ends of others; a context manager."""

    def __init__(self) -> None:
        self._network = host_identity("net")
        self._probes = LivenessProbes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._probes.close()

    def has_gone(self, process: Process) -> bool:
        """Return whether a process has ended, as far as this one can see."""
        identity, network, endpoint = process
        # On its host, not by the port, which another process may have got since.
        if (has_ended := identity.has_ended()) is not None:
            return has_ended
        if endpoint and network != self._network and is_loopback(endpoint.split()[1]):
            return False
        return self._probes.has_ended(endpoint)


class Newcomer(NamedTuple):
    """A process that has announced itself.

    Attributes:
        number: Its number among all newcomers, from 1.
        job_rank: The rank in the job that it takes.
        process: The process.
    """

    number: int
    job_rank: int
    process: Process

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> Newcomer:
        """Return the newcomer that JSON gives back."""
        number, job_rank, process = fields
        return cls(number, job_rank, Process.parse(process))


class Plan(NamedTuple):
    """A group with newcomers, as the ranks of the old group planned it.

    Attributes:
        name: A name that no other plan has.
        job_ranks: The ranks in the job, by rank in the group.
        newcomers: The newcomers in it.
    """

    name: str
    job_ranks: tuple[int, ...]
    newcomers: tuple[Newcomer, ...]

    @property
    def root(self) -> int:
        """The lowest rank that is no newcomer."""
        joining = {each.job_rank for each in self.newcomers}
        return next(rank for rank, each in enumerate(self.job_ranks) if each not in joining)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse the JSON that `text` returned."""
        name, job_ranks, newcomers = json.loads(text)
        return cls(name, tuple(job_ranks), tuple(map(Newcomer.parse, newcomers)))

    @property
    def text(self) -> str:
        """The plan as JSON."""
        return json.dumps(self)


class PlanAbandoned(Exception):  # noqa: N818 - a state of the others
    """A rank of the old group does not form the group of a plan."""


class Newcomers(Probes):
    """The newcomers of a group, as its ranks see them; a context manager.

    Args:
        store: The store of the default group.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def find(self, taken: Sequence[int]) -> list[Newcomer]:
        """Return the newcomers that are in no plan yet, one for each rank that is not `taken`."""
        store = self._store
        if not store.check([_COUNT]):
            return []
        first = int(store.get(_FIRST)) if store.check([_FIRST]) else 1
        found, settled = dict[int, Newcomer](), first
        for number in range(first, int(store.add(_COUNT, 0)) + 1):
            announced, planned = _key("newcomer", number), _key("plan", number)
            if not store.check([announced]):
                continue  # it is about to
            newcomer = Newcomer.parse(json.loads(store.get(announced)))
            if store.check([planned]) or self.has_gone(newcomer.process):
                settled += number == settled
            elif newcomer.job_rank not in taken:
                found[newcomer.job_rank] = newcomer  # the last one
        store.set(_FIRST, str(settled))
        return list(found.values())

    def count_unreplaced(self, ranks: Iterable[int]) -> int:
        """Return how many of these ranks the launcher does not replace."""
        store: Any = self._store
        while hasattr(store, "underlying_store"):  # the launcher knows no prefixes
            store = store.underlying_store
        return sum(store.check([env.unreplaced_key(rank)]) for rank in ranks)

    def invite(self, plan: Plan) -> None:
        """Give a plan to the newcomers that are in it."""
        for each in plan.newcomers:
            self._store.set(_key("plan", each.number), plan.text)


def abandon(store: Store, plan: Plan) -> None:
    """Tell the newcomers of a plan that this rank does not form the group."""
    store.set(f"{plan.name}/abandoned", "1")


def check_plan(store: Store, plan: Plan) -> None:
    """Raise PlanAbandoned if a rank does not form the group of a plan."""
    if store.check([f"{plan.name}/abandoned"]):
        raise PlanAbandoned


def register_rank(store: Store, transport: str) -> None:
    """Publish this rank as one for which newcomers may wait."""
    store.delete_key(_CLOSED)  # by an earlier group of the same processes
    number = int(store.add(_RANKS, 1))
    store.set(_key("rank", number), json.dumps(Process.own(store, transport)))


def announce(store: Store, job_rank: int, transport: str) -> Newcomer:
    """Announce this process to the ranks of the group.

    Args:
        store: The store of the default group.
        job_rank: The rank in the job that this process takes.
        transport: The transport between hosts.
    """
    newcomer = Newcomer(int(store.add(_COUNT, 1)), job_rank, Process.own(store, transport))
    store.set(_key("newcomer", newcomer.number), json.dumps(newcomer))
    return newcomer


def wait_for_plan(store: Store, own: Newcomer, size: int, seconds: float) -> Plan:
    """Wait until the ranks of the group have planned a group with this process.

    Args:
        store: The store of the default group.
        own: This process.
        size: The number of ranks at the start.
        seconds: The longest time to wait.

    Raises:
        CollectiveTimeout: They have not within this time.
        PeerLost: All of them have ended.
        SystemExit: They take no more newcomers.
    """
    next_check = time.monotonic()
    with Probes() as probes:
        for _ in attempts(time.monotonic() + seconds, longest=_LONGEST_PAUSE):
            if store.check([_key("plan", own.number)]):
                return Plan.parse(store.get(_key("plan", own.number)).decode())
            if store.check([_CLOSED]):
                _logger.info("rank %d: the training ended before this process joined", own.job_rank)
                raise SystemExit(0)
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + _CHECK_SECONDS
                _check_ranks(store, own, size, probes)
    raise CollectiveTimeout(
        f"{_describe(own)}: the other ranks did not call phalanx.replace within {seconds:g} s",
        seconds=seconds,
    )


def _check_ranks(store: Store, own: Newcomer, size: int, probes: Probes) -> None:
    count = int(store.add(_RANKS, 0))
    if count < size:  # the others may not yet have noticed the loss
        return
    keys = [_key("rank", number) for number in range(1, count + 1)]
    ranks = [Process.parse(json.loads(store.get(key))) for key in keys if store.check([key])]
    if all(map(probes.has_gone, ranks)):
        raise PeerLost(f"{_describe(own)}: all other ranks are lost, and the state with them")


def _describe(own: Newcomer) -> str:
    return f"pid {os.getpid()}, which takes the place of rank {own.job_rank}"


def close(store: Store) -> None:
    """End the processes that wait to join: the ranks of the group take no more of them."""
    with contextlib.suppress(StoreLost):  # they have no store either
        query_store(lambda: store.set(_CLOSED, "1"))


def _key(name: str, number: int) -> str:
    return f"phalanx/newcomers/{number}/{name}"
