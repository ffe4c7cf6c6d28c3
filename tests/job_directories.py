"""Directories of ended jobs: the fixture `job`, and processes that write flight recorders.

A folder of tests imports the fixtures in its `conftest.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.diagnosis import job_reader
from phalanx.diagnosis.model import Job
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from tests.descriptors import list_descriptors

RECORDER_SCRIPT = """
import os, sys
from phalanx import _native
rank, size, attempt, ending = *map(int, sys.argv[2:5]), sys.argv[5]
fd = os.open(f"{sys.argv[1]}/{os.getpid()}.recorder", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, _native.flight_recorder_bytes())
_native.open_flight_recorder(fd, rank, size, attempt, "node-a", "a job")
_native.report(10 * rank, 0.5, "a note")
_native.report(10 * rank + 1, float("nan"), "\\x1b[2Ja note")
joining = _native.GroupFormation("0", rank, 2, "0-1")
joining.waiting_for(1 - rank)
joining.end("ok")
joining = _native.GroupFormation("1", rank, 2, "0,1")
if ending:
    _native.record_ending(ending, "ValueError: why" if ending == "failed" else "")
print(os.getpid())
"""


def write_recorder(path: Path, rank: int, attempt: int = 0, ending: str = "", size: int = 2) -> int:
    """Write a flight recorder in a process that then ends, and return its pid."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDER_SCRIPT, *map(str, (path, rank, size, attempt, ending))],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.fixture(scope="module")
def recorder_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the recorders of two ranks: one without a recorded end, one that failed."""
    path = tmp_path_factory.mktemp("recorders")
    write_recorder(path, 0)
    write_recorder(path, 1, ending="failed")
    return path


class JobFixture:
    """A job's directory with the recorders of two ranks that have ended."""

    def __init__(self, base: Path, recorders: Path) -> None:
        with JobDirectory(str(base), make_job_name(), create=True) as job:
            job.write_description(2)
            self.name, self.path = job.name, Path(job.path)
        for recorder in recorders.iterdir():
            shutil.copy(recorder, self.path)
        self.pids = [pid for _, pid in sorted((rank.rank, rank.pid) for rank in self.read().ranks)]

    def read(self, history: int = job_reader.HISTORY) -> Job:
        return job_reader.read_job(self.name, history)

    def get_recorder_path(self, rank: int) -> Path:
        return self.path / f"{self.pids[rank]}.recorder"

    def log_event(self, **event: Any) -> None:
        with (self.path / "launcher.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **event}) + "\n")


@pytest.fixture
def job(jobs: Path, recorder_files: Path) -> Iterator[JobFixture]:
    before = list_descriptors()
    yield JobFixture(jobs, recorder_files)
    assert list_descriptors() == before


def start_live_rank(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes the recorder of rank 0 and stays alive."""
    code = RECORDER_SCRIPT + "\nsys.stdout.flush()\nsys.stdin.read()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "0", "2", "0", ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process
