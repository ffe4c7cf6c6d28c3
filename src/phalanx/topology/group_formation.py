"""The formation of a group: the ranks of each host enter one shared segment."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING

from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from phalanx import _native
from phalanx.errors import CollectiveTimeout, PhalanxError, UsageError
from phalanx.system.host_identity import MemoryProbe
from phalanx.topology.layout import Layout, RankRecord, format_rank_ranges, group_by_host
from phalanx.topology.places import meeting_tree
from phalanx.topology.store_rendezvous import StoreRendezvous, enter_round, key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time


def join(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str = "",
    members: Sequence[int] = (),
    describe_missing: Callable[[int, str], str] | None = None,
    transport: str = "",
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
        transport: The transport between hosts, the same on all ranks.

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
        store, rank, size, time.monotonic(), seconds, formation, describe_missing, members
    )
    try:
        with MemoryProbe() as probe:
            own_record = RankRecord.for_current_process(size, transport, probe)
            rendezvous = enter_round(rendezvous, own_record)
            layout, records = _exchange_records(rendezvous, own_record)
            tree = meeting_tree([records[member].place for member in layout.ranks])
            group = _enter_segment(rendezvous, layout, tree)
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
    rendezvous: StoreRendezvous, own_record: RankRecord
) -> tuple[Layout, list[RankRecord]]:
    """Exchange records with the other ranks and derive the layout of the group."""
    _check_compatibility(
        rendezvous, own_record, RankRecord.parse(rendezvous.wait_for_value("rank", 0))
    )
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
    rendezvous: StoreRendezvous, own_record: RankRecord, first: RankRecord
) -> None:
    """Check that this rank and rank 0 have the same versions, transport and world size."""
    for package, own_version, first_version in (
        ("Phalanx", own_record.phalanx_version, first.phalanx_version),
        ("torch", own_record.torch_version, first.torch_version),
    ):
        if own_version != first_version:
            raise rendezvous.report_failure(
                f"rank 0 ({first.process}) runs {package} {first_version}, this rank "
                f"({own_record.process}) runs {own_version}: install the same version everywhere"
            )
    if own_record.layout_version != first.layout_version:
        raise rendezvous.report_failure(
            f"rank 0 runs a Phalanx with layout version {first.layout_version}, this rank one with "
            f"layout version {own_record.layout_version}: install the same version everywhere"
        )
    if own_record.transport != first.transport:
        raise rendezvous.report_failure(
            f"rank 0 was given the transport {first.transport!r}, this rank "
            f"{own_record.transport!r}: give all ranks the same transport"
        )
    if own_record.world_size != first.world_size:
        raise rendezvous.report_failure(
            f"rank 0 was started with world size {first.world_size}, this rank with "
            f"{own_record.world_size}: give all ranks the same world size"
        )


def _enter_segment(rendezvous: StoreRendezvous, layout: Layout, tree: list[int]) -> _native.Group:
    """Enter the segment of this rank's host together with all other ranks of that host."""
    try:
        group = (
            _create_segment(rendezvous, layout)
            if layout.local_rank == 0
            else _open_segment(rendezvous, layout)
        )
    except OSError as error:
        raise rendezvous.report_failure(str(error.args[0])) from None
    group.set_tree(tree)
    _wait_for_all(rendezvous, layout, group)
    if (status := group.connect()) is not None:
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
