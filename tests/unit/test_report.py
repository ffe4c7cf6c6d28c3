"""`phalanx.report`: its arguments, and its message without a group."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

import phalanx
from phalanx.errors import UsageError
from phalanx.recorder import flight_recorder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no argument was given, expected step, loss or note"),
        ({"step": -1}, "step is -1, expected an integer from 0 up"),
        ({"step": 2**63}, "step is 9223372036854775808"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": "3"}, "step is '3'"),
        ({"step": True}, "step is True"),
        ({"step": torch.ones(2, dtype=torch.int64)}, "step is tensor"),
        ({"loss": "0.5"}, "loss is '0.5', expected a number or a tensor of one element"),
        ({"loss": b"0.5"}, "loss is b'0.5'"),
        ({"loss": True}, "loss is True"),
        ({"loss": 1j}, "loss is 1j"),
        ({"loss": [0.5]}, r"loss is \[0.5\]"),
        ({"loss": 10**400}, r"loss is 1000000+\.\.\., expected"),
        ({"loss": torch.ones(2)}, r"loss is tensor\(\[1., 1.\]\)"),
        ({"loss": torch.full((1,), 1j)}, "loss is tensor"),
        ({"loss": np.ones(3)}, "loss is array"),
        ({"note": 5}, "note is 5, expected a string"),
        ({"note": b"bytes"}, "note is b'bytes', expected a string"),
        ({"note": "\ud800"}, r"note is '\\ud800', which contains a lone surrogate"),
    ],
)
def test_invalid_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^report: {message}"):
        phalanx.report(**arguments)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_valid_arguments(monkeypatch) -> None:
    reports = []
    monkeypatch.setattr(flight_recorder, "_recorder", object())
    monkeypatch.setattr(flight_recorder, "_note", "")
    monkeypatch.setattr(
        flight_recorder._native, "report", lambda *arguments: reports.append(arguments)
    )
    phalanx.report(step=0)
    phalanx.report(step=np.int64(7), loss=np.float32(0.5))
    phalanx.report(step=torch.tensor(8), loss=torch.tensor([[0.25]], requires_grad=True))
    phalanx.report(loss=Fraction(1, 4))
    phalanx.report(loss=math.inf, note="evaluating\x1b[2J \u202e")
    phalanx.report(step=2**63 - 1)  # with the last note
    phalanx.report(note="")
    assert [step for step, _, _ in reports] == [0, 7, 8, -1, -1, 2**63 - 1, -1]
    losses = [loss for _, loss, _ in reports]
    assert losses[1:5] == [0.5, 0.25, 0.25, math.inf]
    assert (losses[0], *losses[5:]) == (None, None, None)
    phalanx.report(loss=math.nan)
    assert math.isnan(reports.pop()[1])
    assert [note for _, _, note in reports] == [*[""] * 4, *["evaluating\x1b[2J \u202e"] * 2, ""]


WITHOUT_GROUP = """
import logging, phalanx
logging.basicConfig(level=logging.INFO, format="%(message)s")
for step in range(3):
    phalanx.report(step=step)
"""


def test_report_without_a_group_logs_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GROUP],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if "report()" in line]
    assert lines == [
        "phalanx: report() does nothing in this process, which has no group of the backend "
        '"phalanx" yet'
    ]


SINGLE_RANK = """
import os
import torch, phalanx
from phalanx.diagnosis.job_reader import read_job
with phalanx.init(device="cpu") as session:
    for step in range(300):
        phalanx.report(step=step, loss=torch.tensor(1.0 / (step + 1)))
    phalanx.report(note="x" * 254 + "ü")
    job = read_job()
(rank,) = job.ranks
assert job.running and rank.process.state == "running", rank
assert rank.pid == os.getpid()
assert [report.step for report in rank.reports] == [*range(45, 300), -1], rank.reports
assert abs(rank.reports[-2].loss - 1 / 300) < 1e-6
assert rank.note.startswith("x" * 254), rank.note
assert rank.last.kind == "join", rank.last
"""


def test_a_reader_sees_the_reports(jobs) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SINGLE_RANK], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(jobs.iterdir()) == []
