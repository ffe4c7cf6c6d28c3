"""Faults with a known root cause: the program of the ranks, and the expected diagnosis.

`python -m tests.fault_injection.faults NAME` runs one rank of a case. The cases are defined in
`fault_deaths`, `fault_waits`, `fault_collectives` and `fault_programs`; `matrix` runs and judges
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

MARK = "PHALANX_FAULT_MARK"
"""The environment variable with the path of the file that a rank creates right before the fault."""

BACKEND = "PHALANX_FAULT_BACKEND"
"""The environment variable with the backend of the groups; "phalanx" by default."""

DUMPS = "PHALANX_FAULT_DUMPS"
"""The environment variable with the directory to which ranks write dumps, if any."""

LIMIT = 45.0
"""Timeout of the operations of a case in seconds; no case needs that long."""

Process = subprocess.Popen[str]
Body = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """An injected fault, and the expected diagnosis.

    Attributes:
        name: Name of the case.
        size: World size.
        body: Function that each rank calls with its rank.
        ranks: The ranks at fault.
        kind: Kind of the diagnosis.
        cause: Regular expression for the text of the diagnosis.
        advice: Regular expression for the advice.
        hangs: Whether the job runs until it is interrupted. The diagnosis must be right before
            and after.
        forms: Whether all ranks form a group before `body`.
        disturb: Function that is called with the launcher after the fault.
        timeout: Timeout of operations in seconds.
        is_general: Whether the fault exists on other backends, too.
        elsewhere: The kind, cause and advice on these, if they show another part of the fault.
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
    is_general: bool = True
    elsewhere: tuple[str, str, str] | None = None


def make_case(name: str, size: int, body: Body, ranks: Any, *expected: str, **options: Any) -> Case:
    """Create a case; `ranks` is one or several, `expected` are kind, cause and advice."""
    chosen = (ranks,) if isinstance(ranks, int) else ranks
    return Case(name, size, body, chosen, *expected, **options)


def mark_fault() -> None:
    """Record the time of the fault; a rank at fault calls this right before."""
    mark = os.environ[MARK]
    part = f"{mark}.{os.getpid()}"
    with open(part, "w", encoding="ascii") as file:
        file.write(str(time.time()))
    os.replace(part, mark)


def fault_time(mark: str | None = None) -> float:
    """Return the time of the fault in Unix seconds; 0 if it has not happened yet."""
    try:
        with open(mark or os.environ[MARK], encoding="ascii") as file:
            return float(file.read())
    except FileNotFoundError:
        return 0.0


def wait_for_fault() -> None:
    """Sleep until the fault has happened."""
    end = time.monotonic() + LIMIT
    while not fault_time() and time.monotonic() < end:
        time.sleep(0.01)


def sleep_until_killed() -> NoReturn:
    """Sleep until the launcher ends this process."""
    time.sleep(LIMIT)
    raise TimeoutError("the launcher has not ended this rank")


def leave_and_sleep() -> NoReturn:
    """Leave the group, then sleep until the launcher ends this process."""
    import torch.distributed as dist

    dist.destroy_process_group()
    sleep_until_killed()


def make_group(ranks: list[int] | None = None) -> Any:
    """Form a group whose operations time out as those of the first one, which Gloo's do not."""
    import torch.distributed as dist

    return dist.new_group(ranks, timeout=timedelta(seconds=LIMIT))


def get_backend() -> str:
    """Return the backend of the groups of a case."""
    return os.environ.get(BACKEND, "phalanx")


def main(name: str) -> None:
    """Run one rank of a case."""
    import torch
    import torch.distributed as dist

    from phalanx.diagnosis.exit_reasons import parse_group_error
    from tests.fault_injection.nccl_dumps import NcclDumps

    dumps = NcclDumps(folder) if (folder := os.environ.get(DUMPS)) else None

    from tests.fault_injection.matrix import CASES  # whose programs then use what it has replaced

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    case = CASES[name]
    if case.forms:
        dist.init_process_group(get_backend(), timeout=timedelta(seconds=case.timeout))
        dist.all_reduce(torch.ones(8))
    try:
        case.body(int(os.environ["RANK"]))
    except RuntimeError as error:
        if dumps is None or not parse_group_error(f"RuntimeError: {error}"):
            raise
        dumps.hang(error)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
