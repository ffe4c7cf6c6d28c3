"""The recorded outcomes of PyTorch's RPC suite, and their documented scope."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.conformance.rpc_suite import record, scope
from tests.conformance.rpc_suite.substitution import InternalNameUsed, Uses, _Substitute
from tests.conformance.torch_suite.runner import ROOT, Outcome

if TYPE_CHECKING:
    from pathlib import Path

MAX_DIFFERENCES = 10


def test_record_has_no_undocumented_failure() -> None:
    assert not [
        f"{test}: {outcome.outcome}" for test, outcome in record.find_regressions(record.load())
    ]


def test_both_columns_have_every_test() -> None:
    results = record.load()
    assert results["torch"].keys() == results["phalanx"].keys()
    assert {outcome.outcome for outcome in results["torch"].values()} == {"pass", "skip"}


def test_every_pattern_matches_a_test_that_pytorch_passes() -> None:
    passed = [test for test, each in record.load()["torch"].items() if each.outcome == "pass"]
    for pattern in (*scope.OUT_OF_SCOPE, *scope.DIFFERENCES):
        assert any(fnmatchcase(test, pattern) for test in passed), pattern


def test_differences_are_few_and_documented() -> None:
    documentation = " ".join((ROOT / "docs" / "rpc.md").read_text(encoding="utf-8").split())
    assert len(scope.DIFFERENCES) <= MAX_DIFFERENCES
    for test, reason in scope.DIFFERENCES.items():
        assert reason in documentation, f"docs/rpc.md lacks the reason of {test}"


def test_find_regressions() -> None:
    kinds = ("pass", "fail", "timeout", "skip", "out of scope")
    different = next(iter(scope.DIFFERENCES))
    torch_outcomes = {kind: Outcome("pass", "", 1.0) for kind in kinds} | {
        different: Outcome("pass", "", 1.0),
        "failed there": Outcome("fail", "", 1.0),
    }
    phalanx_outcomes = {kind: Outcome(kind, "", 1.0) for kind in kinds} | {
        different: Outcome("fail", "", 1.0),
        "failed there": Outcome("fail", "", 1.0),
    }
    regressions = record.find_regressions({"torch": torch_outcomes, "phalanx": phalanx_outcomes})
    assert [test for test, _ in regressions] == ["fail", "skip", "timeout"]


def test_cause_is_the_original_exception() -> None:
    reason = (
        "RuntimeError: Process 0 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\n"
        "phalanx.errors.PeerLost: worker 'worker1' died\n"
        "Process 1 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\n"
        "AssertionError: 1 != 2\n"
    )
    assert record.cause(reason) == "AssertionError: 1 != 2"
    assert (
        record.cause("KeyError: <f at 0x7f3a> in '/a/b-c/d.py'")
        == "KeyError: <f at 0x...> in 'd.py'"
    )
    assert record.cause("CUDA is not available.") == "CUDA is not available."


def test_internal_name_is_importable_and_its_use_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModuleType("torch.distributed.rpc")
    for name in ("_private", "RpcAgent", "published"):
        setattr(real, name, object())
    module = _Substitute(real, {"offered": 7})
    monkeypatch.setattr(Uses, "_fd", -1)
    assert module.offered == 7
    internal = module._private
    with pytest.raises(AttributeError, match="public"):
        _ = module.published
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = module.unknown
    Uses.record_in(tmp_path / "uses")
    assert Uses.first() == ""
    with pytest.raises(InternalNameUsed, match="underscore"):
        internal()
    _ = module.RpcAgent
    assert Uses.first().startswith("torch.distributed.rpc._private: ")
    assert (tmp_path / "uses").read_text().count("\n") == 2
    os.close(Uses._fd)


def test_internal_names_exist_in_torch() -> None:
    import torch.distributed.rpc  # noqa: F401

    for module, names in scope.INTERNAL.items():
        assert all(hasattr(sys.modules[module], name) for name in names if name != "*")
