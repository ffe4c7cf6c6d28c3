"""The records of groups on other backends: PyTorch's Flight Recorder, kept in the job's directory.

A thread of each rank of `phalanx run` and `phalanx.launch`, and of each rank whose CUDA tensors go
from a group of Phalanx to NCCL, glances at the main thread four times a second, and more often at
first. It writes PyTorch's record of the collectives to a file every two seconds, when the main
thread has come to wait in a call of torch.distributed or waits no more, and when the process exits.
That takes at most a hundredth of the time, as long as a record takes less than 40 ms. The file
outlives the process, and its time is that of the last look. `diagnosis.torch_jobs` reads it.

The call of the main thread says what PyTorch's record lacks: where a pending operation was called,
what a send or recv on Gloo waits for, and which group is being formed. The stacks in PyTorch's own
record are left out, since the first of them takes seconds. No glance is possible while the main
thread keeps the interpreter's lock, as in a long call of a C extension.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import pickle
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.recorder.job_directory import JobDirectory, get_torch_record_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

VERSION = 3
"""The version of the first line of the file."""

_GLANCE_SECONDS = 0.25
_RECORD_SECONDS = 2.0
"""The time between two glances, and between two records of a rank that does not wait."""
_SPARING = 100
_LONGEST_PAUSE = 4.0
"""No record is made for so many times as long as the last one took, but for at most so long."""
_FIRST_GLANCE_SECONDS = 0.025
_FIRST_SECONDS = 2.0
"""The time between two glances in the first seconds of the first group: many faults are there."""
_WAIT_SECONDS = 0.1
"""The time for which the main thread must have been in a call to count as waiting there."""
JOINS = ("init_process_group", "new_group")
"""The functions in which a rank waits until others form a group with it."""

_log = logging.getLogger("phalanx")
_DEFAULT_GROUP = "0"
_C10D = os.path.join("distributed", "distributed_c10d.py")
_PEERS = {"send": "dst", "recv": "src"}
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}

_Position = tuple[int, int, int]
"""The frame of a call, the instruction there, and the number of its group's collectives."""

_started = 0
"""The process whose thread has been started: not one that is a copy of it."""
_hidden_groups: dict[str, list[int]] = {}
"""The ranks of the groups that are not in PyTorch's tables, by name."""


def start() -> None:
    """Start the thread, if that has not been done.

    Called at `import torch` in a rank of a launcher of Phalanx.
    """
    global _started  # noqa: PLW0603
    if _started == os.getpid():
        return
    _started = os.getpid()
    recorder = _TorchRecorder()
    # Exit handlers run in the reverse order: those of torch and of the program run before this one.
    atexit.register(recorder.finish)
    threading.Thread(target=recorder.run, name="phalanx-torch-recorder", daemon=True).start()


def add_group(name: str, ranks: Sequence[int]) -> None:
    """Keep the records of a group that is not in PyTorch's tables: NCCL's in a group of Phalanx.

    Args:
        name: The name of the group in PyTorch's record.
        ranks: Its ranks, by their numbers in the job.
    """
    _hidden_groups[name] = [*ranks]
    start()


def remove_group(name: str) -> None:
    """Note that this process has left a group that `add_group` has added."""
    _hidden_groups.pop(name, None)


