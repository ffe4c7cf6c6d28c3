"""Groups that continue after ranks are lost: `phalanx.shrink` and `phalanx.replace`.

The ranks agree on those that are left (`topology.agreement`), and form a new native group, alone or
with newcomers (`newcomers`). The object that users hold stays: it gets new ranks, and PyTorch's
tables of them are changed with it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

from phalanx import _native, torch_versions
from phalanx.backend.formation import Formed
from phalanx.backend.newcomers import Newcomer, Newcomers, Plan, abandon
from phalanx.backend.process_group import ProcessGroup
from phalanx.errors import CollectiveTimeout, PhalanxError, RankExcluded, UsageError
from phalanx.system.polling import attempts, wait_until
from phalanx.topology import Agreement, SegmentOfRound, StoreBoard, Survivors
from phalanx.transports.store_query import StoreLost, query_store

_LOOPBACK = "127.0.0.1"
_LOSS_SECONDS = 1.0
"""The time within which the end of a process is seen by others, in seconds."""
_logger = logging.getLogger("phalanx")

_Agree = Callable[[ProcessGroup, Any, float], Survivors[Formed]]


class RankChange(NamedTuple):
    """The change of a group's ranks by `phalanx.shrink` or `phalanx.replace`.

    Attributes:
        rank: This rank's number from now on.
        world_size: The number of ranks from now on.
        former_ranks: By the number from now on, the former number of each rank; None for one that
            has joined.
        lost_ranks: The former numbers of the ranks that are not in the group any more.

    Example:
        >>> change = phalanx.RankChange(1, 2, former_ranks=(0, 2), lost_ranks=(1,))
        >>> f"rank {change.former_ranks[change.rank]} is now rank {change.rank}"
        'rank 2 is now rank 1'
    """

    rank: int
    world_size: int
    former_ranks: tuple[int | None, ...]
    lost_ranks: tuple[int, ...]


def shrink(group: dist.ProcessGroup | None = None, timeout: float | None = None) -> RankChange:
    """Continue a group without the ranks that are lost, in the same processes.

    All remaining ranks call it after an operation of the group has failed. They agree on the list
    of remaining ranks, also if more of them die meanwhile, and get new numbers in the order of the
    old ones: from then on, `dist.get_rank(group)` and `dist.get_world_size(group)` are those of the
    smaller group. The group object stays the same. If it is the default group, the ranks of the job
    get new numbers with it, and so do the members of all other groups; those with a lost member
    have to be shrunk too. Pending operations and prepared ones end with an error.

    A call while the group works breaks it first: the other ranks then raise `Aborted`. This follows
    ULFM's `MPI_Comm_revoke` and `MPI_Comm_shrink` (Bland et al. 2013).

    Blocks until every rank has called it, or has gone. If it fails, also by Ctrl-C, this rank has
    left the group, unless the call was wrong.

    Args:
        group: The group; None for the default group.
        timeout: The time to wait for ranks that are alive, in seconds. Later ones are excluded: the
            group continues without them. By default, the timeout of the group.

    Returns:
        The new rank and world size, and which ranks are left.

    Raises:
        RankExcluded: The other ranks have continued without this one, which was late.
        UsageError: There is no such group, it is not a group of Phalanx, it has been left, or
            `timeout` is not positive.
        PhalanxError: The group is on several hosts, and its store is lost with its host.
        OSError: There is no memory for the group; the other ranks continue without this one.

    Example:
        >>> change = phalanx.shrink()
        >>> print(f"rank {change.rank} of {change.world_size}; lost: {list(change.lost_ranks)}")
        rank 0 of 1; lost: []
    """
    target, seconds = _check_arguments("shrink", group, timeout)
    return _change_ranks("shrink", target, seconds, _agree_on_those_left)


def replace(
    count: int | None = None, *, wait: float = 60.0, timeout: float | None = None
) -> RankChange:
    """Continue the default group with newcomers in the place of the ranks that are lost.

    All ranks that are left call it after an operation of the group has failed, or at any other
    moment at which all of them do. They agree on who is left as in `phalanx.shrink`, wait for
    newcomers, and form the group with them. Ranks are in the order of the job's start, so if each
    lost rank is replaced, all have their former numbers.

    A newcomer is a process with `PHALANX_NEWCOMER=1` and otherwise the environment of the rank
    whose place it takes, such as `RANK`; a rank beyond those of the job adds one. It calls
    `phalanx.init` or `init_process_group` as at the start, which blocks until the others call this
    function. It has no state: send it parameters, for example by `broadcast`.

    Args:
        count: The number of newcomers to wait for; by default, as many as the group lacks of its
            ranks at the start.
        wait: The time to wait for newcomers, in seconds. If fewer have come, the group continues
            with these.
        timeout: As in `phalanx.shrink`.

    Returns:
        The new rank and world size, and which ranks are left or have joined.

    Raises:
        RankExcluded, OSError: As in `phalanx.shrink`.
        UsageError: There is no default group, it is not a group of Phalanx, it has been left, or an
            argument is wrong.
        PhalanxError: The store of the group is lost with its host.

    Example:
        >>> change = phalanx.replace(0)
        >>> print(f"rank {change.rank} of {change.world_size}, formerly {change.former_ranks}")
        rank 0 of 1, formerly (0,)
    """
    target, seconds = _check_arguments("replace", None, timeout)
    target.accept_newcomers()
    for name, value, kinds in (("count", count, int), ("wait", wait, (int, float))):
        is_valid = isinstance(value, kinds) and 0 <= value < math.inf
        if not is_valid and not (name == "count" and value is None):
            raise UsageError(
                f"replace: {name} is {value!r}, expected a number that is not negative"
            )
    return _change_ranks(
        "replace", target, seconds, partial(_agree_with_newcomers, count=count, wait=float(wait))
    )


def _check_arguments(
    name: str, group: dist.ProcessGroup | None, timeout: float | None
) -> tuple[ProcessGroup, float]:
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise UsageError(f"{name}: there is no default group; form it first")
    if not isinstance(group, ProcessGroup):
        raise UsageError(f"{name}: group is {group!r}, expected a group of the backend 'phalanx'")
    if group._membership.native.closed:
        raise UsageError(f"{name}: this rank has left the group: form another one")
    seconds: Any = group._membership.timeout if timeout is None else timeout
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise UsageError(f"{name}: timeout is {timeout!r}, expected a positive number of seconds")
    return group, float(seconds)


def _change_ranks(name: str, group: ProcessGroup, seconds: float, agree: _Agree) -> RankChange:
    before, lost = group.job_ranks, list[int]()
    former: dict[int, int | None] = {each: rank for rank, each in enumerate(before)}
    while True:
        survivors = _agree(name, group, seconds, agree)
        job_ranks = group.job_ranks
        lost += [each for each in former if each not in survivors]
        former = {each: former.get(each) if each in survivors else None for each in job_ranks}
        if group is not dist.group.WORLD:
            break
        with contextlib.suppress(PhalanxError):  # another rank is lost: agree again
            _begin(group, next(rank for rank, each in enumerate(job_ranks) if each in survivors))
            break
    gone = sorted(before.index(each) for each in lost if each in before)
    return RankChange(group.rank(), group.size(), tuple(former.values()), tuple(gone))


def _agree(name: str, group: ProcessGroup, seconds: float, agree: _Agree) -> Sequence[int]:
    """Continue with the ranks that are left; return their ranks in the job."""
    membership = group._membership
    native = membership.native
    try:
        with _leaving_on_failure(group):
            if native.failure() is None:
                native.abort(f"it calls phalanx.{name}, which all ranks must call then")
            membership.stop_threads(0.0)
            ranks, formed, late = agree(group, native, seconds)
    except RankExcluded as error:
        raise error.replace(
            f"[{membership.rank_label}] {error}",
            ranks=(membership.members[membership.rank],),
            group=membership.name,
        ) from None
    except PhalanxError:
        raise
    except DistError as error:
        raise PhalanxError(
            f"[{membership.rank_label}] {name}: the store of the group is lost, probably with its "
            f"host ({error}): end the job, and start it again from a checkpoint",
            group=membership.name,
        ) from None
    if late:
        _logger.warning(
            "[%s] %s: continues without rank %s, which did not call it within %g s",
            membership.rank_label,
            name,
            ", ".join(map(str, late)),
            seconds,
        )
    survivors = [group.job_ranks[rank] for rank in ranks]
    _renumber(group, formed, survivors)
    return survivors


@contextlib.contextmanager
def _leaving_on_failure(group: ProcessGroup) -> Iterator[None]:
    """Leave the group if the enclosed agreement fails, since it cannot be repeated."""
    try:
        yield
    except BaseException:
        group.shutdown()
        raise


def _agree_on_those_left(group: ProcessGroup, native: Any, seconds: float) -> Survivors[Formed]:
    # After another loss, only ranks of one host may be left.
    is_on_host = isinstance(native, _native.Group)
    return (_agree_on_host if is_on_host else _agree_over_hosts)(group, native, seconds)


def _agree_on_host(group: ProcessGroup, native: _native.Group, seconds: float) -> Survivors[Formed]:
    """Agree with the ranks of this host, in the segment of the old group."""
    segments = SegmentOfRound(native, group.job_ranks, group.places, group.getGroupName())
    agreement = Agreement(native, group.rank(), native.has_gone, seconds, segments.form)
    ranks, new, late = agreement.reach(group.size())
    # A rank that has died since then breaks the new group: its next operation says so.
    status = new.connect()
    if status is not None and status.code != "peer_lost":
        new.close()
        raise OSError(status.error, f"could not watch the ranks: {os.strerror(status.error)}")
    formed = Formed(
        new,
        PrefixStore(f"phalanx/shrunk/{new.identity:x}", group.base_store),
        (tuple(range(len(ranks))),),
        tuple(group.places[rank] for rank in ranks) if group.places else (),
        tuple(group.job_ranks[rank] for rank in ranks),
    )
    return Survivors(ranks, formed, late)


class _RankGone(Exception):  # noqa: N818 - a state of the others
    """A rank of a round has gone while the group of the round is formed."""


def _form_round(
    group: ProcessGroup,
    agreement: Agreement[Formed],
    number: int,
    members: Sequence[int],
    plan: Plan,
    seconds: float,
    newcomers: Newcomers,
) -> Formed | None:
    """Form the group of a round through the store; return None if a rank of it has gone."""

    def check() -> None:
        for member in members:
            if agreement.has_gone(member) and agreement.exclude(number + 1, member):
                raise _RankGone
        if any(newcomers.has_gone(each.process) for each in plan.newcomers):
            raise _RankGone

    store, job_ranks = PrefixStore(plan.name, group.base_store), plan.job_ranks
    rank = job_ranks.index(group.job_ranks[agreement.rank])
    try:
        return group.form(
            store,
            rank,
            len(job_ranks),
            timedelta(seconds=seconds),
            job_ranks,
            check=check,
            reference=plan.root,
        )
    except (_RankGone, CollectiveTimeout):
        pass
    except PhalanxError as error:
        if not plan.newcomers and not wait_until(partial(_is_gone, check), _LOSS_SECONDS):
            raise
        _logger.warning("[%s] forms another group: %s", group._membership.rank_label, error)
    if plan.newcomers:
        abandon(group.base_store, plan)
    return None


def _is_gone(check: Callable[[], None]) -> bool:
    try:
        check()
    except _RankGone:
        return True
    return False


def _agree_over_hosts(group: ProcessGroup, native: Any, seconds: float) -> Survivors[Formed]:
    """Agree with the ranks of several hosts, in the store of the old group."""
    nobody = Newcomers(group.base_store)

    def form(agreement: Agreement[Formed], number: int, members: Sequence[int]) -> Formed | None:
        job_ranks = tuple(group.job_ranks[member] for member in members)
        plan = Plan(f"phalanx/shrunk/{native.identity:x}/{number}", job_ranks, ())
        return _form_round(group, agreement, number, members, plan, seconds, nobody)

    agreement = Agreement(native.board, group.rank(), native.has_gone, seconds, form)
    return agreement.reach(group.size())


def _agree_with_newcomers(
    group: ProcessGroup, native: Any, seconds: float, *, count: int | None, wait: float
) -> Survivors[Formed]:
    """Agree with the other ranks, and form the group with newcomers through the store."""
    store, end = group.base_store, time.monotonic() + wait

    def plan_round(number: int, members: Sequence[int]) -> Plan:
        job_ranks = [group.job_ranks[member] for member in members]
        missing = {*range(group.full_size)} - {*job_ranks}
        most = len(missing) if count is None else count
        found: list[Newcomer] = []
        for _ in attempts(end, longest=0.01):
            found = newcomers.find(job_ranks)
            expected = most - (newcomers.count_unreplaced(missing) if count is None else 0)
            if len(found) >= expected:
                break
        joining = tuple(found[:most])
        now = sorted(job_ranks + [each.job_rank for each in joining])
        return Plan(f"phalanx/replaced/{native.identity:x}/{number}", tuple(now), joining)

    def form(agreement: Agreement[Formed], number: int, members: Sequence[int]) -> Formed | None:
        key = f"phalanx/replaced/{native.identity:x}/plan/{number}"

        def look() -> Plan | None:
            return Plan.parse(store.get(key).decode()) if store.check([key]) else None

        if members[0] == agreement.rank:
            # Newcomers get it last. If this rank dies meanwhile, the others know the plan, and tell
            # the newcomers that have it already that they give it up.
            plan = plan_round(number, members)
            store.set(key, plan.text)
            newcomers.invite(plan)
        elif (found := agreement.wait_for_first(number, members[0], look, wait)) is not None:
            plan = found
        else:
            return None
        return _form_round(group, agreement, number, members, plan, seconds, newcomers)

    # Not the segment's board, whose rounds do not suffice for newcomers that die.
    board = StoreBoard(PrefixStore(f"phalanx/replaced/{native.identity:x}/board", store))
    with Newcomers(store) as newcomers:
        agreement = Agreement(board, group.rank(), native.has_gone, seconds, form)
        return agreement.reach(group.size())


def _renumber(group: ProcessGroup, formed: Formed, survivors: Sequence[int]) -> None:
    """Give a group, and PyTorch's tables, new ranks; `survivors` are ranks in the job."""
    is_default, before = group is dist.group.WORLD, group.job_ranks
    old_members = group._membership.members
    now, own = formed.job_ranks, before[group.rank()]
    members = range(len(now)) if is_default else [old_members[before.index(each)] for each in now]
    group.change_ranks(formed, now.index(own), members)
    torch_versions.world().pg_group_ranks[group] = {each: rank for rank, each in enumerate(members)}
    if not is_default:
        return
    numbers = {before.index(each): now.index(each) for each in survivors}
    for other, table in torch_versions.world().pg_group_ranks.items():
        if other is not group and isinstance(other, ProcessGroup):
            torch_versions.world().pg_group_ranks[other] = {
                numbers[each]: rank for each, rank in table.items() if each in numbers
            }
            other.renumber_members(numbers)


def _begin(group: ProcessGroup, root: int) -> None:
    """Run the first collective of the default group, from a rank that was in it before.

    It tells newcomers that the agreement is reached, and how many groups this process has made, by
    which PyTorch names the next one. It also replaces the store of a group on one host if its host
    was a rank that is lost: `new_group` needs the store. A launcher's store outlives the ranks, but
    without a launcher, rank 0 is its host.
    """
    store = None
    values = torch.zeros(2, dtype=torch.int64, device="cpu")
    if group.rank() == root:
        values[1] = torch_versions.world().group_count
        if len(group.hosts) == 1 and not _is_alive(group.base_store):
            store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
            values[0] = store.port
    group.broadcast([values], root).wait()
    port = int(values[0])
    if not port:
        return
    store = store or TCPStore(_LOOPBACK, port, is_master=False)
    group.base_store = PrefixStore("default_pg", store)
    table = torch_versions.world().pg_map
    table[group] = (table[group][0], group.base_store)


def _is_alive(store: Store) -> bool:
    try:
        query_store(lambda: store.check([""]))
    except StoreLost:
        return False
    return True
