"""Diagnosis of groups that cannot be formed, of ranks without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.diagnosis import job_reader
from phalanx.diagnosis.explain import as_text
from phalanx.diagnosis.kinds import Diagnosis, diagnose
from phalanx.recorder import job_directory
from tests.ports import find_free_port

LIMIT = 60.0
SCRIPT = """
import sys
from datetime import timedelta
import torch.distributed as dist
import phalanx
rank, size, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("phalanx", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=size,
                        timeout=timedelta(seconds=seconds))
dist.barrier()
"""


def start(folder: Path, rank: int, size: int, seconds: float = LIMIT) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, str(rank), str(size), str(seconds), folder / "store"]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def outputs_of(processes: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    """Return the stderr of the processes, which are killed if they do not exit."""
    try:
        return [process.communicate(timeout=LIMIT)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def diagnosis_of_kept_job() -> Diagnosis:
    """Return the diagnosis of the only job, which must have been kept as a failed one."""
    with job_directory.find_job() as job:
        assert job_reader.read_summary(job).state == "failed"
    return diagnose(job_reader.read_job())


@pytest.mark.usefixtures("jobs")
def test_different_world_sizes(tmp_path: Path) -> None:
    stderr = outputs_of([start(tmp_path, 0, 2), start(tmp_path, 1, 3)])
    assert all("this rank with 3" in text for text in stderr), stderr
    diagnosis = diagnosis_of_kept_job()
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    assert "rank 0 was started with world size 2, this rank with 3" in diagnosis.reason
    text = as_text(job_reader.read_job())
    assert "world size 2, this rank with 3" in text
    assert "wait for each other" not in text
    assert {rank.ending for rank in job_reader.read_job().ranks[:2]} == {"failed"}


@pytest.mark.slow
@pytest.mark.usefixtures("jobs")
def test_a_rank_that_is_taken(tmp_path: Path) -> None:
    stderr = outputs_of([start(tmp_path, 0, 2, 3), start(tmp_path, 0, 2, 3)])
    assert sum("is already taken" in text for text in stderr) == 1, stderr
    with job_directory.find_job() as job:
        assert job_reader.read_summary(job).state == "failed"


@pytest.mark.slow
@pytest.mark.usefixtures("jobs")
def test_missing_rank(tmp_path: Path) -> None:
    outputs_of([start(tmp_path, 0, 2, 1.2)])
    diagnosis = diagnosis_of_kept_job()
    assert (diagnosis.kind, diagnosis.ranks) == ("missing", (1,))
    (failed,) = job_reader.read_job().ranks[0].history
    assert (failed.kind, failed.outcome) == ("join", "timeout")


@pytest.mark.usefixtures("jobs")
def test_missing_rank_beside_the_host_of_the_store(tmp_path: Path) -> None:
    """Rank 0 has joined no group either, but only because it waits in the store for rank 2."""
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('phalanx')\n")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": "3"}
    processes = [
        subprocess.Popen([sys.executable, script], env={**os.environ, **place, "RANK": rank})
        for rank in "01"
    ]
    try:
        deadline = time.monotonic() + LIMIT
        while (found := _diagnosis_of_running_job()) is None or found.kind != "missing":
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert found.ranks == (2,)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _diagnosis_of_running_job() -> Diagnosis | None:
    names = job_directory.list_jobs()
    return diagnose(job_reader.read_job(names[0])) if names else None


@pytest.mark.usefixtures("jobs")
def test_ctrl_c(jobs: Path, tmp_path: Path) -> None:
    process = start(tmp_path, 0, 2)
    deadline = time.monotonic() + LIMIT
    while not _joins(jobs):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    outputs_of([process])
    (failed,) = job_reader.read_job().ranks[0].history
    assert (failed.kind, failed.outcome) == ("join", "interrupted")
    assert job_reader.read_job().ranks[0].exception.startswith("KeyboardInterrupt")
    diagnosis_of_kept_job()


def _joins(jobs: Path) -> bool:
    if not list(jobs.glob("*/*.recorder")):
        return False
    return bool(job_reader.read_job().ranks and job_reader.read_job().ranks[0].open)