class _TorchRecorder:
    """The writer of the file of this rank."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Whoever glances has it: this thread or, at exit, the main thread.
        self._lock = threading.Lock()
        self._is_over = False
        self._directory: JobDirectory | None = None
        self._rank = -1
        self._groups: dict[str, list[int]] = {}
        """The ranks of each group that this process has been in, by name."""
        self._left: dict[str, int] = {}
        """The times at which it left groups, in monotonic nanoseconds."""
        self._position: _Position | None = None
        """The position in the last call that was seen."""
        self._position_since = 0.0
        self._kept_position: _Position | None = None
        self._kept_call: dict[str, Any] | None = None
        """The call in which the main thread waits and waited when the file was written, if any."""
        self._earliest = 0.0
        self._next_record = 0.0
        self._written: tuple[Any, ...] = ()

    def run(self) -> None:
        """Glance until the process ends, or the file cannot be written."""
        first_end = math.inf
        while not self._is_over:
            is_first = time.monotonic() < first_end
            time.sleep(_FIRST_GLANCE_SECONDS if is_first else _GLANCE_SECONDS)
            if self._groups and first_end == math.inf:
                first_end = time.monotonic() + _FIRST_SECONDS
            with self._lock:
                self._glance(sys._current_frames().get(threading.main_thread().ident or 0))

    def finish(self) -> None:
        """Write what has happened since the last record; called at exit."""
        if os.getpid() != self._pid:  # a copy of the process by os.fork has no such thread
            return
        with self._lock:
            # The exception that ends the process has left the call, but its traceback has it.
            traceback = getattr(sys, "last_traceback", None)
            while traceback is not None and traceback.tb_next is not None:
                traceback = traceback.tb_next
            self._glance(None if traceback is None else traceback.tb_frame, is_last=True)
            self._is_over = True

    def _glance(self, frame: FrameType | None, *, is_last: bool = False) -> None:
        """Look at where the main thread is, from its innermost frame, and record what is due."""
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        # While torch is being imported, the module may lack the function.
        is_initialized = None if c10d is None else vars(c10d).get("is_initialized")
        if self._is_over or is_initialized is None:
            return
        try:
            call, position = find_call(frame)
            if is_initialized() or self._groups:
                self._update_groups()
            now = time.monotonic()
            if position is None or position != self._position:
                self._position, self._position_since = position, now
            if is_last:
                self._record_last(call)
                return
            if position != self._kept_position:
                self._kept_call = None
            # Groups of Phalanx have a recorder of their own: they have no ranks here.
            if self._groups or self._written or (call is not None and call.get("ranks")):
                is_waiting = position is not None and now - self._position_since >= _WAIT_SECONDS
                self._record_due(*((call, position) if is_waiting else (None, None)))
        except ValueError:  # the default group has been destroyed meanwhile
            return
        except OSError as error:  # a full disk, or the directory was removed
            _log.warning("phalanx: PyTorch's records are not kept: %s", error)
            self._is_over = True

    def _update_groups(self) -> None:
        """Look which groups there are; if that has changed, a record is due."""
        from phalanx import torch_versions  # torch has been imported by now

        present = {**torch_versions.foreign_groups(), **_hidden_groups}
        new = {name: ranks for name, ranks in present.items() if self._groups.get(name) != ranks}
        gone = self._groups.keys() - present.keys() - self._left.keys()
        for name in new:
            self._left.pop(name, None)
        self._groups.update(new)
        self._left.update(dict.fromkeys(gone, time.monotonic_ns()))
        if new or gone:
            self._next_record = min(self._next_record, self._earliest)

    def _record_due(self, call: dict[str, Any] | None, position: _Position | None) -> None:
        """Write a record if one is due, given the call in which the main thread waits, if any.

        Raises:
            OSError: The file cannot be written.
        """
        now, begin = time.monotonic(), time.thread_time()
        is_other_wait = position != self._kept_position and now >= self._earliest
        if is_other_wait or ((self._groups or self._written) and now >= self._next_record):
            self._kept_position, self._kept_call = position, call
            self._record(call)
            pause = min(_SPARING * (time.thread_time() - begin), _LONGEST_PAUSE)
            self._earliest = now + pause
            self._next_record = now + max(pause, _RECORD_SECONDS)
        elif position is not None and position == self._kept_position and self._directory:
            self._directory.touch(get_torch_record_name(self._pid))

    def _record_last(self, call: dict[str, Any] | None) -> None:
        """Write what there is when the process ends, and the exception that ends it, if any.

        Raises:
            OSError: The file cannot be written.
        """
        from phalanx.recorder.exception_hook import format_exception

        error = getattr(sys, "last_value", None)
        if call is None and isinstance(error, KeyboardInterrupt):
            call = self._kept_call  # it was raised at some point after the call had failed
        is_known = self._groups or self._written or (call is not None and call.get("ranks"))
        if is_known or self._find_default_group():
            text = "" if error is None else format_exception(error)
            self._record(call, is_last=True, exception=text)

    def _find_default_group(self) -> bool:
        """Return whether the rank was in a group that no glance has seen, and add that group."""
        dump = _dump()
        entries = pickle.loads(dump)["entries"] if dump else ()
        is_used = any(entry["process_group"][0] == _DEFAULT_GROUP for entry in entries)
        directory = self._open() if is_used else None
        if directory is None or self._pid in directory.list_recorders():  # a group of Phalanx
            return False
        self._groups[_DEFAULT_GROUP] = [*range(env.integer("WORLD_SIZE", minimum=1) or 1)]
        self._left[_DEFAULT_GROUP] = time.monotonic_ns()
        return True

    def _record(
        self, call: dict[str, Any] | None, *, is_last: bool = False, exception: str = ""
    ) -> None:
        """Write what there is; if nothing has changed, only the time of the file is new.

        Raises:
            OSError: The file cannot be written.
        """
        dump = _dump()
        found = {**self._groups}, {**self._left}, dump, call, is_last
        if (directory := self._open()) is None:
            return
        if found == self._written:
            directory.touch(get_torch_record_name(self._pid))
            return
        head = {
            "version": VERSION,
            "rank": self._rank,
            "clock": time.time_ns() - time.monotonic_ns(),
            "time": time.monotonic_ns(),
            "host": os.uname().nodename,
            "groups": self._groups,
            "left": self._left,
            "call": call,
            "is_last": is_last,
            "exception": exception,
        }
        content = json.dumps(head).encode() + b"\n" + dump
        directory.replace(get_torch_record_name(self._pid), content)
        self._written = found

    def _open(self) -> JobDirectory | None:
        """Return the directory of the job; None if this process is no rank of a job."""
        if self._directory is None:
            try:
                job, rank, base = env.job(), env.integer("RANK", minimum=0), env.jobs_directory()
            except ValueError:  # malformed: the first group of Phalanx says so
                job = rank = base = None
            if job in (None, env.NO_JOB) or rank is None or base is None:
                return self._open_without_launcher()
            directory = JobDirectory(base, str(job))
            directory.lock_shared()
            self._directory, self._rank = directory, rank
        return self._directory

    def _open_without_launcher(self) -> JobDirectory | None:
        """Return the directory of a job whose ranks have agreed on it when they formed a group."""
        import torch.distributed as dist

        from phalanx.recorder.flight_recorder import get_job_directory

        self._directory = get_job_directory() if _hidden_groups else None
        if self._directory is None:
            self._is_over = True
        else:
            self._rank = dist.get_rank()
        return self._directory


def _dump() -> bytes:
    """Return PyTorch's records as one pickle, the earliest collective first."""
    from phalanx import torch_versions

    dumps = torch_versions.dump_flight_recorders()
    if len(dumps) < 2:
        return dumps[0] if dumps else b""
    contents: list[dict[str, Any]] = [pickle.loads(dump) for dump in dumps]
    entries = [entry for content in contents for entry in content["entries"]]
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    return pickle.dumps({**contents[0], "entries": entries})


