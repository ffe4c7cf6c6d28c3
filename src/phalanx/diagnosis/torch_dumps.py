"""Dumps of PyTorch's Flight Recorder: the files, and what they say of a rank.

NCCL writes dumps when a collective times out (`TORCH_NCCL_DUMP_ON_TIMEOUT`), PyTorch's debug server
and `_dump_fr_trace` on request. They are pickles or JSON, of the format 2.x that PyTorch has
written since version 2.5. A file from a stranger cannot run code: its pickle may contain plain
values only.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import pickle
import re
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

HISTORY = 256
"""The number of operations of a rank that are read, the newest; fewer of many ranks."""
MAX_BYTES = 1 << 28
"""The size of the largest file that is read."""
PEERS = ("send", "recv")

_MOST_OPERATIONS = 1 << 16
"""The number of operations of all ranks that are read, at most."""
_SHORTEST_HISTORY = 32
_MANY_FILES = 32
"""The number of files from which on they are read by several processes."""
_MAX_RANKS = 1 << 16
_FILE = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?:\.(?:json|pickle|pkl))?", re.DOTALL)
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
_OTHERS = (*PEERS, "join")
_OUTPUTS_COUNT = ("recv", "scatter")
_KINDS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""The names of operations in dumps that differ from those of `torch.distributed`."""
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


class Entry(NamedTuple):
    """An entry of a dump: what `model.Operation` has of it, with times in Unix nanoseconds.

    A large job has hundreds of thousands of them.
    """

    number: int
    kind: str
    group: int
    sequence: int
    dtype: str
    elements: int
    peer: int
    site: str
    begin: int
    end: int
    waiting_for: int = -1

    @property
    def is_collective(self) -> bool:
        """Return whether it is neither a send, a recv nor the formation of a group."""
        return self.kind not in _OTHERS


@dataclass(frozen=True)
class Group:
    """A group of a dump.

    Attributes:
        identity: A number that follows from its name and, if the dump has them, its members; 0 if
            it is still being formed.
        name: PyTorch's name of the group.
        members: Its ranks; empty if the dump does not have them.
        is_assumed: Whether its ranks are not known, and may be only some of `members`.
        left: The time at which this rank left it, in Unix nanoseconds; 0 if it has not.
    """

    identity: int
    name: str
    members: tuple[int, ...]
    is_assumed: bool = False
    left: int = 0


