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
from phalanx.topology.layout import Layout, ranges, sorted_into_hosts
from phalanx.topology.rank_record import Place, Probe
from phalanx.topology.rounds import enter_round
from phalanx.topology.store_rendezvous import Meeting, key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

__all__ = ["join"]


def join(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str = "",
    members: Sequence[int] = (),
    where: Callable[[int, str], str] | None = None,
    transport: str = "",
) -> tuple[Store, Layout, list[Place], _native.Group]:
    """Enter the group as `rank` of `size`; blocks until all ranks have arrived.

    Each rank publishes its place, tries to open the memory of the others, and publishes the result,
    so that all ranks derive the same layout. The lowest rank of each host creates the segment and
    publishes its location. The others open it and verify its nonce. No rank returns before all
    ranks of its host have entered. A failure on one rank is raised on all. Processes that have left
    the group may form it again in the same store (see `rounds`).

    Args:
        store: The group's store. Keys begin with "phalanx/".
        rank: This process's rank in the group.
        size: World size of the group.
        timeout: The time to wait for the other ranks.
        name: The group's name, for the flight recorder.
        members: Ranks in the job by rank in the group, for the flight recorder; if empty, all ranks.
        where: Describes a missing rank of the group in a predicate without a subject, or "". Its
            arguments are the rank, and the process that has claimed it, as in "pid 812 on node-a";
            empty if none has.
        transport: The transport between hosts, the same on all ranks.

    Returns:
        A store that only this round of the group uses, the layout of the group, the place of each
        rank, and the native group of this rank's host.

    Raises:
        UsageError: The rank does not fit the world size, another process has claimed it, or the
            ranks called `new_group` in different orders.
        CollectiveTimeout: Some ranks did not arrive in time; the message names and describes them.
        PhalanxError: A rank could not join, for the reason given.
    """
    _check_place(rank, size)
    if size == 1:
        # A group of one rank needs no store. PyTorch gives such groups the same prefix in the
        # store if `new_subgroups` makes them inside of different groups.
        store = HashStore()
    joining = _native.GroupFormation(name, rank, size, ranges(members or range(size)))
    seconds = timeout.total_seconds()
    meeting = Meeting(store, rank, size, time.monotonic(), seconds, joining, where, members)
    try:
        with Probe() as probe:
            own = Place.of_this_process(size, transport, probe)
            meeting = enter_round(meeting, own)
            layout, places = _meet(meeting, own)
            group = _enter(meeting, layout)
    except BaseException as error:
        joining.end(_outcome(error))
        raise
    joining.end("ok")
    return meeting.store, layout, places, group


def _outcome(error: BaseException) -> str:
    """Return the outcome for the flight recorder of a group whose formation failed with `error`."""
    if isinstance(error, CollectiveTimeout):
        return "timeout"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "system"


def _check_place(rank: int, size: int) -> None:
    if size < 1:
        raise UsageError(f"world size {size}: expected at least 1")
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} in a group of {size}: expected 0 to {size - 1}")


def _meet(meeting: Meeting, own: Place) -> tuple[Layout, list[Place]]:
    """Exchange places with the other ranks and derive the layout of the group."""
    _compare(meeting, own, Place.parse(meeting.one("rank", 0)))
    places = [Place.parse(text) for text in meeting.everyone("rank")]
    opened = [
        rank
        for rank, place in enumerate(places)
        if rank == meeting.rank or (place.machine == own.machine and place.opens())
    ]
    meeting.store.set(key("opens", meeting.rank), json.dumps(opened))
    told = dict(enumerate(map(json.loads, meeting.everyone("opens"))))
    layout = sorted_into_hosts(meeting.rank, {rank: set(ranks) for rank, ranks in told.items()})
    for ranks in layout.hosts:
        if len(ranks) > _native.MAX_RANKS:
            raise UsageError(
                f"{len(ranks)} ranks on {places[ranks[0]].host}: expected 1 to {_native.MAX_RANKS} "
                "on a host"
            )
    return layout, places


def _compare(meeting: Meeting, own: Place, first: Place) -> None:
    """Check that this rank and rank 0, and so all ranks, were started alike."""
    for what, mine, theirs in (
        ("Phalanx", own.phalanx, first.phalanx),
        ("torch", own.torch, first.torch),
    ):
        if mine != theirs:
            raise meeting.fail(
                f"rank 0 ({first.process}) runs {what} {theirs}, this rank ({own.process}) {mine}: "
                "install the same version everywhere"
            )
    if own.layout != first.layout:
        raise meeting.fail(
            f"rank 0 runs a Phalanx with layout version {first.layout}, this rank one with "
            f"{own.layout}: install the same version everywhere"
        )
    if own.transport != first.transport:
        raise meeting.fail(
            f"rank 0 was given the transport {first.transport!r}, this rank {own.transport!r}: give all "
            "ranks the same"
        )
    if own.size != first.size:
        raise meeting.fail(
            f"rank 0 was started with world size {first.size}, this rank with {own.size}: "
            "give all ranks the same"
        )


def _enter(meeting: Meeting, layout: Layout) -> _native.Group:
    """Enter the segment of this rank's host together with all other ranks of that host."""
    try:
        group = _create(meeting, layout) if layout.local_rank == 0 else _open(meeting, layout)
    except OSError as error:
        raise meeting.fail(str(error.args[0])) from None
    _wait_for_all(meeting, layout, group)
    if (status := group.connect()) is not None:
        raise PhalanxError(
            f"[rank {meeting.rank}/{meeting.size}] could not watch the process of rank "
            f"{layout.ranks[status.peer]}: "
            f"{os.strerror(status.error) if status.error else status.code}"
        )
    return group


def _create(meeting: Meeting, layout: Layout) -> _native.Group:
    nonce, ranks = secrets.randbits(64), len(layout.ranks)
    try:
        group = _native.Group.create(ranks, 0, nonce, meeting.joining.entry)
    except OSError as error:
        raise OSError(f"no shared memory for {ranks} ranks ({error.strerror})") from None
    where = {"pid": os.getpid(), "descriptor": group.descriptor, "nonce": nonce}
    meeting.store.set(key("segment", meeting.rank), json.dumps(where))
    return group


def _open(meeting: Meeting, layout: Layout) -> _native.Group:
    leader = layout.ranks[0]
    where = json.loads(meeting.one("segment", leader))
    try:
        return _native.Group.open(
            where["pid"],
            where["descriptor"],
            len(layout.ranks),
            layout.local_rank,
            where["nonce"],
            meeting.joining.entry,
        )
    except OSError as error:
        raise OSError(
            f"process {os.getpid()} can't open the segment of process {where['pid']} (rank "
            f"{leader}), whose memory it could open before ({error.strerror})"
        ) from None


def _wait_for_all(meeting: Meeting, layout: Layout, group: _native.Group) -> None:
    """Wait until all ranks of the host are present in the segment.

    The store is queried only for failures. Rank 0, which may host the store, may have exited before
    a rank looks again.
    """

    def absent() -> list[int]:
        return [layout.ranks[local] for local in group.absent_ranks()]

    for _ in meeting.tries(absent):
        missing = absent()
        if not missing:
            return
        meeting.joining.waiting_for(missing[0])
        try:
            meeting.raise_failure()
        except DistError:
            if group.absent_ranks():
                raise
