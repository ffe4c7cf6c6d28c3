"""Output of `phalanx explain` and `phalanx watch` for jobs that only use RPC."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.diagnosis import job_reader, watch, watch_table
from phalanx.diagnosis.explain import as_json, as_text
from phalanx.diagnosis.model import Job
from tests.waiting import stopped, wait_for

LIMIT = 60
SCRIPT = """
import os, pathlib, time
from phalanx import rpc

def slow():
    pathlib.Path(f"slow{os.getpid()}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)

def ask(name):
    return rpc.rpc_sync(name, slow, timeout=0)

rank = int(os.environ["RANK"])
rpc.init_rpc(["master", "middle", "ps"][rank])
if rank == 0:
    # The middle worker is waiting too, so the last one is at fault.
    rpc.rpc_async("middle", ask, ("ps",), timeout=0).wait()
rpc.shutdown()
"""


@pytest.fixture
def job(tmp_path: Path, jobs: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = "from phalanx.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "run", "--nproc-per-node", "3", "script.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def read_job() -> Job:
    """Return the job once its workers have recorded both calls."""
    jobs: list[Job] = []

    def is_recorded() -> bool:
        jobs[:] = [job_reader.read_job()]
        counts = [(len(worker.made), len(worker.executed)) for worker in jobs[0].workers]
        return counts == [(1, 0), (1, 1), (0, 1)]

    wait_for(lambda: list(Path(os.environ["PHALANX_JOBS_DIR"]).glob("*/*.calls")), LIMIT)
    wait_for(is_recorded, LIMIT)
    return jobs[0]


@pytest.mark.slow
def test_hanging_callee(job: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for(lambda: list(tmp_path.glob("slow*")), LIMIT)
    job_state = read_job()
    assert [worker.name for worker in job_state.workers] == ["master", "middle", "ps"]
    master, middle, ps = (
        f"worker '{each.name}' (rank {each.id}, pid {each.pid})" for each in job_state.workers
    )
    text = as_text(job_state)
    (diagnosis,) = text.split("\n\n")[1].splitlines()
    assert diagnosis.startswith(f"W{ps[1:]} has not answered the call of slow by {middle} for ")
    assert ": it has been executing it for " in diagnosis
    lines = text.split("Pending remote calls:\n")[1]
    assert f"  ask, called by {master} on {middle}, for " in lines
    assert f"  slow, called by {middle} on {ps}, for " in lines
    verdict_json = as_json(job_state)["diagnosis"]
    assert (verdict_json["kind"], verdict_json["ranks"]) == ("unanswered", [2])
    workers = as_json(job_state)["workers"]
    assert [(each["name"], len(each["calls"])) for each in workers] == [
        ("master", 1),
        ("middle", 1),
        ("ps", 0),
    ]
    (call,) = workers[1]["calls"]
    assert (call["function"], call["to"], call["executing"]) == ("slow", 2, True)
    assert 0 < call["since"] <= time.time()
    out = Console(file=io.StringIO(), width=200)
    out.print(watch_table.render(job_state, watch.build_view(job_state), out))
    assert f"slow, called by {middle} on {ps}" in out.file.getvalue()  # type: ignore[attr-defined]

    with stopped(job_state.workers[2].pid):
        wait_for(lambda: "stopped by a signal" in as_text(job_reader.read_job()), LIMIT)
        assert f"  slow, called by {middle} on {ps}, for " in as_text(job_reader.read_job())

    (tmp_path / "go").touch()
    assert job.wait(LIMIT) == 0, job.communicate()
    assert list(Path(os.environ["PHALANX_JOBS_DIR"]).iterdir()) == []


@pytest.mark.slow
def test_calls_of_a_killed_job(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """Kill the launcher and all workers."""
    wait_for(lambda: list(tmp_path.glob("slow*")), LIMIT)
    pids = [worker.pid for worker in read_job().workers]
    for pid in (job.pid, *pids):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            assert pid != job.pid  # the kernel kills the workers with their launcher
    wait_for(lambda: not job_reader.read_job().running, LIMIT)
    assert "slow, called by worker 'middle' (rank 1, pid " in as_text(job_reader.read_job())


def test_damaged_files(jobs: Path) -> None:
    name = "20261122-2159-8nezfx"
    jobs.mkdir(mode=0o700)
    (jobs / name).mkdir(mode=0o700)
    start = '{"event": "start", "rank": %d, "pid": %d, "attempt": 0, "world_size": 3, "time": 1}\n'
    entries = "".join(start % (rank, 4_000_000 + rank) for rank in range(3))
    (jobs / name / "launcher.jsonl").write_text(entries)
    (jobs / name / "4000000.calls").write_text('{"version": 2}')
    (jobs / name / "4000001.calls").write_text("[" * 100_000)
    os.mkfifo(jobs / name / "4000002.calls")
    job_state = job_reader.read_job(name)
    assert job_state.workers == ()
    problems = "\n".join(job_state.problems)
    assert "4000000.calls is damaged: ValueError('version 2, expected 1')" in problems
    assert "4000001.calls is damaged: RecursionError" in problems
    assert "4000002.calls is a FIFO, expected a file" in problems
