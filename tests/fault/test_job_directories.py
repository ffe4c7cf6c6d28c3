"""Jobs whose directory cannot be created: the job continues with a single warning."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import UsageError
from phalanx.recorder.launcher_log_writer import LauncherLogWriter
from tests import copies
from tests.ports import find_free_port
from tests.ranks import RankServer, RunningRanks

LIMIT = 100
Start = Callable[..., tuple[int, str, str]]

SCRIPT = """
import os, sys
import torch, torch.distributed as dist, phalanx
if os.environ.get("FULL"):
    import errno
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")
    os.posix_fallocate = full
with phalanx.init(device="cpu") as session:
    for step in range(100):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        phalanx.report(step=step, loss=0.5, note="a note")
    assert tensor.tolist() == [session.world_size] * 3
    group = dist.new_group([0])
print("well")
"""

SPAWN = """
import subprocess, sys, os
ranks = [
    subprocess.Popen(
        [sys.executable, sys.argv[1]],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": sys.argv[2],
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3]},
    )
    for rank in range(int(sys.argv[2]))
]
sys.exit(max(rank.wait(60) for rank in ranks))
"""

RUN = [copies.PHALANX, "run", "--nproc-per-node", "2"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Run two ranks with or without a launcher, optionally on a separate file system."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "spawn.py").write_text(SPAWN)

    def run(launcher: str, base: Path, mount: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setenv("PHALANX_JOBS_DIR", str(base))
        command = [*RUN, "script.py"]
        if launcher == "none":
            command = [sys.executable, "spawn.py", "script.py", "2", str(find_free_port())]
        if mount is not None:
            command = [*unshared(mount, base), *command]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    return run


def unshared(mount: str, path: Path) -> list[str]:
    """The prefix of a command that runs with a new file system at `path`, visible only to it."""
    script = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", mount, str(path)]


def can_mount(path: Path) -> bool:
    try:
        return subprocess.run([*unshared("size=4k", path), "true"], timeout=LIMIT).returncode == 0
    except FileNotFoundError:
        return False


def check(ended: tuple[int, str, str], reason: str) -> None:
    code, out, err = ended
    assert code == 0, err
    assert out.count("well") == 2
    assert err.count("\n") == 1, err
    assert reason in err
    assert "the job continues" in err


FULL = [
    (
        "size=256k,mode=0700",
        "No space left on device",
    ),  # enough for the directory, but not for a flight recorder
    (
        "nr_inodes=2,mode=0700",
        "No space left on device",
    ),  # enough for the directory, not for its files
    ("ro,mode=0700", "cannot be created (Read-only file system): choose another directory"),
]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("launcher", ("run", "none"))
@pytest.mark.parametrize(("mount", "reason"), FULL, ids=("full", "no inodes", "read-only"))
def test_unwritable_file_system(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    mount: str,
    reason: str,
) -> None:
    base = tmp_path / "jobs"
    base.mkdir(0o700)
    if can_mount(base):
        check(start(launcher, base, mount), reason)
    else:  # some containers forbid mounts: simulate the failure of the call instead
        monkeypatch.setenv("FULL", "1")
        check(start(launcher, base), "No space left on device")
    assert list(base.iterdir()) == []


def symbolic_link(path: Path) -> Path:
    path.with_name("target").mkdir()
    path.symlink_to("target")
    return path


def directory_of_another_user(path: Path) -> Path:
    if os.geteuid() != 0:
        return Path("/")  # owned by root
    path.mkdir()
    os.chown(path, 12345, -1)
    return path


def writable_by_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


def path_below_a_file(path: Path) -> Path:
    path.touch()
    return path / "jobs"


INVALID_PATHS = [
    (
        symbolic_link,
        "is a symbolic link, expected a directory: remove it, or choose another directory",
    ),
    (directory_of_another_user, "belongs to user"),
    (writable_by_all, "is writable by others (its mode is 0777, expected 0700)"),
    (path_below_a_file, "cannot be created (Not a directory)"),
]


def run_without_job_directory(base: Path, job: str = "") -> None:
    os.environ.update(PHALANX_JOBS_DIR=str(base), PHALANX_JOB=job)
    url = f"file://{os.environ['FOLDER']}/store"
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "phalanx", init_method=url, rank=int(os.environ["RANK"]), world_size=size
    )
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    phalanx.report(step=1, loss=0.5, note="a note")
    assert tensor.tolist() == [size] * 3
    dist.new_group([0])
    print("well")


def combined_output(run: RunningRanks) -> tuple[int, str, str]:
    ended = run.join()
    texts = "".join(rank.stdout for rank in ended), "".join(rank.stderr for rank in ended)
    return max(rank.code for rank in ended), *texts


@pytest.mark.parametrize(("make_directory", "reason"), INVALID_PATHS)
def test_unsafe_jobs_directory(
    ranks: RankServer, tmp_path: Path, make_directory: Callable[[Path], Path], reason: str
) -> None:
    base = make_directory(tmp_path / "jobs")
    check(combined_output(ranks.start(2, run_without_job_directory, base, timeout=None)), reason)
    if base.is_dir() and base != Path("/"):
        assert list(base.iterdir()) == []


@pytest.mark.parametrize(("make_directory", "reason"), INVALID_PATHS)
def test_unsafe_jobs_directory_in_launcher(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make_directory: Callable[[Path], Path],
    reason: str,
) -> None:
    """The launcher disables flight recorder files for its ranks."""
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(make_directory(tmp_path / "jobs")))
    with caplog.at_level(logging.WARNING, "phalanx"), LauncherLogWriter(2) as launcher_log:
        assert launcher_log.environment() == {"PHALANX_JOB": "none"}
        launcher_log.start(0, 1)
        launcher_log.end(0, 1, 3, stopped=False)
        assert not launcher_log.finish(3)
    (record,) = caplog.records
    assert reason in record.getMessage()


@pytest.mark.slow
def test_unsafe_jobs_directory_in_run(start: Start, tmp_path: Path) -> None:
    base = symbolic_link(tmp_path / "jobs")
    check(start("run", base), "is a symbolic link, expected a directory")


def test_flight_recorders_in_memory_on_request(ranks: RankServer, tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    code, out, err = combined_output(
        ranks.start(2, run_without_job_directory, base, "none", timeout=None)
    )
    assert (code, out.count("well"), err) == (0, 2, "")
    assert not base.exists()


def test_no_job_on_request_with_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: Path
) -> None:
    monkeypatch.setenv("PHALANX_JOB", "none")
    assert phalanx.launch(os.getenv, 1, ("PHALANX_JOB",)) == ["none"]
    assert not jobs.exists()


def test_job_that_has_been_removed(ranks: RankServer, tmp_path: Path) -> None:
    """Ranks with the environment of a job that has ended, for example started by its server."""
    base, name = tmp_path / "jobs", "20261121-0901-k3f9x2"
    base.mkdir(0o700)
    run = ranks.start(2, run_without_job_directory, base, name, timeout=None)
    check(
        combined_output(run),
        f"PHALANX_JOB names the job {name}, which does not exist in {base}: unset it",
    )
    assert list(base.iterdir()) == []


def test_malformed_variables_raise_on_every_rank(ranks: RankServer, tmp_path: Path) -> None:
    for rank in ranks.start(2, run_without_job_directory, "relative", timeout=None).join():
        assert isinstance(rank.error, UsageError)
        assert "PHALANX_JOBS_DIR='relative'" in str(rank.error)
    for rank in ranks.start(
        2, run_without_job_directory, tmp_path / "jobs", "../../x", timeout=None
    ).join():
        assert isinstance(rank.error, UsageError)
    assert not (tmp_path / "jobs").exists()