def find_call(frame: FrameType | None) -> tuple[dict[str, Any] | None, _Position | None]:
    """Return the function of torch.distributed that a thread is in; None if it is in none.

    Args:
        frame: The innermost frame of the thread.

    Returns:
        The `name` of the function and its call `site`; of a send or recv its `peer`, a rank in the
        job, -1 for any, its `tag` and the name of its `group`; of a collective with a root this
        `peer` and `group`; of a function that forms a group the name of this `group` and the
        `ranks` that must come. And the position of the thread in the
        function, which is the same as long as the thread waits there.
    """
    call, torch = None, os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "")
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch + _C10D:
            call = frame
        elif call is not None and not code.co_filename.startswith(torch):
            if not _is_recorded_here(call):
                return None, None
            site = f"{code.co_filename}:{frame.f_lineno}"
            position = id(call), call.f_lasti, _count_collectives(call)
            return {"name": call.f_code.co_name, "site": site, **_describe_call(call)}, position
        frame = frame.f_back
    return None, None


def _is_recorded_here(call: FrameType) -> bool:
    """Return whether a call is on a group of another backend, or may form one."""
    from phalanx import torch_versions

    return call.f_code.co_name in JOINS or torch_versions.is_foreign(call.f_locals.get("group"))


def _count_collectives(call: FrameType) -> int:
    """Return a number that differs for the next call in a loop, whose frame may be the same."""
    from phalanx import torch_versions

    return torch_versions.collective_count(call.f_locals.get("group"))


def _describe_call(call: FrameType) -> dict[str, Any]:
    """Return what the arguments of a function say that PyTorch's record does not."""
    name, values = call.f_code.co_name, call.f_locals
    argument = _PEERS.get(name) or _ROOTS.get(name)
    if name not in JOINS and argument is None:
        return {}
    from phalanx import torch_versions

    if argument is None:
        group_name, ranks = torch_versions.describe_new_group(values)
        return {"group": group_name, "ranks": ranks}
    group = values.get("group")
    peer, place = values.get(argument), values.get(f"group_{argument}")
    if peer is None and place is not None:
        peer = torch_versions.global_rank(group, place)
    return {
        "peer": peer if isinstance(peer, int) else -1,
        "tag": values.get("tag") or 0,
        "group": torch_versions.group_name(group),
    }
