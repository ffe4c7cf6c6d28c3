"""Detection of deadlocks across groups, before any deadline ends them.

If ranks use two groups in opposite order, their waits form a cycle: rank 0 waits in group A for
rank 1, which waits in group B for rank 0. Each group by itself looks correct, no fingerprints are
compared, and no rank makes progress. The flight recorders show the deadlock. A rank that has waited
for a second follows the waits from recorder to recorder. If they lead back to itself, twice with
exactly the same operations, it breaks its groups on that cycle. A rank whose group is broken in
this way propagates the failure to the ranks that wait for it in its other groups. Thus every rank
of the cycle learns of the deadlock, even if no group contains them all.

Only certain waits count. The main thread of a rank is in a collective, or waits without a timeout
for an asynchronous one while no thread of a group is in another operation (see `work`). The rank
that it waits for has not entered that collective. The recorder of a rank that is merely stopped, or
busy in a signal handler, still shows its wait, but the rank that it waited for has arrived by then.

A cycle is a proof only if nothing else of its ranks can enter the collective that is missing: no
other thread of the user, and no handler of a signal. Each rank knows that of itself alone, and says
so in its recorder (`lone_wait`). Otherwise a warning reports the cycle, and the deadline decides.
All other cases are left to deadlines and `phalanx explain`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from phalanx import _native
from phalanx.backend.peer_state import abort_reason, format_site, read_rank
from phalanx.diagnosis.model import Operation, Rank
from phalanx.system.escape import escape

_logger = logging.getLogger("phalanx")
_HISTORY = 64
_MAX_CYCLE_LENGTH = 16
"""The maximum number of ranks in a cycle; longer cycles are left to the deadline."""
_HARMLESS_THREADS = (
    *("phalanx.backend", "phalanx.transports", "phalanx.hierarchical"),
    *("multiprocessing.queues", "torch.utils.data", "tqdm", "rich", "tensorboard"),
)
"""The modules of threads that begin no operation by themselves: ours, and those of libraries."""
_OWN_MODULES = "phalanx."
_MAIN_THREAD = 0
_GROUP_THREAD = 1
_OTHER_THREAD = 2


class _Wait(NamedTuple):
    """A wait of a rank of the job, in an operation of a group, for another rank of the job."""

    rank: int
    number: int
    sequence: int
    identity: int
    peer: int
    peer_in_group: int
    description: str
    is_lone: bool


_suspected_cycle: tuple[_Wait, ...] = ()
_reported_cycle: tuple[_Wait, ...] = ()


def detect_deadlock(groups: Iterable[_native.Group]) -> bool:
    """Search for a cycle of waits through this rank; break its groups if found twice in a row.

    If another thread or a signal handler of its ranks could still end it, report it instead.

    Args:
        groups: All groups that this process has not left.

    Returns:
        Whether there is a cycle that another call must confirm. Always False outside the main
        thread, since only its waits are examined.
    """
    global _reported_cycle, _suspected_cycle  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        return False
    by_identity = {group.identity: group for group in groups}
    cycle = _find_cycle(by_identity)
    confirmed = bool(cycle) and cycle == _suspected_cycle
    _suspected_cycle = cycle
    if confirmed and all(wait.is_lone for wait in cycle):
        _break_cycle(cycle, by_identity)
    elif confirmed and cycle != _reported_cycle:
        _reported_cycle = cycle
        _logger.warning(
            "[rank %d] ranks may use groups in different orders: %s. Unless another thread of one "
            "of them still comes, this lasts until the timeout",
            cycle[0].rank,
            _describe(cycle),
        )
    return bool(cycle) and not confirmed


def propagate_deadlock(broken: _native.Group, groups: Iterable[_native.Group]) -> None:
    """Break the groups in which ranks wait for this one, if a deadlock broke the group `broken`.

    This rank is about to raise, so it will not enter the operations that these ranks wait in. The
    rank that detects a deadlock breaks only its own groups. Without this call, the other ranks
    would learn of the failure only by the death of this rank.

    Args:
        broken: The group in which an operation of this rank has failed.
        groups: All groups that this process has not left.
    """
    if threading.current_thread() is not threading.main_thread() or broken.closed:
        return
    status = broken.failure()
    if status is None or status.code != "deadlock":
        return
    own = read_rank(broken, broken.rank, _HISTORY)
    if own is None or _has_other_threads(own):
        return
    # In a group of several hosts the status has the reason, on one host the reporter's recorder.
    reason = getattr(status, "message", "") or abort_reason(broken, status.reporter)
    ranks_by_pid: dict[int, Rank | None] = {}
    for group in groups:
        peer = None if group.failure() else _find_waiting_peer(own, group, ranks_by_pid)
        if peer is not None:
            group.abort_deadlock(peer, reason)


def running_collective(native: _native.Group) -> int:
    """Return the number of the collective that the group's thread is in; 0 if there is none."""
    own = read_rank(native, native.rank, 0)
    for operation in _group_thread_operations(own) if own else ():
        if own and own.is_in(operation, native.identity):
            return operation.number
    return 0


