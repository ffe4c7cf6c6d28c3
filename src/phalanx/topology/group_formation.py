"""The formation of a group: the ranks of each host enter one shared segment."""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from typing import TYPE_CHECKING

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from phalanx import _native
from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError
from phalanx.system.host_identity import MemoryProbe
from phalanx.topology.layout import HostLink, Layout, RankRecord, format_rank_ranges, group_by_host
from phalanx.topology.places import cache_chain, meeting_tree
from phalanx.topology.store_rendezvous import StoreRendezvous, enter_round, key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx.topology.agreement import Agreement

_LACK_OF_RESOURCES = {
    errno.EAGAIN,
    errno.EFAULT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
}
"""Errors that do not depend on the process whose memory is opened; EFAULT is that of `madvise`."""


def join(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str = "",
    members: Sequence[int] = (),
    describe_missing: Callable[[int, str], str] | None = None,
    link: HostLink = HostLink(),  # noqa: B008 - immutable
    check: Callable[[], None] | None = None,
    reference: int = 0,
) -> tuple[Store, Layout, list[RankRecord], _native.Group]:
    """Enter the group as `rank` of `size`; blocks until all ranks have arrived.

    Each rank publishes its record, tries to open the memory of the others, and publishes which
    ranks it could open, so that all ranks derive the same layout. The lowest rank of each host
    creates the segment and publishes its location. The others open it and verify its nonce. No rank
    returns before all ranks of its host have entered. A failure on one rank is raised on all.
    Processes that have left the group may form it again in the same store (see `store_rendezvous`).

    Args:
        store: The group's store. Keys begin with "phalanx/".
        rank: This process's rank in the group.
        size: World size of the group.
        timeout: The time to wait for the other ranks.
        name: The group's name, for the flight recorder.
        members: Ranks in the job by rank in the group, for the flight recorder; all if empty.
        describe_missing: Returns a description of a missing rank of the group, as a predicate
            without a subject, or "". Its arguments are the rank and the process that has claimed
            the rank, as in "pid 812 on node-a", or "" if no process has claimed it.
        link: The link between hosts, the same on all ranks.
        check: A function that is called during all waits, and may raise to end them.
        reference: The rank with which all others must agree in versions and link.

    Returns:
        A store that only this round of the group uses, the layout of the group, the record of each
        rank, and the native group of this rank's host.

    Raises:
        UsageError: The rank does not fit the world size, another process has claimed it, or the
            ranks called `new_group` in different orders.
        CollectiveTimeout: Some ranks did not arrive in time; the message names and describes them.
        PhalanxError: A rank could not join, for the reason given.
    """
    _check_rank(rank, size)
    if size == 1:
        # A group of one rank needs no store. PyTorch gives such groups the same prefix in the
        # store if `new_subgroups` makes them inside of different groups.
        store = HashStore()
    formation = _native.GroupFormation(name, rank, size, format_rank_ranges(members or range(size)))
    seconds = timeout.total_seconds()
    rendezvous = StoreRendezvous(
        store, rank, size, time.monotonic(), seconds, formation, describe_missing, members, check
    )
    try:
        with MemoryProbe() as probe:
            own_record = RankRecord.for_current_process(size, link, probe)
            rendezvous = enter_round(rendezvous, own_record)
            layout, records = _exchange_records(rendezvous, own_record, reference)
            places = [records[member].place for member in layout.ranks]
            group = _enter_segment(rendezvous, layout, places)
    except BaseException as error:
        formation.end(_outcome(error))
        raise
    formation.end("ok")
    return rendezvous.store, layout, records, group


def _outcome(error: BaseException) -> str:
    """Return the outcome for the flight recorder of a group whose formation failed with `error`."""
    if isinstance(error, CollectiveTimeout):
        return "timeout"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "system"


def _check_rank(rank: int, size: int) -> None:
    if size < 1:
        raise UsageError(f"world size {size}: expected at least 1")
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} in a group of {size}: expected 0 to {size - 1}")


