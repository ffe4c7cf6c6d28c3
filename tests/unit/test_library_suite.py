"""The record of PyTorch's tests of its distributed libraries, and the checkout of their source."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import pytest
import torch

from tests.conformance.library_suite import record, scope, source
from tests.conformance.torch_suite.runner import Outcome

if TYPE_CHECKING:
    from pathlib import Path

PASSED = Outcome("pass", "", 1.0, "gloo")


def test_the_record_has_no_failure_without_a_documented_reason() -> None:
    assert not [
        f"{test}: {outcome.outcome}" for test, outcome in record.unexplained_failures(record.load())
    ]


def test_both_columns_have_every_test() -> None:
    results = record.load()
    assert results["gloo"].keys() == results["phalanx"].keys()
    assert all(scope.suite_of(test.partition("::")[0]) in scope.SUITES for test in results["gloo"])


def test_every_difference_matches_a_test_that_passes_on_gloo() -> None:
    passed = [test for test, each in record.load()["gloo"].items() if each.outcome == "pass"]
    for pattern in scope.DIFFERENCES:
        assert any(fnmatchcase(test, pattern) for test in passed), pattern


def test_a_test_must_form_groups_of_phalanx_and_none_of_gloo() -> None:
    ours = {
        "passes": Outcome("pass", "", 1.0, "phalanx"),
        "beside a fake group": Outcome("pass", "", 1.0, "fake, phalanx"),
        "still on gloo": PASSED,
        "on both": Outcome("pass", "", 1.0, "gloo, phalanx"),
        "without a group": Outcome("pass", "", 1.0),
        "skipped": Outcome("skip", "", 1.0),
    }
    found = record.unexplained_failures({"gloo": dict.fromkeys(ours, PASSED), "phalanx": ours})
    assert {test for test, _ in found} == ours.keys() - {"passes", "beside a fake group"}


def test_a_test_without_a_group_of_gloo_needs_none_of_phalanx() -> None:
    alone = replace(PASSED, groups="fake")
    assert not list(
        record.unexplained_failures({"gloo": {"test": alone}, "phalanx": {"test": alone}})
    )


def test_a_repeated_test_keeps_its_first_outcome_in_its_reason() -> None:
    failed = Outcome("fail", "ValueError: no", 1.0, "gloo")
    assert record.repeated(failed, PASSED).reason == "the first time: fail: ValueError: no"
    assert record.repeated(failed, PASSED).outcome == "pass"
    assert record.repeated(failed, failed) == failed


def test_a_repeated_import_replaces_its_failure() -> None:
    recorded = {"a.py::import": Outcome("fail", "", 1.0), "b.py::B.test": PASSED}
    record.merge(recorded, {"a.py::A.test": PASSED})
    assert recorded == {"a.py::A.test": PASSED, "b.py::B.test": PASSED}


def test_the_checkout_must_be_of_the_release_in_use(tmp_path: Path) -> None:
    command = "git clone --depth 1 --branch v" + source.release(str(torch.__version__))
    with pytest.raises(ValueError, match=f"not a checkout of PyTorch.*{command}"):
        source.require_release(tmp_path, is_other_allowed=False)
    (tmp_path / "test" / "distributed").mkdir(parents=True)
    (tmp_path / "version.txt").write_text("1.2.3a0\n")
    with pytest.raises(ValueError, match=f"is PyTorch 1.2.3, .*{command}"):
        source.require_release(tmp_path, is_other_allowed=False)
    assert source.require_release(tmp_path, is_other_allowed=True) == "1.2.3"
    (tmp_path / "version.txt").write_text(f"{source.release(str(torch.__version__))}a0\n")
    source.require_release(tmp_path, is_other_allowed=False)


def test_files_are_found_by_suite_and_missing_ones_named(tmp_path: Path) -> None:
    root = tmp_path / "test" / "distributed"
    names = ("tensor/test_init.py", "tensor/test_dtensor_ops.py", "checkpoint/e2e/test_it.py")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    found = source.suites(tmp_path)
    assert {suite: files for suite, files in found.items() if files} == {
        "DTensor": ["tensor/test_init.py"],
        "Checkpoint": ["checkpoint/e2e/test_it.py"],
    }
    assert all(scope.suite_of(file) == suite for suite in found for file in found[suite])
    missing = source.missing_patterns(tmp_path)
    assert "test_device_mesh.py" in missing
    assert "tensor/test_*.py" not in missing
