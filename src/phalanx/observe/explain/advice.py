"""What to try, for each kind of verdict: concrete steps, the likeliest first."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from phalanx.observe.explain.words import collapsed, named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.observe.culprit import Kind, Scene, Verdict

__all__ = ["advice"]

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


def advice(scene: Scene, verdict: Verdict) -> list[str]:
    """What a user may try next; empty where nothing is wrong."""
    steps = _STEPS[verdict.kind]
    return steps(scene, verdict) if callable(steps) else list(steps)


def _pid(scene: Scene, ranks: Sequence[int]) -> str:
    pid = scene.ranks[ranks[0]].pid if ranks else 0
    return str(pid) if pid else "PID"


def _killed(_scene: Scene, verdict: Verdict) -> list[str]:
    code = verdict.end.code if verdict.end is not None else None
    who = f"of {named(verdict.ranks)}"
    match -code if code is not None else None:
        case signal.SIGKILL:
            return [
                "If nobody sent it, the kernel did, when memory ran out: look for the pid in "
                "`journalctl -k | grep -i 'killed process'` (or `dmesg`), and at the memory limit "
                "of the container or of the batch job.",
                "Then use less memory: a smaller batch, fewer ranks, fewer DataLoader workers.",
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


def _vanished(scene: Scene, verdict: Verdict) -> list[str]:
    return [
        "Start the job with `phalanx run` or `phalanx.launch`: they note how each rank ends.",
        *_killed(scene, verdict),
    ]


def _failed(_scene: Scene, verdict: Verdict) -> list[str]:
    return [
        f"The traceback is in the stderr of {named(verdict.ranks)}; what the other ranks raised "
        "follows from it."
    ]


def _stopped(scene: Scene, verdict: Verdict) -> list[str]:
    pids = " ".join(str(scene.ranks[n].pid) for n in verdict.ranks[:16] if scene.ranks[n].pid)
    alive = scene.job.running and pids
    return [
        *([f"Continue it: `kill -CONT {pids}`."] if alive else []),
        "Find out who stops it: Ctrl-Z in its terminal, a debugger, a scheduler that suspends "
        "jobs, `kill -STOP`.",
    ]


def _busy(scene: Scene, verdict: Verdict) -> list[str]:
    stack = _STACK.format(pid=_pid(scene, verdict.ranks))
    return [
        *([stack] if scene.job.running else []),
        "Look at what it does after that line on this rank alone: a loop that doesn't end, "
        "`if rank == 0:` around slow work (a checkpoint, an evaluation, a download), more data "
        "than the others have.",
        _DEADLINE,
        "`phalanx watch` shows who is waited for, step by step.",
    ]


def _missing(scene: Scene, verdict: Verdict) -> list[str]:
    ranks = collapsed(verdict.ranks)
    alive = [n for n in verdict.ranks if scene.ends[n].how == "alive" and scene.ranks[n].pid]
    return [
        *([_STACK.format(pid=scene.ranks[alive[0]].pid)] if alive else []),
        f"Check that rank {ranks} was started, and look at its output: every process needs a RANK "
        "of its own and the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `phalanx run` sets them.",
        "Groups of some ranks: every rank of the job must call `new_group`, in the same order.",
    ]


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

_STEPS: dict[Kind, Sequence[str] | Callable[[Scene, Verdict], list[str]]] = {
    "killed": _killed,
    "exited": (
        "Look at the end of its output, and for `sys.exit` and `os._exit` in what it runs.",
    ),
    "failed": _failed,
    "vanished": _vanished,
    "stopped": _stopped,
    "busy": _busy,
    "late": (
        _DEADLINE,
        "Or let all ranks do the slow part at the same time, so that none waits.",
        "`phalanx trace` shows how long each rank took for what.",
    ),
    "stuck": _busy,
    "branch": (_BRANCHES, "`phalanx trace` shows what each rank called before."),
    "message": ("Give send and recv the same dtype and as many elements.",),
    "finished": _FINISHED,
    "unsent": _UNSENT,
    "unreceived": _UNSENT,
    "missing": _missing,
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
        "`phalanx explain` on the host of these ranks knows what they did: their black boxes are "
        "in a directory there.",
    ),
    "unreadable": (
        "Look at that rank's output. If it runs another version of Phalanx, install the same "
        "everywhere.",
    ),
    "launcher": ("Nothing, if you stopped it. Else look at who sent the launcher a signal.",),
    "running": (),
    "ended": (),
    "unknown": (
        "`phalanx jobs` says which jobs there are, and in which directory.",
        "Look at the output of the ranks.",
    ),
}
