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
    "See where it is: `py-spy dump --pid {pid}` prints its Python stack (`pip install py-spy`; "
    "`--native` adds the C++ part)."
)
_DEADLINE = (
    "If it needs that long, give operations more time: "
    "`phalanx.init(timeout=SECONDS)` or `init_process_group(..., timeout=timedelta(...))`."
)
_BRANCHES = (
    "Look at the conditions on the way to these lines: `if rank == ...`, a loop whose length "
    "depends on the data, an exception that one rank catches. Every rank must call the same "
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
    who = f"of {format_ranks(diagnosis.ranks)}"
    match -code if code is not None else None:
        case signal.SIGKILL:
            return [
                "If nobody sent it, the kernel did, when memory ran out: look for the pid in "
                "`journalctl -k | grep -i 'killed process'` (or `dmesg`), and at the memory limit "
                "of the container or of the batch job.",
                _MEMORY,
            ]
        case signal.SIGTERM | signal.SIGINT | signal.SIGHUP | signal.SIGXCPU:
            return [
                "Somebody asked it to end: look at the log of the scheduler (a time limit, a node "
                "that is drained) and at what else runs kill on this machine."
            ]
        case signal.SIGSEGV | signal.SIGBUS | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
            return [
                f"It crashed in native code: the end of the stderr {who} shows where Python was "
                "(PYTHONFAULTHANDLER=1 makes it so; `phalanx run` sets that).",
                "For the native stack: `ulimit -c unlimited`, run again, `gdb python core`.",
            ]
    return ["Look at the end of its output, and in `journalctl -k`, for who sent the signal."]


def _suggest_for_vanished(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    start = "Start the job with `phalanx run` or `phalanx.launch`: they note how each rank ends."
    return [*([] if graph.job.launcher else [start]), *_suggest_for_killed(graph, diagnosis)]


def _suggest_for_failed(_graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    known = [steps for words, steps in _KNOWN_ERRORS if words.search(diagnosis.reason)]
    return [
        f"The traceback is in the stderr of {format_ranks(diagnosis.ranks)}; "
        "what the other ranks raised follows from it.",
        *(known[0] if known else ()),
    ]


_MEMORY = "Use less memory: a smaller batch, fewer ranks, fewer DataLoader workers."
_KNOWN_ERRORS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (
        re.compile(r"\bDataLoader worker \(pid.*(signal: Killed|exited unexpectedly)"),
        (
            "A worker process of its DataLoader was lost. If nobody sent it SIGKILL, the kernel "
            "did, when memory ran out: look for the worker's pid in "
            "`journalctl -k | grep -i 'killed process'` (or `dmesg`), and at the memory limit of "
            "the container or of the batch job.",
            "Use fewer workers (`num_workers`), or a smaller batch; with `num_workers=0` the "
            "dataset's own errors show in the rank.",
        ),
    ),
    (
        re.compile(r"\bDataLoader worker \(pid"),
        (
            "A worker process of its DataLoader crashed: with `num_workers=0` the dataset runs in "
            "the rank, whose stderr shows where.",
        ),
    ),
    (re.compile(r"^MemoryError|\bout of memory\b|can't allocate memory"), (_MEMORY,)),
    (
        re.compile(r"Expected to have finished reduction in the prior iteration"),
        (
            "Parameters of the model took no part in the loss: give DistributedDataParallel "
            "`find_unused_parameters=True`, or use all of them on every rank.",
        ),
    ),
)


def _suggest_for_launcher(graph: WaitForGraph, _diagnosis: Diagnosis) -> list[str]:
    if not graph.job.launcher_lost:
        return ["Nothing, if you stopped it. Else look at who sent the launcher a signal."]
    return [
        f"If nobody killed it, the kernel did, when memory ran out: look for pid "
        f"{graph.job.launcher} in `journalctl -k | grep -i 'killed process'` (or `dmesg`), and at "
        "the memory limit of the container or of the batch job.",
        "To stop a job send its launcher SIGINT or SIGTERM (Ctrl-C, `kill`): it then ends its "
        "ranks in order and notes how they ended.",
    ]


def _suggest_for_stopped(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    pids = " ".join(str(graph.ranks[n].pid) for n in diagnosis.ranks[:16] if graph.ranks[n].pid)
    alive = graph.job.running and pids
    return [
        *([f"Continue it: `kill -CONT {pids}`."] if alive else []),
        "Find out who stops it: Ctrl-Z in its terminal, a debugger, a scheduler that suspends "
        "jobs, `kill -STOP`.",
    ]


def _suggest_for_busy(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    stack = _STACK.format(pid=_format_pid(graph, diagnosis.ranks))
    return [
        *([stack] if graph.job.running else []),
        "Look at what it does after that line on this rank alone: a loop that doesn't end, "
        "`if rank == 0:` around slow work (a checkpoint, an evaluation, a download), more data "
        "than the others have.",
        _DEADLINE,
        "`phalanx watch` shows who is waited for, step by step.",
    ]


def _suggest_for_unanswered(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    stack = _STACK.format(pid=_format_pid(graph, diagnosis.ranks))
    return [
        *([stack] if graph.job.running and diagnosis.ranks else []),
        "Look at what the called function does there: a loop that doesn't end, a lock, a call of "
        "its own without a timeout. A function that trains as long as the job lasts is fine.",
        "A timeout lets the caller go on: `rpc_sync(..., timeout=SECONDS)`, or `rpc_timeout` in "
        "`rpc_backend_options`.",
    ]


_NEW_GROUP = "Groups of some ranks: every rank of the job must call `new_group`, in the same order."
_HOSTS_STORE = (
    "If rank 0 runs: it hosts the store, and leaves no trace until all the others have come to it."
)


def _suggest_for_missing(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    if all(side.operation is not None for side in diagnosis.sides):
        return [_NEW_GROUP, _BRANCHES]
    were = "was" if len(diagnosis.ranks) == 1 else "were"
    output = "its output" if len(diagnosis.ranks) == 1 else "their output"
    alive = [n for n in diagnosis.ranks if graph.exits[n].reason == "alive" and graph.ranks[n].pid]
    waits = 0 in diagnosis.ranks and len(diagnosis.ranks) > 1 and graph.exits[0].reason == "absent"
    return [
        *([_STACK.format(pid=graph.ranks[alive[0]].pid)] if alive else []),
        f"Check that {format_ranks(diagnosis.ranks)} {were} started, and look at {output}: "
        "every process needs a RANK of its own and the same WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT. "
        "`phalanx run` sets them.",
        *([_HOSTS_STORE] if waits else []),
        _NEW_GROUP,
    ]


def _suggest_for_finished(graph: WaitForGraph, diagnosis: Diagnosis) -> list[str]:
    early = not any(graph.ranks[number].opened for number in diagnosis.ranks)
    return _suggest_for_missing(graph, diagnosis) if early else list(_FINISHED)


_FINISHED = (
    "The others call more operations than it does: uneven data (`drop_last=True`, or a "
    "DistributedSampler, gives every rank as many batches), or an early `return`, `break` or "
    "`sys.exit` on one rank.",
    "`phalanx trace` shows where its way and theirs part.",
)
_UNSENT = (
    "Every recv needs a send on the other rank: same group, same tag, same dtype and size. Look at "
    "what that rank calls instead.",
    "Where both sides wait, use `isend` and `irecv`, or `batch_isend_irecv`, and wait afterwards.",
)

_STEPS: dict[Kind, Sequence[str] | Callable[[WaitForGraph, Diagnosis], list[str]]] = {
    "killed": _suggest_for_killed,
    "exited": (
        "Look at the end of its output, and for `sys.exit` and `os._exit` in what it runs.",
    ),
    "failed": _suggest_for_failed,
    "vanished": _suggest_for_vanished,
    "stopped": _suggest_for_stopped,
    "busy": _suggest_for_busy,
    "late": (
        _DEADLINE,
        "Or let all ranks do the slow part at the same time, so that none waits.",
        "`phalanx trace` shows how long each rank took for what.",
    ),
    "stuck": _suggest_for_busy,
    "branch": (_BRANCHES, "`phalanx trace` shows what each rank called before."),
    "message": ("Give send and recv the same dtype and as many elements.",),
    "finished": _suggest_for_finished,
    "unsent": _UNSENT,
    "unreceived": _UNSENT,
    "unawaited": (
        "Wait for what `isend` and `irecv` return before the script ends or leaves the group: "
        "`work = dist.isend(...)`, later `work.wait()`. Until then the transfer is not complete.",
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
    "aborted": ("Look at the output of the rank that aborted: it knows why.",),
    "interrupted": ("Nothing, if you pressed Ctrl-C.",),
    "system": (
        "Free memory, or raise the limit that was hit (`ulimit -a`, the container's memory); fewer "
        "ranks or groups need less.",
    ),
    "elsewhere": (
        "`phalanx explain` on the host of these ranks knows what they did: their flight recorders are "
        "in a directory there.",
    ),
    "unreadable": (
        "Look at that rank's output. If it runs another version of Phalanx, install the same "
        "everywhere.",
    ),
    "launcher": _suggest_for_launcher,
    "running": (),
    "ended": (),
    "unknown": (
        "`phalanx jobs` says which jobs there are, and in which directory.",
        "Look at the output of the ranks.",
    ),
}
