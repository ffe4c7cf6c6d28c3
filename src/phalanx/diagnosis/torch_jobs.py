"""Jobs from PyTorch's Flight Recorder: from dumps, or from the records that their ranks have kept.

PyTorch's record says less than a flight recorder of Phalanx: of Gloo it has no sends and receives,
and never which root or reduction was given, when an operation ended or how the process did. What
it does not say follows from the records of the other ranks, from what `recorder.torch_recorder` has
noted beside it, or remains unknown.
"""

from __future__ import annotations

import gc
import json
import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.diagnosis import model
from phalanx.diagnosis.exit_reasons import parse_group_error
from phalanx.diagnosis.torch_dumps import (
    MAX_BYTES,
    PEERS,
    Dump,
    Entry,
    Group,
    decode,
    find_files,
    parse_dump,
    start_reading,
)
from phalanx.diagnosis.wait_for_graph import LONG_WAIT
from phalanx.recorder.torch_recorder import JOINS, VERSION
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from phalanx.recorder.job_directory import JobDirectory

    Track = Callable[[Iterator[Any], int], Iterable[Any]]

_MAX_SKEW = 1_000_000_000
"""Nanoseconds by which clocks of hosts may differ before the times of a rank are shifted."""
_UNIX_CLOCK = 1
"""The clock of dumps, whose times are Unix time: a nanosecond, since 0 means that it is unknown."""
_DEFAULT_GROUP = "0"
_OUTCOMES = {"PeerLost": "peer_lost", "CollectiveTimeout": "timeout"}
_TIMEOUT = re.compile(r"\b(?:Timed out waiting (\d{1,12})ms\b|Timeout\(ms\)=(\d{1,12})\b)")
"""The time that an operation had, as Gloo and NCCL tell it."""
_SAME_INPUTS = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "barrier", "gather"),
        *("all_gather_into_tensor", "reduce_scatter_tensor"),
    }
)
"""The operations whose inputs have the same size and dtype on every rank and every backend."""


def read_dumps(path: str, track: Track = lambda values, _: values) -> model.Job:
    """Read the dumps of a job.

    Args:
        path: The directory of the dumps or, if it has those of several jobs, the path of the files
            without the ranks at the end of their names.
        track: A function that yields the values that it is given, with their number, and shows how
            many it has yielded.

    Raises:
        UsageError: There are no dumps, or those of several jobs, or none of them can be read.
    """
    files = find_files(Path(path))
    dumps: list[Dump] = []
    problems: dict[int, str] = {}
    with _no_collection():
        for rank, found in zip(files, track(start_reading(files), len(files)), strict=True):
            if isinstance(found, Dump):
                dumps.append(found)
            else:
                problems[rank] = f"its dump {files[rank].name} cannot be read: {found}"
        if not dumps:
            raise UsageError(f"no dump in {path} can be read: {next(iter(problems.values()))}")
        return _build_job(path, dumps, problems)


def build_job(
    name: str, contents: Mapping[int, bytes], written: int, problems: Mapping[int, str]
) -> model.Job:
    """Return the job of which ranks have sent their dumps.

    Args:
        name: Where the dumps come from.
        contents: The content of each dump, by rank.
        written: The time at which they were made, in Unix nanoseconds.
        problems: The reason why a rank has sent none, by rank.

    Raises:
        UsageError: There is none that can be read.
    """
    dumps, wrong = [], {**problems}
    for rank, content in contents.items():
        try:
            dumps.append(parse_dump(rank, written, decode(content)))
        except ValueError as error:
            wrong[rank] = f"its dump cannot be read: {error}"
    if not dumps:
        reason = next(iter(wrong.values()), "none came")
        raise UsageError(f"no dump of {name} can be read: {reason}")
    return _build_job(name, dumps, wrong)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at the values of a dump again and again.

    They have no cycles, and it would take longer than all else.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def read_kept(
    job: JobDirectory, wanted: Container[int], problems: list[str]
) -> dict[int, model.Rank]:
    """Return the ranks of a job whose records of PyTorch are in its directory, by pid.

    Args:
        job: The directory of the job.
        wanted: The pids of the processes of its ranks, one of each rank.
        problems: A list to which a description of each unreadable file is appended.
    """
    dumps, clocks, pids, exceptions = {}, {}, {}, {}
    for pid, name in job.list_torch_records().items():
        if pid not in wanted:
            continue
        try:
            as_of = job.get_time(name)  # before it is read: it may be replaced meanwhile
            head, _, data = job.read(name, MAX_BYTES).partition(b"\n")
            values = json.loads(head)
            dump, clock = _parse_kept(values, data, as_of)
            exceptions[dump.rank] = str(values["exception"])
        except FileNotFoundError:  # the job has just ended
            continue
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        clocks[dump.rank], pids[dump.rank] = clock, pid
        dumps[dump.rank] = dump
    ranks = _build_ranks([*dumps.values()], clocks, ()) if dumps else {}
    return {
        pids[number]: replace(
            rank,
            pid=pids[number],
            recorded=dumps[number].written,
            exception=exceptions[number],
            ended=dumps[number].ended,
        )
        for number, rank in ranks.items()
    }


