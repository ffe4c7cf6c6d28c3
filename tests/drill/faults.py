"""Faults with a known root cause: what the ranks of a job run, and what `explain` must find.

`python -m tests.drill.faults NAME` is one rank of the case of that name. The cases themselves are
in `fault_deaths`, `fault_waits`, `fault_collectives` and `fault_programs`; `matrix` runs and judges
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

MARK = "PHALANX_DRILL_MARK"
"""The variable that names the file which a rank makes right before the fault."""

LIMIT = 45.0
"""Seconds until an operation of a case gives up: longer than any of them needs."""

Process = subprocess.Popen[str]
Body = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """One injected fault, and what is right to say of it.

    Attributes:
        name: Of the case.
        size: World size.
        body: What each rank runs, given its number.
        ranks: The ranks at fault.
        kind: Of the verdict.
        cause: An expression found in the verdict's sentences.
        advice: An expression found in what to try.
        hangs: Whether the job goes on until it is interrupted. The verdict must be right before
            and after.
        forms: Whether all ranks form a group before `body`.
        disturb: Done to the launcher once the fault is there.
        timeout: Of operations, in seconds.
    """

    name: str
    size: int
    body: Body
    ranks: tuple[int, ...]
    kind: str
    cause: str
    advice: str
    hangs: bool = False
    forms: bool = True
    disturb: Callable[[Process], object] | None = None
    timeout: float = LIMIT


def case_of(name: str, size: int, body: Body, ranks: Any, *found: str, **more: Any) -> Case:
    """A case with one rank at fault, or several; `found` are its kind, cause and advice."""
    chosen = (ranks,) if isinstance(ranks, int) else ranks
    return Case(name, size, body, chosen, *found, **more)


def strike() -> None:
    """Note that the fault comes now; a rank at fault calls it right before."""
    mark = os.environ[MARK]
    part = f"{mark}.{os.getpid()}"
    with open(part, "w", encoding="ascii") as file:
        file.write(str(time.time()))
    os.replace(part, mark)


def struck(mark: str | None = None) -> float:
    """Return when the fault came, in Unix seconds; 0 if it has not come yet."""
    try:
        with open(mark or os.environ[MARK], encoding="ascii") as file:
            return float(file.read())
    except FileNotFoundError:
        return 0.0


def wait_for_strike() -> None:
    """Stay in code of one's own until the fault has come."""
    end = time.monotonic() + LIMIT
    while not struck() and time.monotonic() < end:
        time.sleep(0.01)


def stay() -> NoReturn:
    """Stay in code of one's own until the launcher ends this process."""
    time.sleep(LIMIT)
    raise TimeoutError("nobody has ended this rank")


def leave_and_stay() -> NoReturn:
    """Leave the group, and stay."""
    import torch.distributed as dist

    dist.destroy_process_group()
    stay()


def main(name: str) -> None:
    """Be one rank of a case."""
    import torch
    import torch.distributed as dist

    from tests.drill.matrix import CASES

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    case = CASES[name]
    if case.forms:
        dist.init_process_group("phalanx", timeout=timedelta(seconds=case.timeout))
        dist.all_reduce(torch.ones(8))
    case.body(int(os.environ["RANK"]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
