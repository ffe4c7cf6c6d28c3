"""Jobs from the dumps of PyTorch's Flight Recorder, a file of each rank.

NCCL writes them when a collective times out (`TORCH_NCCL_DUMP_ON_TIMEOUT`), PyTorch's debug server
and `_dump_fr_trace` on request. They are pickles or JSON, of the format 2.x that PyTorch has
written since version 2.5. A file from a stranger cannot run code: its pickle may contain plain
values only.

A dump says less than a flight recorder of Phalanx: of Gloo it has no sends and receives, and never
which root or reduction was given, when an operation ended or how the process did. What it does not
say remains unknown.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.observe import model
from phalanx.observe.torch_recorder import VERSION
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from phalanx.observe.job_directory import JobDirectory

HISTORY = 256
"""The number of operations of a rank that are read, the newest."""

_MAX_BYTES = 1 << 28
_MAX_RANKS = 1 << 16
_MAX_SKEW = 1_000_000_000
"""Nanoseconds by which clocks of hosts may differ before the times of a rank are shifted."""
_FILE = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.(?:json|pickle|pkl))?", re.DOTALL)
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
_KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""The names of operations in dumps that differ from those of `torch.distributed`."""
_DEFAULT_GROUP = "0"
_SAME_INPUTS = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "barrier", "gather"),
        *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    }
)
"""The operations whose inputs have the same size and dtype on every rank."""
_DTYPES = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of plain values: it imports nothing, and so calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it is no dump: its pickle asks for {module}.{name}")


@dataclass
class _Dump:
    """The dump of a rank.

    Attributes:
        rank: The number of the rank, by the name of the file.
        written: The time at which the file was written, in Unix nanoseconds.
        operations: Its newest operations, the oldest first; times are in Unix nanoseconds.
        groups: The group of each operation: its name and, if the dump has them, its members.
        counts: The number of collectives that the rank has begun in each group.
        total: The number of operations in the dump.
    """

    rank: int
    written: int
    operations: list[model.Operation] = field(default_factory=list)
    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    counts: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    total: int = 0


def read_dumps(path: str) -> model.Job:
    """Read the dumps of a job.

    Args:
        path: The directory of the dumps or, if it has those of several jobs, the path of the files
            without the ranks at the end of their names.

    Raises:
        UsageError: There are no dumps, or those of several jobs, or none of them can be read.
    """
    files = _find_files(Path(path))
    dumps, problems = [], {}
    for rank, file in sorted(files.items()):
        try:
            dumps.append(_read_file(rank, file))
        except (OSError, ValueError) as error:
            problems[rank] = f"its dump {file.name} cannot be read: {error}"
    if not dumps:
        raise UsageError(f"no dump in {path} can be read: {next(iter(problems.values()))}")
    return _build_job(path, dumps, problems)


def read_kept(
    job: JobDirectory, wanted: Container[int], problems: list[str]
) -> dict[int, model.Rank]:
    """Return the ranks of a job whose records of PyTorch are in its directory, by pid.

    Args:
        job: The directory of the job.
        wanted: The pids of the processes of its ranks, one of each rank.
        problems: A list to which a description of each unreadable file is appended.
    """
    dumps, clocks, pids = [], {}, {}
    for pid, name in job.list_torch_records().items():
        if pid not in wanted:
            continue
        try:
            head, _, data = job.read(name, _MAX_BYTES).partition(b"\n")
            dump, clock = _parse_kept(json.loads(head), data)
        except FileNotFoundError:  # the job has just ended
            continue
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        clocks[dump.rank], pids[dump.rank] = clock, pid
        dumps.append(dump)
    ranks = _build_ranks(dumps, clocks, ()) if dumps else {}
    return {pids[number]: replace(rank, pid=pids[number]) for number, rank in ranks.items()}


def _parse_kept(head: Any, data: bytes) -> tuple[_Dump, int]:
    """Return a dump and its clock, from the first line of a file, and the rest of it."""
    if head["version"] != VERSION:
        raise ValueError(f"version {head['version']}, expected {VERSION}")
    clock, groups = int(head["clock"]), dict(head["groups"])
    members = {str(name): tuple(map(int, ranks)) for name, ranks in groups.items()}
    dump = _parse(int(head["rank"]), int(head["time"]) + clock, _decode(data), members)
    _add_call(dump, head["call"], members)
    _shift(dump, -clock)
    return dump, clock


