"""`make gpu`: its steps end in time, and each is named with its outcome."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import gpu


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "seconds", "outcome"),
    [
        ("print('text')", 60, "passed"),
        ("print('text', flush=True); raise SystemExit(3)", 60, "failed"),
        ("print('text', flush=True); import time; time.sleep(600)", 2, "too late"),
    ],
)
def test_outcomes(folder: Path, program: str, seconds: float, outcome: str) -> None:
    step = gpu.Step("one step", (sys.executable, "-c", program), seconds)
    result = gpu.run(step, gpu.environment("cpu"), 60)
    assert (result.step, result.outcome) == ("one step", outcome)
    assert "text" in (folder / result.log).read_text() or outcome == "too late"


def test_no_more_ranks_than_cores() -> None:
    assert [step.name for step in gpu.steps("cpu", 8)][-2:] == [
        "bench of 2 ranks",
        "bench of 8 ranks",
    ]
