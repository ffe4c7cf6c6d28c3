"""The transfer of faults to ranks: exceptions of user classes, and the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import phalanx
from phalanx.diagnosis import job_reader
from phalanx.errors import UsageError
from phalanx.testing import FaultRunner, fail


@pytest.fixture(scope="module")
def runner() -> Iterator[FaultRunner]:
    with FaultRunner() as runner:
        yield runner


def barrier() -> None:
    with phalanx.init(timeout=20):
        dist.barrier()


class OwnError(Exception):
    """An exception class of this script."""


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


SCRIPT = """
import torch, torch.distributed as dist, phalanx
from phalanx.testing import FaultRunner, fail

class OwnError(Exception):
    pass

def body():
    with phalanx.init(timeout=20):
        dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    with FaultRunner() as runner:
        result = runner.run(body, 2, faults=[fail(rank=1, nth=1, error=OwnError("mine"))])
        assert isinstance(result.errors[1], OwnError), result
        assert "failed with OwnError: mine" in str(result.errors[0]), result
        assert runner.run(body, 2).errors == {}
"""


@pytest.mark.slow
def test_an_exception_of_the_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fault_that_cannot_be_pickled(runner: FaultRunner) -> None:
    for error in (Unpicklable("a", "b"), OwnError(threading.Lock())):
        with pytest.raises(UsageError, match=r"can't pickle fail\(rank=1, nth=1, error="):
            runner.run(barrier, 2, faults=[fail(rank=1, nth=1, error=error)])
    assert runner.run(barrier, 2).errors == {}  # the fork server still works


def job_of_rank() -> tuple[str | None, str]:
    with phalanx.init(timeout=20):
        dist.barrier()
        return os.environ.get("PHALANX_JOB"), job_reader.read_job().name


def test_ranks_do_not_belong_to_a_surrounding_job(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = "20261121-0901-k3f9x2"
    monkeypatch.setenv("PHALANX_JOB", outer)  # without a directory
    with FaultRunner() as runner:
        values = runner.run(job_of_rank, 2).values
    assert values[0] == values[1]
    assert values[0][0] == ""
    assert values[0][1] != outer
