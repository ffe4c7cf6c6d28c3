"""Reading the pending remote calls of workers; `phalanx.rpc.call_log` writes them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container

    from phalanx.observe.job_directory import JobDirectory

__all__ = ["VERSION", "Call", "Worker", "read_workers"]

VERSION = 1
"""The version of the format of these files."""
_FILE = re.compile(r"([1-9][0-9]{0,9})\.calls", re.ASCII)
_LIMIT = 2**22


@dataclass(frozen=True)
class Call:
    """A remote call that has been pending for a long time, as its caller or callee recorded it.

    Attributes:
        number: The number of the call, unique among the calls of its caller.
        peer: The id of the other worker: the callee in a caller's record, else the caller.
        function: The name of the function; empty in a callee's record.
        since: The time at which the call or its execution began, in monotonic nanoseconds.
    """

    number: int
    peer: int
    function: str
    since: int


@dataclass(frozen=True)
class Worker:
    """An RPC worker: its process, id and name, and the calls that it has made and executes."""

    pid: int
    id: int
    name: str
    made: tuple[Call, ...]
    executed: tuple[Call, ...]


def read_workers(
    job: JobDirectory, pids: Container[int], problems: list[str]
) -> tuple[Worker, ...]:
    """Return the workers of a job, sorted by id.

    Args:
        job: The directory of the job.
        pids: The processes to include: those of the newest attempt.
        problems: A list to which a description of each unreadable file is appended.
    """
    found = []
    for match in filter(None, map(_FILE.fullmatch, os.listdir(job.fd))):
        if int(match[1]) not in pids:
            continue
        try:
            found.append(_parse_worker(int(match[1]), json.loads(job.read(match[0], _LIMIT))))
        except FileNotFoundError:
            continue  # the worker has left
        except OSError as error:
            problems.append(str(error))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problems.append(f"{match[0]} is damaged: {error!r}")
    return tuple(sorted(found, key=lambda worker: (worker.id, worker.pid)))


def _parse_worker(pid: int, content: Any) -> Worker:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, expected {VERSION}")
    made = tuple(
        Call(int(call["call"]), int(call["to"]), str(call["function"]), int(call["since"]))
        for call in content["made"]
    )
    executed = tuple(
        Call(int(call["call"]), int(call["of"]), "", int(call["since"]))
        for call in content["executed"]
    )
    return Worker(pid, int(content["id"]), str(content["name"]), made, executed)
