"""A process that has imported what a training needs, and makes copies of itself: spares.

A copy takes some milliseconds, and shares the memory of the imports, where a process of its own
takes seconds of computing, which the running ranks lose. A copy is a child of the launcher: its
parent exits at once, and the launcher adopts orphans. The imports neither start threads of Python
nor initialize CUDA, which a copy could not use then.
"""

import gc
import json
import os
import sys
import time

from phalanx.launcher import spare
from phalanx.launcher.rank_bootstrap import die_with_parent
from phalanx.torch_versions import is_cuda_unusable

_ADOPTION_SECONDS = 10.0


def main() -> None:
    """Make the imports, then copies; in a copy, be a spare."""
    launcher, requests, answers = map(int, sys.argv[1:])
    spare.import_modules()
    if files := make_copies(launcher, requests, answers):
        spare.run(*files)


def make_copies(launcher: int, requests: int, answers: int) -> list[int]:
    """Make a copy for each line in a pipe; each answers with the line's number and its pid.

    Args:
        launcher: The process that will be the parent of the copies.
        requests: Its descriptor of the pipe with the lines.
        answers: Its descriptor of the pipe for the answers.

    Returns:
        In a copy, the files for `spare.run`; in this process nothing, when there are no more lines.
    """
    gc.freeze()  # copies need not look at the objects of the imports, and then copy their memory
    with (
        open(spare.open_in(launcher, requests), encoding="utf-8") as lines,
        open(spare.open_in(launcher, answers, os.O_WRONLY), "wb", buffering=0) as answer,
    ):
        for number, line in enumerate(lines):
            wake, place, stdout, stderr = json.loads(line)
            files = [spare.open_in(launcher, each) for each in (wake, place)]
            output = [spare.open_in(launcher, each, os.O_WRONLY) for each in (stdout, stderr)]
            is_copy = _is_copy(launcher)
            if is_copy:
                os.dup2(output[0], 1)
                os.dup2(output[1], 2)
                answer.write(f"{number} {os.getpid()}\n".encode())
            for each in output:
                os.close(each)
            if is_copy:
                return files
            for each in files:
                os.close(each)
    return []


def _is_copy(launcher: int) -> bool:
    """Copy this process; return True in the copy, once its parent is the launcher.

    Raises:
        OSError: There is no memory for a process, or no number.
    """
    parent = os.fork()
    if parent:
        os.waitpid(parent, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != launcher and time.monotonic() < end:
        time.sleep(0.0005)
    die_with_parent(launcher)
    if is_cuda_unusable():
        sys.exit("phalanx run: an import of the spares has initialized CUDA, so they cannot use it")
    _seed()
    return True


def _seed() -> None:
    """Give numpy's global generator other numbers than in other copies.

    Python's does that by itself, and torch's begins with the same numbers in all processes.
    """
    import numpy as np

    np.random.seed()


if __name__ == "__main__":
    main()