def _add_call(dump: _Dump, call: Any, members: Mapping[str, tuple[int, ...]]) -> None:
    """Add what the main thread was in: a message, or the call site of the last collective."""
    if call is None:
        return
    if call["name"] in ("send", "recv"):
        ranks = members.get(call["group"], ())
        peer = ranks.index(call["peer"]) if call["peer"] in ranks else -1
        message = model.Operation(
            dump.total + 1,
            call["name"],
            -1,
            sequence=int(call["tag"]),
            peer=peer,
            site=str(call["site"]),
            begin=dump.written,
            waiting_for=peer,
        )
        dump.operations.append(message)
        dump.groups.append((call["group"], ranks))
        dump.total += 1
    elif dump.operations and not dump.operations[-1].end and "group" not in call["name"]:
        dump.operations[-1] = replace(dump.operations[-1], site=str(call["site"]))


# Files.


def _find_files(path: Path) -> dict[int, Path]:
    directory, wanted = (path, None) if path.is_dir() else (path.parent, path.name)
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): expected dumps") from None
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None or (wanted is not None and match["prefix"] != wanted):
            continue
        rank = int(match["rank"])
        if rank in found[match["prefix"]]:
            both = f"{found[match['prefix']][rank].name} and {name}"
            raise UsageError(f"{directory} has two dumps of rank {rank}, {both}: remove one")
        found[match["prefix"]][rank] = directory / name
    if not found:
        raise UsageError(
            f"there are no dumps in {path}: expected a file of each rank whose name ends with the "
            "rank, as nccl_trace_rank_0 (TORCH_NCCL_DEBUG_INFO_TEMP_FILE is the rest of the name)"
        )
    if len(found) > 1:
        jobs = ", ".join(f"{prefix}N ({len(ranks)} files)" for prefix, ranks in found.items())
        first = directory / next(iter(found))
        raise UsageError(f"{path} has the dumps of several jobs: {jobs}; give one, as {first}")
    (files,) = found.values()
    if (largest := max(files)) >= _MAX_RANKS:
        raise UsageError(f"{files[largest]} is of rank {largest}: at most {_MAX_RANKS} are read")
    return files


def _read_file(rank: int, file: Path) -> _Dump:
    """Read a dump.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no dump.
    """
    status = file.stat()
    if status.st_size > _MAX_BYTES:
        raise ValueError(f"it has {status.st_size} B, and at most {_MAX_BYTES} are read")
    return _parse(rank, status.st_mtime_ns, _decode(file.read_bytes()))


def _decode(data: bytes) -> Mapping[str, Any]:
    if not data:
        raise ValueError("it is empty")
    try:
        is_json = data.startswith(b"{")
        content = json.loads(data) if is_json else _PlainUnpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged pickles raise whatever they lead to
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it is no dump of PyTorch's Flight Recorder: it has no entries")
    version = str(content.get("version"))
    if not re.fullmatch(r"2\.\d+", version):
        raise ValueError(f"its format is {version}, and 2.x is known: use another Phalanx")
    return content


# The content of a dump.


def _parse(
    rank: int,
    written: int,
    content: Mapping[str, Any],
    members: Mapping[str, tuple[int, ...]] | None = None,
) -> _Dump:
    dump = _Dump(rank, written, total=len(content["entries"]))
    members = members or _parse_members(content.get("pg_config"))
    first = max(0, dump.total - HISTORY)
    for number, entry in enumerate(content["entries"][first:], first + 1):
        try:
            operation, name = _parse_entry(number, entry)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(f"its entry {number} is damaged ({error!r})") from None
        group = name, members.get(name, ())
        dump.operations.append(operation)
        dump.groups.append(group)
        if not operation.is_message:
            dump.counts[group] = max(dump.counts.get(group, 0), operation.sequence)
    return dump


