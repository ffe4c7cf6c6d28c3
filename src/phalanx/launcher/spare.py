"""A process that has imported what a training needs, and waits for the place of a rank.

`phalanx run --elastic` starts it like a rank, or makes it as a copy of a process that has made the
imports (`spare_template`). Its environment and its script come later, in a file in memory, and the
end of a pipe says that they are there.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
from types import TracebackType
from typing import Any, NoReturn

from phalanx.launcher.rank_bootstrap import inherit_key, set_simulated_host

_IMPORTS = ("torch.distributed", "torch._dynamo", "phalanx", "phalanx.parallel", "phalanx.train")
"""The modules that a training imports; it imports torch._dynamo when it makes an optimizer.

They take most of the time that a rank needs to start.
"""


def main() -> None:
    """Wait for a rank's place, and run the script in it."""
    launcher, wake, place = map(int, sys.argv[1:])
    import_modules()
    run(open_in(launcher, wake), open_in(launcher, place))


def import_modules() -> None:
    """Import what a training needs."""
    for name in _IMPORTS:
        importlib.import_module(name)


def open_in(launcher: int, descriptor: int, flags: int = os.O_RDONLY) -> int:
    """Open a file of which the launcher has a descriptor."""
    return os.open(f"/proc/{launcher}/fd/{descriptor}", flags)


def run(wake: int, assignment: int) -> None:
    """Wait for a rank's place, and run the script in it; return if there is none.

    Args:
        wake: The pipe whose end says that there is a place, or that the launcher needs none.
        assignment: The file with the place.
    """
    if place := wait_for_place(wake, assignment):
        take_place(place)
        run_script(place)


def wait_for_place(wake: int, assignment: int) -> dict[str, Any]:
    """Wait for a rank's place, as in `run`; return it, or nothing if there is none."""
    with open(wake, "rb") as end:
        end.read()
    with open(assignment, encoding="utf-8") as file:
        text = file.read()
    return dict(json.loads(text)) if text else {}


def take_place(place: dict[str, Any]) -> None:
    """Make the environment, the key and the output of a rank those of this process."""
    os.environ.update(place["environment"])
    if "key" in place:
        inherit_key(*place["key"])
    set_simulated_host(place["simulated_hosts"])
    for descriptor, path in enumerate(place["logs"], start=1):
        if path:
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(log, descriptor)
            os.close(log)


def run_script(place: dict[str, Any]) -> None:
    """Run a script or a module as `python` does."""
    script = place["script"]
    sys.argv = [script, *place["arguments"]]
    sys.modules.pop("__mp_main__", None)  # the main program of this process so far
    atexit.register(_die_if_interrupted)  # after all that the script will register
    try:
        if place["is_module"]:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - that no script has handled
        _end_by_exception(error)


_interrupts: list[KeyboardInterrupt] = []
"""That which ended the script, if one did."""


def _end_by_exception(error: BaseException) -> NoReturn:
    """Print an exception from the script's frame on, as if there were no others, and exit."""
    error.__traceback__ = _skip_own_frames(error.__traceback__)
    # As the interpreter does, for what the script runs at exit.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        _interrupts.append(error)
    sys.exit(1)


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    own = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return frames


def _die_if_interrupted() -> None:
    if _interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