def _find_waiting_peer(
    own: Rank, group: _native.Group, ranks_by_pid: dict[int, Rank | None]
) -> int | None:
    """Return a rank of the group that waits there in an operation that this rank has not entered.

    Returns None if there is no such rank.
    """
    own_group = own.find_group(group.identity)
    for number in range(own_group.size if own_group else 0):
        if number == group.rank:
            continue
        pid = group.pid(number)
        if ranks_by_pid.get(pid) is None:  # recorders of other hosts cannot be read
            ranks_by_pid[pid] = read_rank(group, number, _HISTORY)
        peer = ranks_by_pid[pid]
        operation = _blocking_collective(peer) if peer else None
        if (
            peer
            and operation
            and peer.is_in(operation, group.identity)
            and _has_not_entered(own, group.identity, operation.sequence)
        ):
            return number
    return None


def _find_cycle(groups: dict[int, _native.Group]) -> tuple[_Wait, ...]:
    any_group = next(iter(groups.values()), None)
    rank = own = read_rank(any_group, any_group.rank, _HISTORY) if any_group else None
    if own is not None:
        operation = _blocking_collective(own)
        number = operation.number if operation is not None and _is_alone() else 0
        _native.set_lone_wait(number)
        rank = own = replace(own, lone_wait=number)
    waits: list[_Wait] = []
    while rank and len(waits) < _MAX_CYCLE_LENGTH:
        wait = _find_wait(rank)
        if wait is None:
            return ()
        waits.append(wait)
        is_closed = wait.peer == waits[0].rank
        rank = own if is_closed else _read_peer(wait, groups)
        if not rank or not _has_not_entered(rank, wait.identity, wait.sequence):
            return ()
        if is_closed:
            has_several_groups = len({each.identity for each in waits}) > 1
            return tuple(waits) if has_several_groups else ()
    return ()


def _has_not_entered(rank: Rank, identity: int, sequence: int) -> bool:
    """Return whether a rank has not begun a collective and cannot begin it by itself.

    If a thread of the group is in an earlier collective, it may have more queued.
    """
    group = rank.find_group(identity)
    if group is None or group.sequence >= sequence:
        return False
    return not any(rank.is_in(each, identity) for each in _group_thread_operations(rank))


def _has_other_threads(rank: Rank) -> bool:
    """Return whether threads besides the main one and those of groups take part in operations."""
    return any(each.thread == _OTHER_THREAD for each in rank.records)


def _group_thread_operations(rank: Rank) -> list[Operation]:
    """Return the operations that threads of groups are in."""
    return [each for each in rank.open if each.thread == _GROUP_THREAD]


def _blocking_collective(rank: Rank) -> Operation | None:
    """Return the collective that a rank's main thread waits in; None if it may return by itself.

    The main thread may also wait for a collective that a group's thread is in. If such threads are
    in other operations too, those may end the wait, since a callback may call anything.
    """
    waits = [each for each in rank.open if each.thread == _MAIN_THREAD and each.group >= 0]
    threads = _group_thread_operations(rank)
    awaited = [each for each in threads if each.number == rank.main_thread_wait]
    if awaited and not waits and awaited == threads:
        waits = awaited
    if len(waits) != 1 or _has_other_threads(rank):
        return None
    is_collective = not waits[0].is_message and waits[0].kind != "join"
    return waits[0] if is_collective and waits[0].group >= 0 else None


def _find_wait(rank: Rank) -> _Wait | None:
    """Return the wait of a rank; None if there is none that counts."""
    operation = _blocking_collective(rank)
    group = rank.get_group(operation) if operation else None
    if operation is None or group is None or not 0 <= operation.waiting_for < len(group.members):
        return None
    peer = group.members[operation.waiting_for]
    return _Wait(
        rank.rank,
        operation.number,
        operation.sequence,
        group.identity,
        peer,
        operation.waiting_for,
        f"rank {rank.rank} waits in {operation.kind} #{operation.sequence} of group "
        f"'{escape(group.name)}'{format_site(operation.site)} for rank {peer}",
        rank.lone_wait == operation.number,
    )


def _read_peer(wait: _Wait, groups: dict[int, _native.Group]) -> Rank | None:
    """Read the recorder of the rank waited for; None if this rank shares no group with it."""
    if wait.identity in groups:
        return read_rank(groups[wait.identity], wait.peer_in_group, _HISTORY)
    for group in groups.values():
        own = read_rank(group, group.rank, 0)
        own_group = own.find_group(group.identity) if own else None
        if own_group and wait.peer in own_group.members:
            return read_rank(group, own_group.members.index(wait.peer), _HISTORY)
    return None


def _is_alone() -> bool:
    """Return whether nothing but the main thread of this process can begin an operation."""
    main = threading.main_thread()
    threads = [each for each in threading.enumerate() if each is not main]
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return all(_origin(each).startswith(_HARMLESS_THREADS) for each in threads) and not any(
        callable(handler)
        and handler is not signal.default_int_handler
        and not str(getattr(handler, "__module__", "")).startswith(_OWN_MODULES)
        for handler in handlers
    )


def _origin(thread: threading.Thread) -> str:
    """Return the module whose code a thread runs."""
    return str(getattr(getattr(thread, "_target", None) or type(thread), "__module__", ""))


def _describe(cycle: tuple[_Wait, ...]) -> str:
    return ", ".join(wait.description for wait in cycle)


def _break_cycle(cycle: tuple[_Wait, ...], groups: dict[int, _native.Group]) -> None:
    reason = f"ranks use groups in different orders: {_describe(cycle)}"
    for wait in cycle:
        if wait.identity in groups:
            groups[wait.identity].abort_deadlock(wait.peer_in_group, reason)