def end_failed_operations(
    ranks: Sequence[model.Rank], kept: Mapping[int, model.Rank]
) -> tuple[model.Rank, ...]:
    """Return the ranks of a job, in which operations have ended with the ranks that they failed.

    PyTorch's record has no failures. A rank whose exception is what Gloo or NCCL says of a lost
    peer or of a timeout has failed in the operations that were pending.

    Args:
        ranks: The ranks.
        kept: What `read_kept` has returned.
    """
    foreign = {group.identity for rank in kept.values() for group in rank.groups}
    left = {g.identity: g.left_time for rank in ranks for g in rank.groups if g.left}
    done: dict[int, int] = {}
    for each in (group for rank in ranks for group in rank.groups):
        done[each.identity] = min(done.get(each.identity, each.sequence), each.sequence)
    return tuple(
        _end_failed_operations(rank, foreign, left, done) if rank.pid in kept else rank
        for rank in ranks
    )


def _end_failed_operations(
    rank: model.Rank, foreign: Container[int], left: Mapping[int, int], done: Mapping[int, int]
) -> model.Rank:
    was_stopped = rank.start is not None and rank.start.stopped
    was_stopped |= rank.exception.startswith("KeyboardInterrupt")
    is_silent = was_stopped or not rank.exception
    error = rank.start.error if is_silent and rank.start is not None else rank.exception
    outcome = _OUTCOMES.get(parse_group_error(error))
    if outcome is None and not was_stopped:
        return rank
    history = rank.history
    pending = tuple(each for each in rank.open if _is_in(rank, each, foreign))
    others = tuple(each for each in rank.open if each not in pending)
    if (
        not pending
        and history
        and history[-1].outcome == "ok"
        and _is_in(rank, history[-1], foreign)
    ):
        last, group = history[-1], rank.get_group(history[-1])
        is_lacking = outcome and group is not None and done[group.identity] < last.sequence
        # Retired when it failed: not all have called it, or it has the call site of one that is
        # pending.
        if is_lacking or last.site:
            history, pending = history[:-1], (replace(last, end=0),)
    limit = _TIMEOUT.search(error)
    if outcome is None or (was_stopped and limit is None):  # it was pending until then
        return replace(rank, history=history, open=(*others, *pending))
    failed = []
    for operation in pending:
        group = rank.get_group(operation)
        has_left = outcome == "peer_lost" and group is not None and group.identity in left
        found = "left" if has_left else outcome
        end = rank.ended or rank.logged_end
        if limit is not None:  # the rank may have ended, or been stopped, much later
            end = min(end, operation.begin + int(limit[1] or limit[2]) * 1_000_000)
        failed.append(replace(operation, end=end, outcome=found))
    return replace(rank, open=others, history=(*history, *failed))


def _is_in(rank: model.Rank, operation: model.Operation, groups: Container[int]) -> bool:
    group = rank.get_group(operation)
    return group is not None and group.identity in groups


def merge(own: model.Rank, kept: model.Rank) -> model.Rank:
    """Return a rank with what its flight recorder has, and PyTorch of its groups elsewhere."""
    first = len(own.groups)
    moved = {
        name: [
            replace(each, number=each.number + own.operations, group=each.group + first)
            for each in operations
        ]
        for name, operations in (("open", kept.open), ("history", kept.history))
    }
    return replace(
        own,
        groups=(*own.groups, *kept.groups),
        open=tuple(sorted([*own.open, *moved["open"]], key=lambda each: each.begin)),
        history=tuple(sorted([*own.history, *moved["history"]], key=lambda each: each.end)),
        operations=own.operations + kept.operations,
        recorded=kept.recorded,
        # An RPC worker without a group of Phalanx does not record its own end.
        ended=own.ended or (0 if kept.exception else kept.ended),
    )