def _exchange_records(
    rendezvous: StoreRendezvous, own_record: RankRecord, reference: int
) -> tuple[Layout, list[RankRecord]]:
    """Exchange records with the other ranks and derive the layout of the group."""
    record = RankRecord.parse(rendezvous.wait_for_value("rank", reference))
    _check_compatibility(rendezvous, own_record, reference, record)
    records = [RankRecord.parse(text) for text in rendezvous.wait_for_values("rank")]
    opened = [
        rank
        for rank, record in enumerate(records)
        if rank == rendezvous.rank
        or (record.machine == own_record.machine and record.probe_is_accessible())
    ]
    rendezvous.store.set(key("opens", rendezvous.rank), json.dumps(opened))
    opened_by = dict(enumerate(map(json.loads, rendezvous.wait_for_values("opens"))))
    layout = group_by_host(rendezvous.rank, {rank: set(ranks) for rank, ranks in opened_by.items()})
    for ranks in layout.hosts:
        if len(ranks) > _native.MAX_RANKS:
            raise UsageError(
                f"{len(ranks)} ranks on {records[ranks[0]].host}: expected 1 to "
                f"{_native.MAX_RANKS} on a host"
            )
    return layout, records


def _check_compatibility(
    rendezvous: StoreRendezvous, own_record: RankRecord, reference: int, other: RankRecord
) -> None:
    """Check that this rank and another have the same versions, link and world size."""
    first = f"rank {reference}"
    for package, own_version, other_version in (
        ("Phalanx", own_record.phalanx_version, other.phalanx_version),
        ("torch", own_record.torch_version, other.torch_version),
    ):
        if own_version != other_version:
            raise rendezvous.report_failure(
                f"{first} ({other.process}) runs {package} {other_version}, this rank "
                f"({own_record.process}) runs {own_version}: install the same version everywhere"
            )
    if own_record.layout_version != other.layout_version:
        raise rendezvous.report_failure(
            f"{first} runs a Phalanx with layout version {other.layout_version}, this rank one "
            f"with layout version {own_record.layout_version}: install the same version everywhere"
        )
    if own_record.link != other.link:
        raise rendezvous.report_failure(
            f"{first} was given {HostLink(*other.link)}, this rank {HostLink(*own_record.link)}: "
            "give all ranks the same"
        )
    if own_record.world_size != other.world_size:
        raise rendezvous.report_failure(
            f"{first} was started with world size {other.world_size}, this rank with "
            f"{own_record.world_size}: give all ranks the same world size"
        )


def _enter_segment(
    rendezvous: StoreRendezvous, layout: Layout, places: Sequence[Sequence[int]]
) -> _native.Group:
    """Enter the segment of this rank's host together with all other ranks of that host."""
    try:
        group = (
            _create_segment(rendezvous, layout)
            if layout.local_rank == 0
            else _open_segment(rendezvous, layout)
        )
    except OSError as error:
        raise rendezvous.report_failure(str(error.args[0])) from None
    group.set_tree(meeting_tree(places), cache_chain(places))
    _wait_for_all(rendezvous, layout, group)
    # A rank that has died since then breaks the group: the next operation says so.
    if (status := group.connect()) is not None and status.code != "peer_lost":
        raise PhalanxError(
            f"[rank {rendezvous.rank}/{rendezvous.world_size}] could not watch the process of rank "
            f"{layout.ranks[status.peer]}: "
            f"{os.strerror(status.error) if status.error else status.code}"
        )
    return group


def _create_segment(rendezvous: StoreRendezvous, layout: Layout) -> _native.Group:
    nonce, ranks = secrets.randbits(64), len(layout.ranks)
    try:
        group = _native.Group.create(ranks, 0, nonce, rendezvous.formation.entry)
    except OSError as error:
        raise OSError(f"no shared memory for {ranks} ranks ({error.strerror})") from None
    location = {"pid": os.getpid(), "descriptor": group.descriptor, "nonce": nonce}
    rendezvous.store.set(key("segment", rendezvous.rank), json.dumps(location))
    return group


