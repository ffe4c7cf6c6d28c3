"""The process that imports PyTorch's suite, and forks a child for each test.

`runner` starts it with the environment of a column: the suite reads `BACKEND` and `WORLD_SIZE` on
import. A line on stdin is the name of a test, a line on stdout its outcome. Each test runs in its
own child, which is the parent of the ranks and the leader of their process group, so that leftover
processes can be killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.launcher.rank_bootstrap import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Longer than PyTorch's own limit, which ends a test with the stacks of all ranks.
GRACE = 15.0


def suite() -> type[Any]:
    """Return the suite's test case; the tested backend is declared to have Gloo's capabilities."""
    from torch.testing._internal.common_distributed import DistTestCases

    backend = os.environ["BACKEND"]
    for feature in ("ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add(backend)

    from torch.testing._internal.distributed import distributed_test as module

    for kind in ("PROFILING", "SEND_RECV_PROFILING"):
        getattr(module, f"{kind}_SUPPORTED_BACKENDS").append(backend)

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *arguments: Any, **options: Any) -> None:
            die_with_parent(os.getppid())
            # A separate file for each test that forms the group again.
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            super()._run(*arguments, **options)

    return Suite


def run(case: unittest.TestCase) -> dict[str, str]:
    """Run one test in this process and its children."""
    result = unittest.TestResult()
    case.run(result)
    for found in (result.errors, result.failures):
        if found:
            return {"outcome": "fail", "reason": found[0][1]}
    if result.skipped:
        return {"outcome": "skip", "reason": result.skipped[0][1]}
    return {"outcome": "pass", "reason": ""}


def supervise(
    test: str, run_test: Callable[[str], dict[str, str]], log: Path, limit: float
) -> dict[str, object]:
    """Run one test in a child; blocks until it and all its processes have ended."""
    start, server = time.monotonic(), os.getpid()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        die_with_parent(server)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sender.send(run_test(test))
        os._exit(0)
    sender.close()
    outcome = {"outcome": "timeout", "reason": f"still running after {limit + GRACE:g} s"}
    with contextlib.suppress(EOFError):
        if receiver.poll(limit + GRACE):
            outcome = {"outcome": "fail", "reason": "the test's process died"}
            outcome = receiver.recv()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {**outcome, "seconds": round(time.monotonic() - start, 2)}


def serve(prepare: Callable[[], tuple[Sequence[str], Callable[[str], dict[str, str]]]]) -> None:
    """Announce the tests of a suite on stdout, then run those named on stdin.

    Args:
        prepare: Import the suite; return its tests, and a function that runs one of them.
    """
    folder, limit = Path(sys.argv[1]), float(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    # Output of the suite must not mix with the answers.
    os.dup2(2, 1)
    tests, run_test = prepare()
    gc.freeze()
    answers.write(json.dumps(tests) + "\n")
    answers.flush()
    for line in sys.stdin:
        test = line.strip()
        outcome = supervise(test, run_test, folder / f"{test}.log", limit)
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


def prepare() -> tuple[Sequence[str], Callable[[str], dict[str, str]]]:
    """Import the suite of process groups."""
    case_type = suite()
    return unittest.TestLoader().getTestCaseNames(case_type), lambda test: run(case_type(test))


if __name__ == "__main__":
    serve(prepare)