def _parse_kept(head: Any, data: bytes, as_of: int) -> tuple[Dump, int]:
    """Return a dump and its clock, from the first line of a file, the rest of it, and its time."""
    if head["version"] != VERSION:
        raise ValueError(f"version {head['version']}, expected {VERSION}")
    clock, groups, left = int(head["clock"]), dict(head["groups"]), dict(head["left"])
    members = {str(name): tuple(map(int, ranks)) for name, ranks in groups.items()}
    content = decode(data) if data else {"entries": []}
    dump = parse_dump(int(head["rank"]), as_of, content, members)
    for name in members:  # even those that have not been used
        dump.find_group(name, members)
    dump.groups = [
        replace(each, left=int(left.get(each.name, -clock)) + clock) for each in dump.groups
    ]
    dump.ended = dump.written if head["is_last"] else 0
    if head["call"] is not None:
        _add_call(dump, head["call"], int(head["time"]) + clock, members, bool(head["is_last"]))
    _shift(dump, -clock)
    return dump, clock


def _add_call(
    dump: Dump, call: Any, since: int, members: Mapping[str, tuple[int, ...]], is_last: bool
) -> None:
    """Add what the main thread waits in: a message, the formation of a group, or a call site.

    Of the last record of a rank, it is what the rank has failed in, which PyTorch retires.
    """
    name, site = str(call["name"]), str(call["site"])
    if name in PEERS:
        ranks = members.get(call["group"], ())
        peer = ranks.index(call["peer"]) if call["peer"] in ranks else -1
        group = dump.find_group(call["group"], members)
        tag = int(call["tag"])
    elif name in JOINS:
        if not call["ranks"]:  # of Phalanx, which has records of its own
            return
        name, peer, tag = "join", -1, 0
        group = len(dump.groups)
        dump.groups.append(Group(0, str(call["group"]), tuple(map(int, call["ranks"]))))
        dump.counts.append(0)
    else:
        last = dump.entries[-1] if dump.entries else None
        if last is not None and (not last.end or (is_last and name.startswith(last.kind))):
            ranks = members.get(call.get("group"), ())
            root = ranks.index(call["peer"]) if call.get("peer") in ranks else -1
            dump.entries[-1] = last._replace(site=site, peer=root)
        return
    dump.total += 1
    begin = max([since, *(entry.begin for entry in dump.entries)])
    entry = Entry(dump.total, name, group, tag, "", 0, peer, site, begin, 0, waiting_for=peer)
    dump.entries.append(entry)


def _build_job(path: str, dumps: Sequence[Dump], problems: dict[int, str]) -> model.Job:
    for dump, shift in zip(dumps, _find_shifts(dumps), strict=True):
        _shift(dump, shift)
    ranks = _build_ranks(dumps, {dump.rank: _UNIX_CLOCK for dump in dumps}, problems)
    members = {group.members for rank in ranks.values() for group in rank.groups}
    last = max([*map(max, filter(None, members)), *ranks, *problems])
    for number in range(last + 1):
        if number not in ranks:
            ranks[number] = model.Rank(number, problem=problems.get(number, "it has left no dump"))
    return model.Job(
        path,
        path,
        world_size=last + 1,
        now=max(dump.written for dump in dumps),
        ranks=tuple(ranks[number] for number in range(last + 1)),
        source="PyTorch's Flight Recorder",
    )


