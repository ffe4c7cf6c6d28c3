"""The process that imports PyTorch's RPC suite and forks the workers of each test.

Started by `runner`, which sets `RPC_SUITE_COLUMN`. See `torch_suite.server` for the rest.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.launcher.rank_bootstrap import die_with_parent
from tests.conformance.rpc_suite import scope
from tests.conformance.rpc_suite.substitution import (
    Uses,
    compile_scripts_if_possible,
    substitute,
)
from tests.conformance.torch_suite import server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The message of PyTorch's own time limit of a test.
_TIMED_OUT = "terminated or timed out after"

# The suite asks its fixture for the wording of timeouts.
_TIMEOUT = "RPC ran for more than|took longer than|did not exist after|did not answer within"


def prepare() -> tuple[Sequence[str], Callable[[str], dict[str, str]]]:
    """Import the suite, on PyTorch's RPC or on `phalanx.rpc`."""
    if is_substituted := os.environ["RPC_SUITE_COLUMN"] == "phalanx":
        substitute()
        with compile_scripts_if_possible():
            from torch.testing._internal.distributed import rpc_utils
    else:
        from torch.testing._internal.distributed import rpc_utils
    types = {
        each.__name__: each
        for each in (
            *rpc_utils.GENERIC_TESTS,
            *rpc_utils.GENERIC_CUDA_TESTS,
            *rpc_utils.TENSORPIPE_TESTS,
            *rpc_utils.TENSORPIPE_CUDA_TESTS,
            *rpc_utils.FAULTY_AGENT_TESTS,
        )
    }
    tests = [
        f"{name}.{test}"
        for name, each in types.items()
        for test in unittest.TestLoader().getTestCaseNames(each)
    ]

    def run_test(test: str) -> dict[str, str]:
        if is_substituted and (reason := scope.out_of_scope_reason(test)):
            return {"outcome": "out of scope", "reason": reason}
        name, _, method = test.partition(".")
        is_faulty = types[name] in rpc_utils.FAULTY_AGENT_TESTS
        return _run(test, _case_type(types[name], is_faulty, is_substituted)(method))

    return tests, run_test


def _case_type(tests: type[Any], is_faulty: bool, is_substituted: bool) -> type[Any]:
    """Combine a class of tests with the fixture of its agent and with forked workers."""
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture

    class Forked(rpc_utils.SpawnHelper):
        def _spawn_processes(self) -> None:
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *arguments: Any, **options: Any) -> None:
            die_with_parent(os.getppid())
            super()._run(*arguments, **options)

    rpc_utils.SpawnHelper = Forked
    fixture = tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture
    if is_faulty:
        # Importing it changes the registry of agents, which other tests inspect.
        from torch.testing._internal.distributed.rpc import faulty_rpc_agent_test_fixture

        fixture = faulty_rpc_agent_test_fixture.FaultyRpcAgentTestFixture
    if is_substituted:
        fixture = type("Fixture", (fixture,), {"get_timeout_error_regex": lambda _self: _TIMEOUT})
    classes = rpc_utils.generate_tests("", fixture, [tests], __name__)
    # Methods of the class are pickled by its name.
    globals().update(classes)
    return classes[tests.__name__]


def _run(test: str, case: unittest.TestCase) -> dict[str, str]:
    """Run one test in this process and its children."""
    uses = Path(sys.argv[1]) / f"{test}.uses"
    Uses.record_in(uses)
    outcome = server.run(case)
    uses.unlink()
    if outcome["outcome"] == "fail":
        if use := Uses.first():
            return {"outcome": "out of scope", "reason": use}
        if _TIMED_OUT in outcome["reason"]:
            outcome["outcome"] = "timeout"
    return outcome


if __name__ == "__main__":
    server.serve(prepare)
