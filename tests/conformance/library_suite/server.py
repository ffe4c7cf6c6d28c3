"""The process that imports one of PyTorch's test files, and forks a child for each test.

`runner` starts it, and sets `LIBRARY_SUITE_FILE` and `LIBRARY_SUITE_CPU_DEVICES`. See
`torch_suite.server` for the rest. The ranks of a test are forked too, so that none of them pays for
the imports.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.launcher.rank_bootstrap import die_with_parent
from tests.conformance.library_suite.groups import FormedGroups
from tests.conformance.library_suite.runner import IMPORT
from tests.conformance.torch_suite import server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The time limit of the import of a file, in seconds.
IMPORT_LIMIT = 120


def prepare() -> tuple[Sequence[str], Callable[[str], dict[str, str]]]:
    """Import a test file; return its tests, and a function that runs one of them."""
    path = Path(os.environ["LIBRARY_SUITE_FILE"])
    FormedGroups.watch()
    _fork_ranks()
    if devices := int(os.environ["LIBRARY_SUITE_CPU_DEVICES"]):
        _count_cpu_as_devices(devices)
    sys.path.insert(0, str(path.parent))
    # Ends this process if the import hangs.
    signal.alarm(IMPORT_LIMIT)
    try:
        module = importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:
        is_skipped = isinstance(error, unittest.SkipTest | SystemExit)
        why = {"outcome": "skip" if is_skipped else "fail", "reason": _description(error)}
        return [IMPORT], lambda _test: why
    finally:
        signal.alarm(0)
    cases = {_name(case): case for case in _cases(module)}
    folder = Path(sys.argv[1])

    def run_test(test: str) -> dict[str, str]:
        groups = folder / f"{test}.groups"
        FormedGroups.record_in(groups)
        # A suite, not only the case: it calls the fixtures of classes and modules.
        outcome = server.run(unittest.TestSuite([cases[test]]))
        outcome["groups"] = FormedGroups.recorded()
        groups.unlink()
        return outcome

    return list(cases), run_test


def _fork_ranks() -> None:
    """Let PyTorch's test cases fork their ranks, which they spawn by default."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    multiprocessing.set_start_method("fork")
    run = MultiProcessTestCase._run.__func__

    def spawn_processes(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    def run_rank(cls: type[Any], *arguments: Any, **options: Any) -> None:
        die_with_parent(os.getppid())
        run(cls, *arguments, **options)

    MultiProcessTestCase._spawn_processes = spawn_processes
    MultiProcessTestCase._run = classmethod(run_rank)


def _count_cpu_as_devices(devices: int) -> None:
    """Run tests that require several accelerators on CPU, with one rank per device."""
    import torch
    from torch.testing._internal import common_distributed

    torch.cpu.device_count = torch.accelerator.device_count = lambda: devices
    common_distributed.skip_if_lt_x_gpu = lambda _count, **_options: lambda test: test


def _cases(module: Any) -> list[unittest.TestCase]:
    suites = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    cases = []
    while suites:
        for each in suites.pop():
            (suites if isinstance(each, unittest.TestSuite) else cases).append(each)
    return cases


def _name(case: unittest.TestCase) -> str:
    return f"{type(case).__name__}.{case._testMethodName}"


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    server.serve(prepare)