def _open_segment(rendezvous: StoreRendezvous, layout: Layout) -> _native.Group:
    leader = layout.ranks[0]
    location = json.loads(rendezvous.wait_for_value("segment", leader))
    try:
        return _native.Group.open(
            location["pid"],
            location["descriptor"],
            len(layout.ranks),
            layout.local_rank,
            location["nonce"],
            rendezvous.formation.entry,
        )
    except OSError as error:
        raise OSError(
            f"process {os.getpid()} cannot open the segment of process {location['pid']} (rank "
            f"{leader}), whose memory it could open before ({error.strerror})"
        ) from None


def _wait_for_all(rendezvous: StoreRendezvous, layout: Layout, group: _native.Group) -> None:
    """Wait until all ranks of the host are present in the segment.

    The store is queried only for failures. Rank 0, which may host the store, may have exited before
    a rank looks again.
    """

    def absent() -> list[int]:
        return [layout.ranks[local] for local in group.absent_ranks()]

    for _ in rendezvous.poll(absent):
        missing = absent()
        if not missing:
            return
        rendezvous.formation.waiting_for(missing[0])
        try:
            rendezvous.raise_reported_failure()
        except DistError:
            if group.absent_ranks():
                raise


class SegmentOfRound:
    """The formation of the group of a round, by the ranks of one host.

    The lowest member creates the segment, and publishes its location in that of the old group.

    Args:
        old: The native group, with all its ranks on this host.
        job_ranks: The rank in the job by rank in the group, for the flight recorder.
        places: The place of each rank in the machine; empty if unknown.
        name: The group's name, for the flight recorder.
    """

    def __init__(
        self,
        old: _native.Group,
        job_ranks: Sequence[int],
        places: Sequence[Sequence[int]],
        name: str,
    ) -> None:
        self._old = old
        self._job_ranks = job_ranks
        self._places = places
        self._name = name

    def form(
        self, agreement: Agreement[_native.Group], number: int, members: Sequence[int]
    ) -> _native.Group | None:
        """Enter the segment of a round with all its members."""
        first, location = members[0], None
        if first != agreement.rank:
            location = agreement.wait_for_first(number, first, lambda: self._old.successor(number))
            if location is None:
                return None
        try:
            group = self._enter(location, members, members.index(agreement.rank))
        except OSError as error:
            if location is not None and self._is_stranded(agreement, number, first, error):
                return None
            raise
        if location is None:
            self._old.publish_successor(number, group.descriptor, group.identity)
        return group

    def _is_stranded(
        self, agreement: Agreement[_native.Group], number: int, first: int, error: OSError
    ) -> bool:
        """Return whether the others are the reason why this rank cannot enter a segment.

        The creator has died; or it was excluded, or this rank was, and the creator has closed the
        segment. A process that ends closes its files some time before its end is visible.
        """
        if error.errno in _LACK_OF_RESOURCES:
            return False
        return any(
            agreement.has_gone(first)
            or agreement.is_excluded(number + 1, first)
            or agreement.is_excluded(number + 1, agreement.rank)
            for _ in agreement.looks()
        )

    def _enter(
        self, location: tuple[int, int, int] | None, members: Sequence[int], rank: int
    ) -> _native.Group:
        size = len(members)
        ranks = format_rank_ranges([self._job_ranks[member] for member in members])
        formation = _native.GroupFormation(self._name, rank, size, ranks)
        try:
            if location is None:
                group = _native.Group.create(size, 0, secrets.randbits(64), formation.entry)
            else:
                pid, descriptor, nonce = location
                group = _native.Group.open(pid, descriptor, size, rank, nonce, formation.entry)
        except OSError:
            formation.end("system")
            raise
        formation.end("ok")
        if self._places:
            places = [self._places[member] for member in members]
            group.set_tree(meeting_tree(places), cache_chain(places))
        return group
