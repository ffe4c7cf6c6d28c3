"""A process that has imported what a training needs, and waits for the place of a rank.

`phalanx run --elastic` starts it like a rank, or makes it as a copy of a process that has made the
imports (`spare_template`). Its environment and its script come later, in a file in memory, and the
end of a pipe says that they are there.
"""

import importlib
import json
import os
import runpy
import sys

from phalanx.launcher.rank_bootstrap import set_simulated_host

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
    with open(wake, "rb") as end:
        end.read()
    with open(assignment, encoding="utf-8") as file:
        text = file.read()
    if not text:
        return
    place = json.loads(text)
    os.environ.update(place["environment"])
    set_simulated_host(place["simulated_hosts"])
    for descriptor, path in enumerate(place["logs"], start=1):
        if path:
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(log, descriptor)
            os.close(log)
    _run(place["script"], place["arguments"], is_module=place["is_module"])


def _run(script: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script or a module as `python` does."""
    sys.argv = [script, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