def _find_shifts(dumps: Sequence[Dump]) -> Iterator[int]:
    """Yield what to add to the times of each rank, if the clocks of hosts differ much.

    Ranks enter a collective at about the same time, more often than not.
    """
    first = {key: entry.begin for key, entry in dumps[0].list_collectives()}
    for dump in dumps:
        calls = dump.list_collectives()
        begins = [first[key] - entry.begin for key, entry in calls if key in first]
        shift = sorted(begins)[len(begins) // 2] if begins else dumps[0].written - dump.written
        yield shift if abs(shift) > _MAX_SKEW and _is_steady(begins) else 0


def _is_steady(differences: Sequence[int]) -> bool:
    """Return whether all differences are about the same, as those of clocks are."""
    return len(differences) > 2 and max(differences) - min(differences) < _MAX_SKEW


def _shift(dump: Dump, time: int) -> None:
    if time:
        dump.written += time
        dump.ended += dump.ended and time
        dump.groups = [replace(each, left=each.left and each.left + time) for each in dump.groups]
        dump.entries = [
            each._replace(begin=each.begin + time, end=each.end + time if each.end else 0)
            for each in dump.entries
        ]


def _build_ranks(
    dumps: Sequence[Dump], clocks: Mapping[int, int], others: Iterable[int]
) -> dict[int, model.Rank]:
    """Return the ranks of dumps whose times are those of one clock.

    Args:
        dumps: The dumps.
        clocks: Unix time minus that clock, in nanoseconds, by rank.
        others: The ranks that are known to have no readable dump.
    """
    groups, calls = _collect_groups(dumps, others), _collect_calls(dumps)
    return {dump.rank: _build_rank(dump, groups, calls, clocks[dump.rank]) for dump in dumps}


def _collect_groups(dumps: Sequence[Dump], problems: Iterable[int]) -> dict[int, Group]:
    """Return each group with its members, which dumps of Gloo do not have.

    The default group, named 0, has all ranks. Another one has those that used it or, if these wait
    in it and for none of themselves, perhaps any rank.
    """
    everybody = tuple(range(1 + max([*problems, *(dump.rank for dump in dumps)])))
    groups: dict[int, Group] = {}
    counts: dict[int, dict[int, int]] = defaultdict(dict)
    waiting = set()
    for dump in dumps:
        for group, count in zip(dump.groups, dump.counts, strict=True):
            if group.identity:
                groups[group.identity] = group
                counts[group.identity][dump.rank] = count
        waiting |= {key for key, entry in dump.list_collectives() if not entry.end}
    found = {}
    for identity, users in counts.items():
        last = max(users.values())
        is_unexplained = min(users.values()) == last and (identity, last) in waiting
        group = groups[identity]
        if group.members:
            found[identity] = group
        elif group.name == _DEFAULT_GROUP:
            found[identity] = replace(group, members=everybody)
        elif is_unexplained:
            found[identity] = replace(group, members=everybody, is_assumed=True)
        else:
            found[identity] = replace(group, members=tuple(sorted(users)))
    return found


@dataclass
class _Calls:
    """The calls of a collective by the ranks of its group.

    Attributes:
        count: The number of ranks that have called it.
        last: The time at which the last rank called it; it cannot have ended before.
        signatures: What all ranks must give alike, as they gave it.
        roots: The roots that they gave, of the ranks that wait in it.
    """

    count: int = 0
    last: int = 0
    signatures: set[tuple[Any, ...]] = field(default_factory=set)
    roots: set[int] = field(default_factory=set)


def _collect_calls(dumps: Sequence[Dump]) -> dict[tuple[int, int], _Calls]:
    """Return the calls of each collective, by the identity of its group and its number there."""
    found: dict[tuple[int, int], _Calls] = defaultdict(_Calls)
    for dump in dumps:
        for key, entry in dump.list_collectives():
            calls = found[key]
            calls.count += 1
            calls.last = max(calls.last, entry.begin)
            calls.signatures.add(_get_signature(entry))
            calls.roots |= {entry.peer} - {-1}
    return found


def _get_signature(entry: Entry) -> tuple[Any, ...]:
    if entry.kind not in _SAME_INPUTS:
        return (entry.kind,)
    return entry.kind, entry.dtype, entry.elements


def _build_rank(
    dump: Dump,
    groups: Mapping[int, Group],
    calls: Mapping[tuple[int, int], _Calls],
    clock: int,
) -> model.Rank:
    ends = {}
    for key, entry in dump.list_collectives():
        found = calls[key]
        if len(found.signatures) > 1 or (len(found.roots) > 1 and entry.peer >= 0):
            ends[entry.number] = found.last, "mismatch"
        elif entry.end == entry.begin:  # its end was not recorded
            ends[entry.number] = found.last, "ok"
        elif (
            not entry.end
            and key[0] in groups
            and found.count == len(groups[key[0]].members)
            and dump.written - found.last < LONG_WAIT
            and not 0 < dump.ended < found.last
        ):  # it was about to end
            ends[entry.number] = found.last, "ok"
    operations = []
    for entry in dump.entries:
        values = entry._asdict()
        values["end"], outcome = ends.get(entry.number, (entry.end, "ok"))
        operations.append(model.Operation(count=values.pop("elements"), outcome=outcome, **values))
    pending = [each for each in operations if not each.end]
    if pending and pending[0].is_message:  # of those under way, the oldest is waited for
        pending[0] = replace(pending[0], waiting_for=pending[0].peer)
    return model.Rank(
        dump.rank,
        clock=clock,
        opened=max(1, min((each.begin for each in operations), default=dump.written)),
        groups=tuple(
            _build_group(dump.rank, groups.get(group.identity, group), count, group.left)
            for group, count in zip(dump.groups, dump.counts, strict=True)
        ),
        open=tuple(pending),
        history=tuple(each for each in operations if each.end),
        operations=dump.total,
        process=model.Process("unknown"),
    )


def _build_group(rank: int, group: Group, count: int, left: int) -> model.Group:
    members = group.members
    return model.Group(
        group.identity,
        group.name,
        members.index(rank) if rank in members else -1,
        len(members),
        members,
        count,
        left,
        is_assumed=group.is_assumed,
    )
