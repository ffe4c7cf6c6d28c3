"""The records of groups on other backends: PyTorch's Flight Recorder, kept in the job's directory.

A thread of each rank of `phalanx run` and `phalanx.launch` looks every two seconds at PyTorch's
record of its collectives, and at where the main thread is, and writes both to a file if they have
changed. The file outlives the process. `torch_dumps` reads it.

The call of the main thread says what PyTorch's record lacks: where a pending operation was called,
and what a send or recv on Gloo waits for. The stacks in PyTorch's own record are left out, since
the first of them takes seconds. No look is possible while the main thread keeps the interpreter's
lock, as in a long call of a C extension.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.observe.job_directory import JobDirectory, get_torch_record_name

if TYPE_CHECKING:
    from types import FrameType

VERSION = 1
"""The version of the first line of the file."""

_SECONDS = 2.0
"""The time between two looks, in seconds."""
_log = logging.getLogger("phalanx")
_C10D = os.path.join("distributed", "distributed_c10d.py")
_PEERS = {"send": "dst", "recv": "src"}


def start() -> None:
    """Start the thread, in a rank of a launcher of Phalanx; called at `import torch`."""
    threading.Thread(target=_run, name="phalanx-torch-recorder", daemon=True).start()


def _run() -> None:
    writer = None
    while True:
        time.sleep(_SECONDS)
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        # While torch is being imported, the module may lack the function.
        is_initialized = None if c10d is None else vars(c10d).get("is_initialized")
        if is_initialized is None or not is_initialized():
            continue
        try:
            writer = writer or _open()
            if writer is None:
                return
            writer.look()
        except ValueError:  # the default group has been destroyed meanwhile
            continue
        except OSError as error:  # a full disk, or the directory was removed
            _log.warning("phalanx: PyTorch's records are not kept: %s", error)
            return


def _open() -> _Writer | None:
    """Return the writer of this process; None if it is no rank of a job."""
    try:
        job, rank, base = env.job(), env.integer("RANK", minimum=0), env.jobs_directory()
    except ValueError:  # malformed: the first group of Phalanx says so
        return None
    if job in (None, env.NO_JOB) or rank is None:
        return None
    directory = JobDirectory(base, str(job))
    directory.lock_shared()
    return _Writer(directory, rank)


class _Writer:
    """The writer of the file of this rank.

    Args:
        directory: The directory of the job.
        rank: The rank in the job.
    """

    def __init__(self, directory: JobDirectory, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._written: tuple[Any, ...] = ()

    def look(self) -> None:
        """Write what has changed since the last look.

        Raises:
            OSError: The file cannot be written.
        """
        from phalanx import torch_versions  # torch has been imported by now

        groups = torch_versions.foreign_groups()
        dump = torch_versions.dump_flight_recorder() if groups else b""
        found = (
            groups,
            dump,
            find_call(sys._current_frames().get(threading.main_thread().ident or 0)),
        )
        if not groups or found == self._written:
            return
        head = {
            "version": VERSION,
            "rank": self._rank,
            "clock": time.time_ns() - time.monotonic_ns(),
            "time": time.monotonic_ns(),
            "host": os.uname().nodename,
            "groups": groups,
            "call": found[2],
        }
        content = json.dumps(head).encode() + b"\n" + dump
        self._directory.replace(get_torch_record_name(os.getpid()), content)
        self._written = found


def find_call(frame: FrameType | None) -> dict[str, Any] | None:
    """Return the function of torch.distributed that a thread is in; None if it is in none.

    Args:
        frame: The innermost frame of the thread.

    Returns:
        The `name` of the function and its call `site`; of a send or recv its `peer`, a rank in the
        job, -1 for any, its `tag` and the name of its `group`.
    """
    call, torch = None, os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "")
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch + _C10D:
            call = frame
        elif call is not None and not code.co_filename.startswith(torch):
            site = f"{code.co_filename}:{frame.f_lineno}"
            return {"name": call.f_code.co_name, "site": site, **_describe_message(call)}
        frame = frame.f_back
    return None


def _describe_message(call: FrameType) -> dict[str, Any]:
    name, values = call.f_code.co_name, call.f_locals
    if name not in _PEERS:
        return {}
    from phalanx import torch_versions

    group = values.get("group")
    peer, place = values.get(_PEERS[name]), values.get(f"group_{_PEERS[name]}")
    if peer is None and place is not None:
        peer = torch_versions.global_rank(group, place)
    return {
        "peer": peer if isinstance(peer, int) else -1,
        "tag": values.get("tag") or 0,
        "group": torch_versions.group_name(group),
    }