def _parse_members(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group by its name; a group of Gloo has none."""
    found = {}
    for name, entry in config.items() if isinstance(config, dict) else ():
        text = entry.get("ranks") if isinstance(entry, dict) else None
        numbers = re.findall(r"\d+", text) if isinstance(text, str) else ()
        ranks = tuple(sorted(int(each) for each in numbers if len(each) < 8))
        if ranks and ranks[-1] < _MAX_RANKS:
            found[str(name)] = ranks
    return found


def _parse_entry(number: int, entry: Any) -> tuple[model.Operation, str]:
    """Return the operation of an entry, and the name of its group."""
    backend, _, text = entry["profiling_name"].partition(":")
    text = text or backend
    message = _MESSAGE.fullmatch(text)
    kind = message[1] if message else _KINDS.get(text, text)
    sizes = entry["output_sizes"] if kind in ("recv", "scatter") else entry["input_sizes"]
    dtypes = entry["output_dtypes"] if kind in ("recv", "scatter") else entry["input_dtypes"]
    is_over = entry["retired"] or entry["state"] == "completed"
    begin = int(entry["time_created_ns"])
    operation = model.Operation(
        number,
        str(kind)[:64],
        -1,
        sequence=0 if message else int(entry["collective_seq_id"]),
        dtype=_DTYPES.get(dtypes[0], str(dtypes[0]).lower()) if dtypes else "",
        count=sum(math.prod(map(int, size)) for size in sizes),
        peer=int(message[2]) if message else -1,
        site=_find_site(entry.get("frames") or ()),
        begin=begin,
        end=int(entry["time_discovered_completed_ns"] or begin) if is_over else 0,
    )
    return operation, str(entry["process_group"][0])


def _find_site(frames: Sequence[Any]) -> str:
    """Return the innermost frame of the program, or of a library other than PyTorch."""
    sites = [f"{frame['filename']}:{int(frame['line'])}" for frame in frames]
    own = [each for each in sites if f"{os.sep}torch{os.sep}" not in each and each[0] != "<"]
    program = (each for each in own if f"{os.sep}site-packages{os.sep}" not in each)
    return next(program, own[0] if own else "")


# The job.


def _build_job(path: str, dumps: Sequence[_Dump], problems: dict[int, str]) -> model.Job:
    for dump, shift in zip(dumps, _find_shifts(dumps), strict=True):
        _shift(dump, shift)
    origin = min((o.begin for dump in dumps for o in dump.operations), default=0) - _MAX_SKEW
    origin = max(0, min([origin, *(dump.written for dump in dumps)]))
    for dump in dumps:
        _shift(dump, -origin)
    ranks = _build_ranks(dumps, {each.rank: origin for each in dumps}, problems)
    last = max(*ranks, *problems, *(n for rank in ranks.values() for n in _list_members(rank)))
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


def _list_members(rank: model.Rank) -> list[int]:
    return [number for group in rank.groups for number in group.members]


def _build_ranks(
    dumps: Sequence[_Dump], clocks: Mapping[int, int], others: Iterable[int]
) -> dict[int, model.Rank]:
    """Return the ranks of dumps whose times are those of one clock.

    Args:
        dumps: The dumps.
        clocks: Unix time minus that clock, in nanoseconds, by rank.
        others: The ranks that are known to have no readable dump.
    """
    members, calls = _collect_members(dumps, others), _collect_calls(dumps)
    return {dump.rank: _build_rank(dump, members, calls, clocks[dump.rank]) for dump in dumps}


def _find_shifts(dumps: Sequence[_Dump]) -> Iterator[int]:
    """Yield what to add to the times of each rank, if the clocks of hosts differ much.

    Ranks enter a collective at about the same time, more often than not.
    """
    first = _index(dumps[0])
    for dump in dumps:
        begins = [
            first[key].begin - each.begin for key, each in _index(dump).items() if key in first
        ]
        shift = sorted(begins)[len(begins) // 2] if begins else dumps[0].written - dump.written
        yield shift if abs(shift) > _MAX_SKEW and _is_steady(begins) else 0


def _is_steady(differences: Sequence[int]) -> bool:
    """Return whether all differences are about the same, as those of clocks are."""
    return len(differences) > 2 and max(differences) - min(differences) < _MAX_SKEW


def _shift(dump: _Dump, time: int) -> None:
    dump.written += time
    dump.operations = [
        replace(each, begin=each.begin + time, end=each.end + time if each.end else 0)
        for each in dump.operations
    ]


def _index(dump: _Dump) -> dict[tuple[Any, int], model.Operation]:
    """Return the collectives of a dump by group and number."""
    pairs = zip(dump.groups, dump.operations, strict=True)
    return {(group, each.sequence): each for group, each in pairs if not each.is_message}


def _collect_members(
    dumps: Sequence[_Dump], problems: Iterable[int]
) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the members of each group, which dumps of Gloo do not have.

    The default group, named 0, has all ranks. Another one has those that used it or, if these wait
    in it and for none of themselves, perhaps any rank.
    """
    everybody = tuple(range(1 + max({*problems, *(dump.rank for dump in dumps)})))
    counts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    waiting = set()
    for dump in dumps:
        for group, count in dump.counts.items():
            counts[group][dump.rank] = count
        pairs = zip(dump.groups, dump.operations, strict=True)
        waiting |= {(group, each.sequence) for group, each in pairs if not each.end}
    found = {}
    for group, users in counts.items():
        last = max(users.values())
        is_unexplained = min(users.values()) == last and (group, last) in waiting
        is_whole = group[0] == _DEFAULT_GROUP or is_unexplained
        found[group] = group[1] or (everybody if is_whole else tuple(sorted(users)))
    return found


@dataclass
class _Calls:
    """The calls of a collective by the ranks of its group.

    Attributes:
        last: The time at which the last rank called it; it cannot have ended before.
        signatures: What all ranks must give alike, as they gave it.
    """

    last: int = 0
    signatures: set[tuple[Any, ...]] = field(default_factory=set)


def _collect_calls(dumps: Sequence[_Dump]) -> dict[tuple[Any, int], _Calls]:
    calls: dict[tuple[Any, int], _Calls] = defaultdict(_Calls)
    for dump in dumps:
        for key, operation in _index(dump).items():
            calls[key].last = max(calls[key].last, operation.begin)
            calls[key].signatures.add(_get_signature(operation))
    return calls


def _get_signature(operation: model.Operation) -> tuple[Any, ...]:
    if operation.kind not in _SAME_INPUTS:
        return (operation.kind,)
    return operation.kind, operation.dtype, operation.count


def _build_rank(
    dump: _Dump,
    members: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]],
    calls: Mapping[tuple[Any, int], _Calls],
    clock: int,
) -> model.Rank:
    groups = {group: index for index, group in enumerate(dict.fromkeys(dump.groups))}
    operations = []
    for group, each in zip(dump.groups, dump.operations, strict=True):
        operation = replace(each, group=groups[group])
        found = None if each.is_message else calls[group, each.sequence]
        if found is not None and len(found.signatures) > 1:
            operation = replace(operation, outcome="mismatch", end=found.last)
        elif found is not None and each.end == each.begin:  # its end was not recorded
            operation = replace(operation, end=found.last)
        operations.append(operation)
    pending = [each for each in operations if not each.end]
    if pending and pending[0].is_message:  # of those under way, the oldest is waited for
        pending[0] = replace(pending[0], waiting_for=pending[0].peer)
    return model.Rank(
        dump.rank,
        clock=clock,
        opened=max(1, min((each.begin for each in operations), default=dump.written)),
        groups=tuple(_build_group(dump, group, members) for group in groups),
        open=tuple(pending),
        history=tuple(each for each in operations if each.end),
        operations=dump.total,
        process=model.Process("unknown"),
    )


def _build_group(
    dump: _Dump,
    group: tuple[str, tuple[int, ...]],
    members: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]],
) -> model.Group:
    ranks = members.get(group, ())
    return model.Group(
        int.from_bytes(sha256(repr(group).encode()).digest()[:8], "big"),
        group[0],
        ranks.index(dump.rank) if dump.rank in ranks else -1,
        len(ranks),
        ranks,
        dump.counts.get(group, 0),
    )
