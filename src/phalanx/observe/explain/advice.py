"""Suggested fixes for each kind of diagnosis: concrete steps, the most likely first."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from phalanx.observe.explain.formatting import format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.observe.diagnosis import Diagnosis, Kind, WaitForGraph

__all__ = ["suggest_fixes"]

_STACK = (
    "Print its Python stack: `py-spy dump --pid {pid}` (`pip install py-spy`; `--native` adds the "
    "C++ frames)."
)
_DEADLINE = (
    "If it needs that long, give operations more time: "
    "`phalanx.init(timeout=SECONDS)` or `init_process_group(..., timeout=timedelta(...))`."
)
_BRANCHES = (
    "Check the conditions that lead to these lines: `if rank == ...`, a loop whose length depends "
    "on the data, an exception that only one rank catches. Every rank must call the same "
    "collectives of a group in the same order, with the same dtype, size, root and operator."
)


def suggest_fixes(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    """Return the suggested fixes; empty if nothing is wrong."""
    steps = _STEPS[diagnosis.kind]
    return steps(graph, diagnosis) if callable(steps) else list(steps)


def _format_pid(graph: WaitForGraph, ranks: Sequence[int]) -> str:
    pid = graph.ranks[ranks[0]].pid if ranks else 0
    return str(pid) if pid else "PID"


def _suggest_for_killed(_graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    code = diagnosis.exit_status.code if diagnosis.exit_status is not None else None
    match -code if code is not None else None:
        case signal.SIGKILL:
            return [
                "If nobody sent the signal, the kernel did because memory ran out: look for the "
                "pid in `journalctl -k | grep -i 'killed process'` (or `dmesg`), and check the "
                "memory limit of the container or of the batch job.",
                _MEMORY,
            ]
        case signal.SIGTERM | signal.SIGINT | signal.SIGHUP | signal.SIGXCPU:
            return [
                "Another process terminated it: check the log of the scheduler (a time limit, a "
                "node that is drained), and the programs on this machine that send signals."
            ]
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
            return [
                "It crashed in native code: the Python stack is at the end of the stderr of "
                f"{format_ranks(diagnosis.ranks)} (with PYTHONFAULTHANDLER=1, which `phalanx run` "
                "sets).",
                "For the native stack: `ulimit -c unlimited`, run again, `gdb python core`.",
            ]
    return [
        "Look for the sender of the signal at the end of its output and in `journalctl -k`.",
    ]


def _suggest_for_vanished(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    launch = (
        "Start the job with `phalanx run` or `phalanx.launch`, which record how each rank ends."
    )
    return [*([] if graph.job.launcher else [launch]), *_suggest_for_killed(graph, diagnosis)]


def _suggest_for_failed(_graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    known = [steps for pattern, steps in _KNOWN_ERRORS if pattern.search(diagnosis.reason)]
    return [
        f"The traceback is in the stderr of {format_ranks(diagnosis.ranks)}; "
        "the exceptions of the other ranks follow from it.",
        *(known[0] if known else ()),
    ]


_MEMORY = "Use less memory: a smaller batch, fewer ranks, fewer DataLoader workers."
_KNOWN_ERRORS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (
        re.compile(r"\bDataLoader worker \(pid.*(signal: Killed|exited unexpectedly)"),
        (
            "A worker process of its DataLoader was lost. If nobody sent it SIGKILL, the kernel "
            "did because memory ran out: look for the worker's pid in `journalctl -k | grep -i "
            "'killed process'` (or `dmesg`), and check the memory limit of the container or of "
            "the batch job.",
            "Use fewer workers (`num_workers`), or a smaller batch. With `num_workers=0`, errors "
            "of the dataset are raised in the rank.",
        ),
    ),
    (
        re.compile(r"\bDataLoader worker \(pid"),
        (
            "A worker process of its DataLoader crashed: with `num_workers=0`, the dataset runs in "
            "the rank, and the rank's stderr shows the location.",
        ),
    ),
    (re.compile(r"^MemoryError|\bout of memory\b|can't allocate memory"), (_MEMORY,)),
    (
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        (
            "Some parameters of the model did not contribute to the loss: pass "
            "`find_unused_parameters=True` to DistributedDataParallel, or use all parameters on "
            "every rank.",
        ),
    ),
)


def _suggest_for_launcher(graph: WaitForGraph, _diagnosis: Diagnosis) -> list[str]:
    if not graph.job.launcher_lost:
        return [
            "If you stopped the job, nothing. Otherwise find out which process sent a signal to "
            "the launcher."
        ]
    return [
        "If nobody killed it, the kernel did because memory ran out: look for pid "
        f"{graph.job.launcher} in `journalctl -k | grep -i 'killed process'` (or `dmesg`), and "
        "check the memory limit of the container or of the batch job.",
        "To stop a job, send SIGINT or SIGTERM to its launcher (Ctrl-C, `kill`). The launcher then "
        "stops its ranks and records how they ended.",
    ]


def _suggest_for_stopped(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    pids = " ".join(str(graph.ranks[n].pid) for n in diagnosis.ranks[:16] if graph.ranks[n].pid)
    alive = graph.job.running and pids
    return [
        *([f"Continue it: `kill -CONT {pids}`."] if alive else []),
        "Find the cause of the stop: Ctrl-Z in its terminal, a debugger, a scheduler that suspends "
        "jobs, or `kill -STOP`.",
    ]


def _suggest_for_busy(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    stack = _STACK.format(pid=_format_pid(graph, diagnosis.ranks))
    return [
        *([stack] if graph.job.running else []),
        "Check the code after that line that only this rank runs: an infinite loop, `if rank == "
        "0:` around slow work (a checkpoint, an evaluation, a download), or more data than the "
        "other ranks have.",
        _DEADLINE,
        "`phalanx watch` shows live which rank the others wait for.",
    ]


def _suggest_for_unanswered(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    stack = _STACK.format(pid=_format_pid(graph, diagnosis.ranks))
    return [
        *([stack] if graph.job.running and diagnosis.ranks else []),
        "Check the called function: an infinite loop, a lock, or a remote call without a timeout. "
        "A function that trains for the whole job is fine.",
        "Set a timeout, so that the caller can continue: `rpc_sync(..., timeout=SECONDS)`, or "
        "`rpc_timeout` in `rpc_backend_options`.",
    ]


_NEW_GROUP = (
    "If the group has only some of the ranks: every rank of the job must call `new_group`, in the "
    "same order."
)
_STORE_HOST = (
    "Rank 0 may be running: it hosts the store, and leaves no trace until all other ranks have "
    "connected to it."
)


def _suggest_for_missing(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    if all(side.operation is not None for side in diagnosis.sides):
        return [_NEW_GROUP, _BRANCHES]
    verb = "was" if len(diagnosis.ranks) == 1 else "were"
    output = "its output" if len(diagnosis.ranks) == 1 else "their output"
    alive = [n for n in diagnosis.ranks if graph.exits[n].reason == "alive" and graph.ranks[n].pid]
    is_host_absent = (
        0 in diagnosis.ranks and len(diagnosis.ranks) > 1 and graph.exits[0].reason == "absent"
    )
    return [
        *([_STACK.format(pid=graph.ranks[alive[0]].pid)] if alive else []),
        f"Check that {format_ranks(diagnosis.ranks)} {verb} started, and look at {output}: "
        "every process needs its own RANK and the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT. "
        "`phalanx run` sets them.",
        *([_STORE_HOST] if is_host_absent else []),
        _NEW_GROUP,
    ]


def _suggest_for_finished(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    early = not any(graph.ranks[number].opened for number in diagnosis.ranks)
    return _suggest_for_missing(graph, diagnosis) if early else list(_FINISHED)


_FINISHED = (
    "The other ranks call more operations than it does: uneven data (`drop_last=True`, or a "
    "DistributedSampler, gives every rank as many batches), or an early `return`, `break` or "
    "`sys.exit` on one rank.",
    "`phalanx trace` shows where the ranks diverge.",
)
_UNSENT = (
    "Every recv needs a send on the other rank, with the same group, tag, dtype and size. Check "
    "the operation that the other rank calls instead.",
    "If both ranks wait, use `isend` and `irecv`, or `batch_isend_irecv`, and wait afterwards.",
)

_STEPS: dict[Kind, Sequence[str] | Callable[[WaitForGraph, Diagnosis], list[str]]] = {
    "killed": _suggest_for_killed,
    "exited": ("Look at the end of its output, and for `sys.exit` and `os._exit` in its code.",),
    "failed": _suggest_for_failed,
    "vanished": _suggest_for_vanished,
    "stopped": _suggest_for_stopped,
    "busy": _suggest_for_busy,
    "late": (
        _DEADLINE,
        "Or run the slow part on all ranks at the same time, so that no rank waits.",
        "`phalanx trace` shows the durations on every rank.",
    ),
    "stuck": _suggest_for_busy,
    "branch": (_BRANCHES, "`phalanx trace` shows the earlier operations of each rank."),
    "message": ("Use the same dtype and number of elements for send and recv.",),
    "finished": _suggest_for_finished,
    "unsent": _UNSENT,
    "unreceived": _UNSENT,
    "unawaited": (
        "Wait for the work that `isend` and `irecv` return before the script ends or leaves the "
        "group: `work = dist.isend(...)`, later `work.wait()`. Until then the transfer is not "
        "complete.",
    ),
    "unanswered": _suggest_for_unanswered,
    "missing": _suggest_for_missing,
    "order": (
        "Use groups in the same order on every rank, or start the operations with `async_op=True` "
        "and wait for all of them afterwards.",
    ),
    "deadlock": (
        "Let one side go first, or use `isend` and `irecv` (`batch_isend_irecv`) and wait after "
        "both are posted.",
        _BRANCHES,
    ),
    "aborted": ("Look at the output of the rank that aborted the group.",),
    "interrupted": ("If you pressed Ctrl-C, nothing.",),
    "system": (
        "Free memory, or raise the limit that was hit (`ulimit -a`, the container's memory); fewer "
        "ranks or groups need less.",
    ),
    "other_host": (
        "Run `phalanx explain` on the host of these ranks: their flight recorders are in a "
        "directory there.",
    ),
    "unreadable": (
        "Look at that rank's output. If it runs another version of Phalanx, install the same "
        "version everywhere.",
    ),
    "launcher": _suggest_for_launcher,
    "running": (),
    "ended": (),
    "unknown": (
        "`phalanx jobs` lists all jobs.",
        "Look at the output of the ranks.",
    ),
}
