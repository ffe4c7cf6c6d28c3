"""`phalanx explain` of jobs on Gloo, which `phalanx run` has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
record = os.path.join(os.environ["PHALANX_JOBS_DIR"], os.environ["PHALANX_JOB"])
pair = dist.new_group([1, 2])
dist.all_reduce(x)
dist.broadcast(x, 1)
if rank == 1:
    {action}
dist.all_reduce(x)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that starts a job of three ranks on Gloo, in which rank 1 is at fault."""
    started: list[subprocess.Popen[str]] = []

    def run(action: str) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(SCRIPT.format(action=action))
        command = [PHALANX, "run", "--nproc-per-node", "3", "train.py"]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path))
        return started[-1]

    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path / "jobs"))
    yield run
    for process in started:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)


def explain() -> dict[str, Any]:
    """Return the explanation of the newest job; empty if there is none yet."""
    command = [PHALANX, "explain", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _is_record_read(found: dict[str, Any]) -> bool:
    """Return whether an explanation has the broadcast of rank 1 from PyTorch's record."""
    last = found["ranks"][1]["last_operation"] if found else None
    return last is not None and last["kind"] == "broadcast"


CASES = {
    "asleep": ("time.sleep(1000)", "busy", [1], "own code"),
    "recv": ("dist.recv(x, 0, tag=5)", "unsent", [1], "recv from rank 0 tag 5 at train.py:12"),
    "branch": ("dist.barrier()", "branch", [1], "called barrier #3 at train.py:12"),
    "subgroup": (
        "dist.all_reduce(x, group=pair)",
        "order",
        [1],
        'rank 1 is in all_reduce #1 float32[4] in group "1" at train.py:12',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_hangs(start: Any, case: str) -> None:
    action, kind, at_fault, text = CASES[case]
    start(action)
    found: dict[str, Any] = {}

    def is_explained() -> bool:
        found.update(explain())
        return bool(found) and found["diagnosis"]["kind"] == kind

    wait_for(is_explained)
    assert found["diagnosis"]["ranks"] == at_fault
    assert text in " ".join(found["diagnosis"]["text"])


def test_a_rank_that_is_killed(start: Any) -> None:
    process = start("time.sleep(1000)")
    found: dict[str, Any] = {}
    wait_for(lambda: found.update(explain()) or _is_record_read(found))
    os.kill(found["ranks"][1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err
    diagnosis = explain()["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("killed", [1])
    assert "after broadcast #2 float32[4]" in diagnosis["text"][0]
    assert "\nRank 1 (pid " in err, "the launcher has not printed the explanation"


def test_a_job_that_ends_well_leaves_nothing(start: Any) -> None:
    process = start("while not os.path.exists(f'{record}/{os.getpid()}.torch'): time.sleep(0.01)")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert os.listdir(os.environ["PHALANX_JOBS_DIR"]) == []
