"""Jobs of `phalanx run` and `phalanx.launch`, which the launcher records and removes or keeps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.diagnosis import job_reader
from phalanx.errors import LaunchError, UsageError
from phalanx.recorder import job_directory
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from tests import copies
from tests.waiting import wait_for

LIMIT = 60
PHALANX = [copies.PHALANX]
JOIN_GROUP = """
import os, pathlib, sys, time
import torch, torch.distributed as dist, phalanx
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
session = phalanx.init(device="cpu")
dist.all_reduce(torch.ones(1))
phalanx.report(step=attempt)

def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.005)
"""
WAIT_FOR_GO = JOIN_GROUP + "pathlib.Path(f'ready{rank}').touch()\nwait_for('go')\n"


class Command:
    """Runs `phalanx` in the directory of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[tuple[subprocess.Popen[str], threading.Timer]] = []

    def script(self, text: str) -> str:
        (self.folder / "script.py").write_text(text)
        return "script.py"

    def start(self, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PHALANX, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        self._started.append((process, watchdog))
        return process

    def run(self, *args: object) -> tuple[int, str, str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def wait_for(self, *names: str) -> None:
        wait_for(lambda: all((self.folder / name).exists() for name in names))

    def close(self) -> None:
        for process, watchdog in self._started:
            watchdog.cancel()
            process.kill()
            process.communicate()


@pytest.fixture
def command(tmp_path: Path, jobs: Path) -> Iterator[Command]:
    folder = tmp_path / "work"
    folder.mkdir()
    command = Command(folder)
    yield command
    command.close()


def list_jobs(command: Command) -> list[dict[str, Any]]:
    code, out, err = command.run("jobs", "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_a_clean_run_leaves_nothing(command: Command, jobs: Path) -> None:
    before = time.time()
    run = command.start("run", "--nproc-per-node", 2, command.script(WAIT_FOR_GO), "an argument")
    command.wait_for("ready0", "ready1")
    (job,) = list_jobs(command)
    assert (job["state"], job["world_size"]) == ("running", 2)
    assert job["command"][-1] == "an argument"
    assert before <= job["started"] <= time.time()
    code, out, _ = command.run("jobs")
    assert code == 0
    assert re.search(rf"{job['name']} +running +2\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d +2 ", out)
    code, _, err = command.run("jobs", "--remove", job["name"])
    assert code == 2
    assert err == f"phalanx: error: job {job['name']} is still running: end it first\n"
    read = job_reader.read_job(job["name"][:-1])
    assert [rank.start and rank.start.pid for rank in read.ranks] == [r.pid for r in read.ranks]
    assert read.running
    (command.folder / "go").touch()
    out, err = run.communicate(timeout=LIMIT)
    assert (run.returncode, err) == (0, "")
    assert list(jobs.iterdir()) == []
    assert command.run("jobs") == (
        0,
        f"no jobs in {jobs}: none is running, and no failed job is kept\n",
        "",
    )


def test_a_failed_run_is_kept_and_explained(command: Command, jobs: Path) -> None:
    text = JOIN_GROUP + "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()\n"
    code, _, err = command.run("run", "--nproc-per-node", 2, command.script(text))
    assert code == 137
    (job,) = list_jobs(command)
    assert job["state"] == "failed"
    assert f"\nTo see this again: phalanx explain {job['name']}\n" in err
    read = job_reader.read_job()
    assert (read.code, read.world_size, read.attempt) == (137, 2, 0)
    first, second = (rank.start for rank in read.ranks)
    assert first is not None
    assert second is not None
    assert (second.code, second.stopped) == (-signal.SIGKILL, False)
    assert first.code in (1, -signal.SIGTERM)
    assert read.ranks[0].exception.startswith("phalanx.errors.PeerLost")
    assert second.ended is not None
    assert second.time < second.ended <= time.time()
    assert not read.running
    code, out, err = command.run("jobs", "--remove", job["name"])
    assert (code, out, err) == (0, f"removed {job['name']}\n", "")
    assert list(jobs.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_kept(command: Command, number: signal.Signals) -> None:
    run = command.start("run", "--nproc-per-node", 2, command.script(WAIT_FOR_GO))
    command.wait_for("ready0", "ready1")
    run.send_signal(number)
    _, err = run.communicate(timeout=LIMIT)
    read = job_reader.read_job()
    assert run.returncode == read.code == 128 + number
    assert f"phalanx run: stopped by {number.name}\n" in err
    assert f"\nTo see this again: phalanx explain {read.name}\n" in err
    assert [rank.start.stopped for rank in read.ranks if rank.start] == [True, True]
    assert all(rank.start.ended for rank in read.ranks if rank.start)


@pytest.mark.slow
def test_a_killed_launcher_and_its_ranks(command: Command) -> None:
    run = command.start("run", "--nproc-per-node", 3, command.script(WAIT_FOR_GO))
    command.wait_for("ready0", "ready1", "ready2")
    live = job_reader.read_job()
    run.kill()  # the kernel kills the ranks
    run.communicate(timeout=LIMIT)
    wait_for(lambda: not job_reader.read_job().running)
    read = job_reader.read_job()
    assert (read.name, read.code, read.problems) == (live.name, None, ())
    assert [rank.pid for rank in read.ranks] == [rank.pid for rank in live.ranks]
    assert [rank.last.kind for rank in read.ranks if rank.last] == ["all_reduce"] * 3
    (job,) = list_jobs(command)
    assert job["state"] == "failed"


@pytest.mark.slow
def test_restarts_are_one_job(command: Command, jobs: Path) -> None:
    text = JOIN_GROUP + (
        "if attempt == 0:\n    rank == 1 and os._exit(5)\n    dist.barrier()\n"
        "pathlib.Path(f'ready{rank}').touch()\nwait_for('go')\n"
    )
    options = ("--nproc-per-node", 2, "--max-restarts", 1)
    run = command.start("run", *options, command.script(text))
    command.wait_for("ready0", "ready1")
    (path,) = jobs.iterdir()
    assert len(list(path.glob("*.recorder"))) == 4
    read = job_reader.read_job()
    assert (read.attempt, read.problems) == (1, ())
    assert [rank.pid for rank in read.ranks] == [
        rank.start and rank.start.pid for rank in read.ranks
    ]
    assert [rank.reports[-1].step for rank in read.ranks] == [1, 1]
    assert [rank.start and rank.start.code for rank in read.ranks] == [None, None]
    (command.folder / "go").touch()
    run.communicate(timeout=LIMIT)
    assert run.returncode == 0
    assert list(jobs.iterdir()) == []


@pytest.mark.slow
def test_a_job_without_a_group_is_not_explained(command: Command) -> None:
    code, _, err = command.run("run", "--nproc-per-node", 2, command.script("raise SystemExit(3)"))
    assert code == 3
    assert "explain" not in err
    (job,) = list_jobs(command)
    assert job["state"] == "failed"


def test_a_missing_script_leaves_no_job(command: Command, jobs: Path) -> None:
    assert command.run("run", "nothing.py")[0] == 2
    assert not jobs.exists()


@pytest.mark.slow
def test_old_jobs_are_removed_when_a_new_one_starts(
    command: Command, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_JOBS_KEPT", "2")
    run = command.start("run", "--nproc-per-node", 1, command.script(WAIT_FOR_GO))
    command.wait_for("ready0")
    running = job_directory.list_jobs()[0]
    old = [make_job_name() for _ in range(4)]
    for number, name in enumerate(old):
        with JobDirectory(str(jobs), name, create=True) as job:
            job.write_description(1)
        os.utime(jobs / name, (1000 + number,) * 2)
    assert command.run("run", "--nproc-per-node", 1, command.script("raise SystemExit(3)"))[0] == 3
    states = {job["name"]: job["state"] for job in list_jobs(command)}
    assert sorted(states.values()) == ["failed"] * 3 + ["running"]
    assert states[running] == "running"
    assert {*old[2:], running} < set(states)
    code, out, _ = command.run("jobs", "--remove-ended")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert [path.name for path in jobs.iterdir()] == [running]
    (command.folder / "go").touch()
    run.communicate(timeout=LIMIT)
    assert command.run("jobs", "--remove-ended")[1] == "nothing to remove: no job has ended\n"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("variable", "value"),
    [("PHALANX_JOBS_KEPT", "many"), ("PHALANX_JOBS_DIR", "here"), ("PHALANX_JOB", "../x")],
)
def test_malformed_variables_are_one_line(command: Command, monkeypatch, variable, value) -> None:
    monkeypatch.setenv(variable, value)
    code, out, err = command.run("run", "--nproc-per-node", 1, command.script(JOIN_GROUP))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"phalanx: error: {variable}='{value}' in the environment: expected ")
    with pytest.raises(UsageError, match=variable):
        phalanx.launch(os.getpid, 1)


def test_help_of_jobs_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom phalanx.cli import main\ntry:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    for arguments, words in (
        (["jobs", "--help"], ["--remove-ended", "PHALANX_JOBS_KEPT", "Only you can read"]),
        (["jobs"], ["no jobs in"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "COLUMNS": "100", "PHALANX_JOBS_DIR": "/nowhere/jobs"},
        )
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr
        assert all(word in done.stdout for word in words)


@pytest.mark.slow
def test_output_of_jobs_is_escaped(command: Command, jobs: Path) -> None:
    malicious = "\x1b[2J\u202e\n[bold]x"
    code, _, _ = command.run("run", "--nproc-per-node", 1, command.script("sys"), malicious)
    assert code == 1
    (name,) = job_directory.list_jobs()
    (jobs / name / "launcher.jsonl").unlink()
    os.mkfifo(jobs / name / "launcher.jsonl")
    os.symlink(jobs / name, jobs / "20261121-0901-k3f9x2")
    code, out, err = command.run("jobs")
    assert code == 0
    assert not set(out + err) & {"\x1b", "\u202e"}
    assert "failed" in out
    assert f"{name}: launcher.jsonl is a FIFO, expected a file\n" in err
    assert "20261121-0901-k3f9x2 is a symbolic link, expected a directory" in err


@pytest.mark.slow
def test_phalanx_launch(jobs: Path) -> None:
    def rank(fail: bool) -> str:
        import torch
        import torch.distributed as dist

        import phalanx

        with phalanx.init(device="cpu") as session:
            dist.all_reduce(torch.ones(1))
            if fail and session.rank == 1:
                raise ValueError("the cause")
            dist.barrier()
        return os.environ["PHALANX_JOB"]

    before = os.environ.copy()
    names = phalanx.launch(rank, 2, (False,), timeout=LIMIT)
    assert len(set(names)) == 1
    assert list(jobs.iterdir()) == []
    with pytest.raises(LaunchError, match="the cause") as caught:
        phalanx.launch(rank, 2, (True,), timeout=LIMIT)
    job = job_reader.read_job()
    assert str(caught.value).endswith(
        f"To see what the ranks were doing: phalanx explain {job.name}"
    )
    assert (job.code, job.world_size) == (1, 2)
    assert job.ranks[1].exception == "ValueError: the cause"
    assert [rank.start.code for rank in job.ranks if rank.start][1] == 1
    assert os.environ == before
    assert not job.running


@pytest.mark.slow
def test_interrupted_phalanx_launch(jobs: Path, tmp_path: Path) -> None:
    code = (
        "import phalanx, sys, time, pathlib\n"
        "def rank():\n"
        "    import phalanx\n"
        "    phalanx.init(device='cpu')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(50)\n"
        "phalanx.launch(rank, 2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        watchdog = threading.Timer(LIMIT, caller.kill)
        watchdog.start()
        assert caller.stdout is not None
        assert [caller.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        caller.send_signal(signal.SIGINT)
        caller.communicate(timeout=LIMIT)
        watchdog.cancel()
    job = job_reader.read_job()
    assert job.code == 130
    assert [rank.start.stopped for rank in job.ranks if rank.start] == [True, True]
    with job_directory.find_job() as found:
        assert job_reader.read_summary(found).state == "failed"


@pytest.mark.parametrize("name", ["PHALANX_JOB", "PHALANX_JOBS_DIR"])
def test_phalanx_launch_sets_the_job_itself(name: str) -> None:
    with pytest.raises(UsageError, match=f"env sets {name}, which phalanx.launch sets"):
        phalanx.launch(os.getpid, 1, env={name: "x"})


@pytest.mark.slow
def test_a_launch_within_a_rank_is_a_separate_job(jobs: Path) -> None:
    def inner() -> str:
        import phalanx

        phalanx.init(device="cpu").close()
        return os.environ["PHALANX_JOB"]

    def outer() -> tuple[str, list[str]]:
        import phalanx

        return os.environ["PHALANX_JOB"], phalanx.launch(inner, 2, timeout=30)

    ((outer_job, inner_jobs),) = phalanx.launch(outer, 1, timeout=LIMIT)
    assert len(set(inner_jobs)) == 1
    assert outer_job not in inner_jobs
    assert list(jobs.iterdir()) == []


DDP = (
    JOIN_GROUP
    + """
import atexit
from torch.nn.parallel import DistributedDataParallel

pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
dist.barrier()

def wait_for_the_end_of_rank_0():
    stat = pathlib.Path("/proc", pathlib.Path("pid0").read_text(), "stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.005)
    if sys.argv[1:] == ["lingers"]:
        time.sleep(600)  # the launcher stops it

model = DistributedDataParallel(torch.nn.Linear(8, 8))
if rank == 1:
    atexit.register(wait_for_the_end_of_rank_0)
    raise ValueError("the cause")
model(torch.ones(8)).sum().backward()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ends", "lingers"])
def test_an_error_wrapped_by_ddp_is_a_consequence(command: Command, end: str) -> None:
    """DDP's C++ wraps PeerLost in a RuntimeError, which here is reported before the cause."""
    code, _, err = command.run("run", "--nproc-per-node", 2, command.script(DDP), end)
    assert code == 1
    headline = next(line for line in err.splitlines() if line.startswith("phalanx run: "))
    assert headline.startswith("phalanx run: rank 1 ")
    verdict = json.loads(command.run("explain", "--json")[1])["diagnosis"]
    assert (verdict["kind"], verdict["ranks"]) == ("failed", [1])
    assert job_reader.read_job().ranks[0].exception.startswith("RuntimeError: ")
