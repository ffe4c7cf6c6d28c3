"""A part of the matrix of faults (`make faults ARGS=matrix`), and checks of its judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault_injection import matrix, tables
from tests.fault_injection.faults import Case

CASES = (
    "ValueError_asynchronous_all_reduce_of_2",
    "worker_killed",
    "launcher_SIGKILL",
    "isend_unawaited",
    "sleep_before_init",
    "recv_without_send",
    "SIGSTOP_inside",
    "new_group_on_some",
    "RPC_hung",
    "SIGKILL_inside_large_all_reduce_of_2",
    "end_before_init",
    "operation",
)
ON_GLOO = ("early_leave", "endless_loop", "SIGSTOP_inside", "ValueError_in_a_group_reduce_of_4")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_diagnosed(tmp_path: Path, name: str) -> None:
    trial = matrix.run(matrix.CASES[name], tmp_path)
    assert trial.wrong == [], trial.diagnosis


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ON_GLOO)
def test_a_fault_on_gloo_is_diagnosed(tmp_path: Path, name: str) -> None:
    trial = matrix.run(matrix.CASES[name], tmp_path, "gloo")
    assert trial.wrong == [], trial.diagnosis


def test_the_matrix_has_eighty_cases() -> None:
    assert len(matrix.CASES) == sum(len(file.CASES) for file in matrix.MODULES) == 80
    assert {case.size for case in matrix.CASES.values()} == {2, 3, 4}


# The judge must detect mistakes.

CASE = Case("name", 2, print, (1,), "failed", "Rank 1 .*ValueError", "traceback")
GOOD: dict[str, Any] = {
    "job": {"started": 1000.0},
    "diagnosis": {
        "kind": "failed",
        "ranks": [1],
        "since": 1005.0,
        "text": ["Rank 1 (pid 7) failed: ValueError: why"],
    },
    "advice": ["The traceback is in the stderr of rank 1."],
}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"ranks": [0]}, "names ranks [0], not [1]"),
        ({"ranks": [0, 1]}, "names ranks [0, 1], not [1]"),
        ({"kind": "busy"}, "kind busy, not failed"),
        ({"text": ["Rank 1 failed: KeyError"]}, "the cause is not"),
        ({"text": ["Rank 1 were ValueError"]}, "'Rank 1 were' in"),
        ({"text": ["Rank 1 ValueError", "ranks 0 and 2 waits"]}, "'ranks 0 and 2 waits' in"),
        ({"since": 900.0}, "outside of the job's life"),
        ({"since": 1020.0}, "it is dated 15.0 s after the fault"),
    ],
)
def test_an_explanation_is_judged(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    (tmp_path / "mark").write_text("1005.0")
    trial = matrix.Trial(CASE, str(tmp_path))
    trial.judge({**GOOD, "diagnosis": {**GOOD["diagnosis"], **change}}, "alive")
    assert wrong in "\n".join(trial.wrong)
    assert trial.right is (not wrong)
    assert trial.names_ranks is ("ranks" not in change)
    summary = tables.summarize_matrix([trial])
    assert summary["all"] == {
        "faults": 1,
        "ranks": int(trial.names_ranks),
        "right": int(trial.right),
    }


def test_advice_is_judged(tmp_path: Path) -> None:
    trial = matrix.Trial(CASE, str(tmp_path))
    trial.judge({**GOOD, "advice": []}, "at the end")
    assert trial.wrong == ["at the end: no advice like 'traceback': "]