@dataclass
class Dump:
    """The dump of a rank.

    Attributes:
        rank: The number of the rank, by the name of the file.
        written: The time at which the file was written, in Unix nanoseconds.
        entries: Its newest entries, the oldest first.
        groups: The groups of the entries, in the order of their use; an entry has an index of it.
        counts: The number of collectives that the rank has begun in each of these groups.
        total: The number of entries in the dump.
        ended: The time at which the rank ended, if this is its last record; 0 if it is not.
    """

    rank: int
    written: int
    entries: list[Entry] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    total: int = 0
    ended: int = 0

    def find_group(self, name: str, members: Mapping[str, tuple[int, ...]]) -> int:
        """Return the index of a group, which is added with its members if it is new."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        ranks = members.get(name, ())
        digest = sha256(repr((name, ranks)).encode()).digest()
        self.groups.append(Group(int.from_bytes(digest[:8], "big"), name, ranks))
        self.counts.append(0)
        return len(self.groups) - 1

    def list_collectives(self) -> Iterator[tuple[tuple[int, int], Entry]]:
        """Yield the collectives, each with the identity of its group and its number there."""
        identities = [group.identity for group in self.groups]
        for entry in self.entries:
            if entry.is_collective:
                yield (identities[entry.group], entry.sequence), entry


# Files.


def find_files(path: Path) -> dict[int, Path]:
    """Return the files of the dumps by rank, in the order of the ranks."""
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
    return dict(sorted(files.items()))


def start_reading(files: Mapping[int, Path]) -> Iterator[Dump | str]:
    """Start to read files; the results are the dump in each file, or what is wrong with it."""
    cores = len(os.sched_getaffinity(0))
    history = max(_SHORTEST_HISTORY, min(HISTORY, _MOST_OPERATIONS // len(files)))
    # A copy of a process with several threads may wait for locks of threads that it doesn't have.
    if len(files) < _MANY_FILES or cores == 1 or threading.active_count() > 1:
        return map(_read_file, files, files.values(), repeat(history))
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(cores, get_context("fork"), gc.disable)
    found = pool.map(_read_file, files, files.values(), repeat(history), chunksize=8)
    pool.shutdown(wait=False)  # its processes end when all files have been read
    return found


def _read_file(rank: int, file: Path, history: int) -> Dump | str:
    """Return the dump in a file, or what is wrong with the file."""
    try:
        status = file.stat()
        if status.st_size > MAX_BYTES:
            return f"it has {status.st_size} B, and at most {MAX_BYTES} are read"
        return parse_dump(rank, status.st_mtime_ns, decode(file.read_bytes()), history=history)
    except (OSError, ValueError) as error:
        return str(error)


def decode(data: bytes) -> Mapping[str, Any]:
    """Return the content of a dump.

    Raises:
        ValueError: It is no dump.
    """
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


def parse_dump(
    rank: int,
    written: int,
    content: Mapping[str, Any],
    members: Mapping[str, tuple[int, ...]] | None = None,
    history: int = HISTORY,
) -> Dump:
    """Return the dump of a rank.

    Args:
        rank: The rank.
        written: The time up to which the dump is complete, in Unix nanoseconds.
        content: What `decode` returns.
        members: The ranks of each group by its name, if the dump does not have them.
        history: The number of operations that are read. Earlier ones only show how many collectives
            there were in each group.

    Raises:
        ValueError: It is damaged.
    """
    dump = Dump(rank, written, total=len(content["entries"]))
    members = members or _parse_members(content.get("pg_config"))
    first = max(0, dump.total - history)
    try:
        earlier = content["entries"][:first]
        counts = {values["process_group"][0]: values["collective_seq_id"] for values in earlier}
        for name, count in counts.items():
            dump.counts[dump.find_group(str(name), members)] = int(count)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"its first {first} entries are damaged ({error!r})") from None
    for number, values in enumerate(content["entries"][first:], first + 1):
        try:
            group = dump.find_group(str(values["process_group"][0]), members)
            entry = _parse_entry(number, group, values)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ValueError(f"its entry {number} is damaged ({error!r})") from None
        dump.entries.append(entry)
        if entry.is_collective:
            dump.counts[entry.group] = max(dump.counts[entry.group], entry.sequence)
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


def _parse_entry(number: int, group: int, values: Any) -> Entry:
    kind, peer = _parse_name(values["profiling_name"])
    side = "output" if kind in _OUTPUTS_COUNT else "input"
    dtypes = values[f"{side}_dtypes"]
    begin = int(values["time_created_ns"])
    is_over = values["retired"] or values["state"] == "completed"
    return Entry(
        number,
        kind,
        group,
        sequence=0 if kind in PEERS else int(values["collective_seq_id"]),
        dtype=_DTYPES.get(dtypes[0], str(dtypes[0]).lower()) if dtypes else "",
        elements=sum(math.prod(map(int, size)) for size in values[f"{side}_sizes"]),
        peer=peer,
        site=_find_site(values.get("frames") or ()),
        begin=begin,
        end=int(values["time_discovered_completed_ns"] or begin) if is_over else 0,
    )


@lru_cache(4096)
def _parse_name(name: str) -> tuple[str, int]:
    """Return the kind of an operation, and its peer; -1 if it is a collective."""
    text = name.partition(":")[2] or name
    if message := _MESSAGE.fullmatch(text):
        return message[1], int(message[2])
    return sys.intern(_KINDS.get(text, text)[:64]), -1


def _find_site(frames: Sequence[Any]) -> str:
    """Return the innermost frame of the program, or of a library other than PyTorch."""
    library = ""
    for frame in frames:
        file = frame["filename"]
        if _is_own(file):
            if _is_own(file, f"{os.sep}site-packages{os.sep}"):
                return sys.intern(f"{file}:{int(frame['line'])}")
            library = library or f"{file}:{int(frame['line'])}"
    return library


@lru_cache(4096)
def _is_own(file: str, library: str = f"{os.sep}torch{os.sep}") -> bool:
    return library not in file and not file.startswith("<")
