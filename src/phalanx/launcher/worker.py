"""The program of each rank of `phalanx.launch`: load the function, call it, return the outcome.

`phalanx.launcher.launch` starts it with the caller's pid and the descriptors of two memory files as
its arguments. The payload file holds an `InterpreterState` and the pickled call; the worker writes
a `RankOutcome` to the result file. If the caller is a notebook, a third descriptor is a pipe for
outputs in its cell. This module imports nothing heavy, so that a function that does not need torch
does not pay for it.
"""

import linecache
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from phalanx.launcher.rank_bootstrap import die_with_parent
from phalanx.system.notebook import inherit_cell
from phalanx.system.tracebacks import format_folded


@dataclass(frozen=True)
class InterpreterState:
    """The state of the caller's interpreter that a new interpreter lacks."""

    argv: list[str]
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Source lines of files that exist only in the caller's memory, such as notebook cells."""


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of a rank: a pickled result, or an error as text and, if possible, pickled."""

    value: bytes | None = None
    summary: str = ""
    traceback: str = ""
    error: bytes | None = None
    time: float = 0.0


def main() -> None:
    """Run one rank; exit with code 1 after an exception, otherwise as Python does."""
    parent, *descriptors = map(int, sys.argv[1:])
    payload, result, *cell = descriptors
    die_with_parent(parent)
    for fd in descriptors:
        os.set_inheritable(fd, False)
    if cell:
        inherit_cell(*cell)
    try:
        outcome = RankOutcome(value=_call(payload))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        outcome = RankOutcome(value=_pickle(None))
    except BaseException as error:  # noqa: BLE001 - every error is reported to the caller
        _announce_failure(error)
        _send(result, _describe(error))
        sys.stdout.flush()
        sys.stderr.flush()
        # Without cleanup: threads and groups of a failed rank can keep Python from exiting.
        os._exit(1)
    _send(result, outcome)
    _leave_group()


def _announce_failure(error: BaseException) -> None:
    """Announce the failure to the peers if the function has formed a Phalanx group."""
    exception_hook: Any = sys.modules.get("phalanx.recorder.exception_hook")
    if exception_hook is not None:
        exception_hook.announce(error)


def _call(payload: int) -> bytes:
    # Reopened, because the inherited descriptor shares its position with the other ranks.
    with open(f"/proc/self/fd/{payload}", "rb") as file:
        state: InterpreterState = pickle.load(file)
        _restore_state(state)
        fn, args, kwargs = pickle.load(file)
    os.close(payload)
    result = fn(*args, **kwargs)
    try:
        return _pickle(result)
    except Exception as error:  # noqa: BLE001 - the object's own code can raise anything
        raise TypeError(
            f"the result, of type {type(result).__qualname__}, can't be pickled and so can't be "
            f"returned to the caller ({error}); return plain data, tensors or a state_dict"
        ) from None


def _restore_state(state: InterpreterState) -> None:
    sys.argv[:] = state.argv
    for name, lines in state.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _pickle(value: object) -> bytes:
    from phalanx.system import pickling

    return pickling.dumps(value)


def _describe(error: BaseException) -> RankOutcome:
    now = time.monotonic()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    if os.environ.get("PHALANX_TRACEBACKS") == "all":
        text = "".join(traceback.format_exception(type(error), error, frames))
    else:
        text = format_folded(error)
    try:
        pickled: bytes | None = _pickle(error)
        pickle.loads(pickled or b"")  # an exception with its own __init__ may fail only here
    except Exception:  # noqa: BLE001 - the text is sent anyway
        pickled = None
    return RankOutcome(summary=summary, traceback=text, error=pickled, time=now)


def _send(result: int, outcome: RankOutcome) -> None:
    with os.fdopen(result, "wb") as file:
        pickle.dump(outcome, file, protocol=pickle.HIGHEST_PROTOCOL)


def _leave_group() -> None:
    """Destroy the group that the function left open; some backends abort at exit otherwise."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
