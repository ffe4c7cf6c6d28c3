"""Directories of jobs: private, found by name, and removed only after the job has ended."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from pathlib import Path

import pytest

from phalanx import env
from phalanx.recorder.job_directory import (
    JobDirectory,
    UnusableFileError,
    list_job_names,
    make_job_name,
    prune,
)
from tests.descriptors import list_descriptors

KEPT = (20, 2**28)


def make(base: Path, name: str | None = None, size: int = 0, time: float | None = None) -> str:
    """Create the directory of an ended job, with a file of `size` bytes."""
    with JobDirectory(str(base), name or make_job_name(), create=True) as job:
        fd = job.create("1.recorder")
        os.posix_fallocate(fd, 0, size or 1)
        os.close(fd)
        if time is not None:
            os.utime(job.path, (time, time))
        return job.name


def test_names_consist_of_the_time_and_a_random_suffix() -> None:
    made = {make_job_name() for _ in range(1000)}
    assert len(made) == 1000
    assert all(env.JOB_NAME.fullmatch(name) for name in made)


def test_the_first_of_several_processes_decides_the_content(tmp_path: Path) -> None:
    name = make_job_name()
    with (
        JobDirectory(str(tmp_path / "jobs"), name, create=True) as job,
        JobDirectory(str(tmp_path / "jobs"), name) as other,
    ):
        assert job.create_once("x.first", b"3") == b"3"
        assert other.create_once("x.first", b"12345") == b"3"
        assert job.create_once("y.first", b"") == b""
        assert sorted(os.listdir(job.fd)) == ["x.first", "y.first"]


def test_only_the_user_can_read_the_files(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    before = os.umask(0)
    try:
        with JobDirectory(str(base), make_job_name(), create=True) as job:
            job.write_description(2)
            os.close(job.create("812.recorder"))
            found = {path: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    directory = base / job.name
    assert found == {
        base: 0o700,
        directory: 0o700,
        directory / "job.json": 0o600,
        directory / "812.recorder": 0o600,
    }


def another_users(path: Path) -> Path:
    """Return a directory of another user; for users other than root, the root directory."""
    if os.geteuid() != 0:
        return Path("/")
    path.mkdir()
    os.chown(path, 12345, -1)
    return path


def a_symbolic_link(path: Path) -> Path:
    path.with_name("target").mkdir(0o700)
    path.symlink_to("target")
    return path


def a_link_with_a_slash(path: Path) -> str:
    return f"{a_symbolic_link(path)}/"


def a_file(path: Path) -> Path:
    path.write_text("")
    return path


def a_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def writable_by_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o1777)
    return path


def writable_by_the_group(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o770)
    return path


def below_a_file(path: Path) -> Path:
    return a_file(path) / "jobs"


def without_a_parent(path: Path) -> Path:
    return path / "jobs"


REJECTED = [
    (
        another_users,
        r"belongs to user \d+, and this process runs as user \d+: remove it, or choose",
    ),
    (a_symbolic_link, r"is a symbolic link, expected a directory: remove it, or choose"),
    (a_link_with_a_slash, r"is a symbolic link, expected a directory"),
    (a_file, "is a file, expected a directory"),
    (a_fifo, "is a FIFO, expected a directory"),
    (writable_by_all, r"is writable by others \(its mode is 1777, expected 0700\): chmod it"),
    (writable_by_the_group, r"is writable by others \(its mode is 0770"),
    (
        below_a_file,
        r"cannot be created \(Not a directory\): choose another directory with PHALANX_JOBS_DIR",
    ),
    (without_a_parent, r"cannot be created \(No such file or directory\): choose"),
]


@pytest.mark.parametrize(
    ("create_path", "message"), REJECTED, ids=[create.__name__ for create, _ in REJECTED]
)
def test_a_directory_that_is_not_private_is_rejected(
    tmp_path, monkeypatch, create_path, message
) -> None:
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(create_path(tmp_path / "jobs")))
    before = list_descriptors()
    with pytest.raises(UnusableFileError, match=message):
        JobDirectory(env.jobs_directory(), make_job_name(), create=True)
    assert list_descriptors() == before


# Only root can create a directory of another user.
IN_A_BASE = [case for case in REJECTED[:7] if os.geteuid() == 0 or case[0] is not another_users]


@pytest.mark.parametrize(
    ("create_path", "message"), IN_A_BASE, ids=[create.__name__ for create, _ in IN_A_BASE]
)
def test_the_directory_of_a_job_is_checked(tmp_path, create_path, message) -> None:
    base = tmp_path / "jobs"
    name = make(base)
    os.rename(base / name, tmp_path / "aside")
    create_path(base / name)
    with pytest.raises(UnusableFileError, match=message):
        JobDirectory(str(base), name, create=True)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    with JobDirectory(str(tmp_path / "jobs"), make_job_name(), create=True) as job:
        for name in ("1.recorder", f"job.json.{os.getpid()}"):
            os.symlink(tmp_path / "victim", f"{job.path}/{name}")
        with pytest.raises(FileExistsError):
            job.create("1.recorder")
        with pytest.raises(FileExistsError):
            job.write_description(1)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_job_has_ended_when_its_directory_is_unlocked(tmp_path: Path) -> None:
    base, name = str(tmp_path / "jobs"), make_job_name()
    first = JobDirectory(base, name, create=True)
    second, reader = JobDirectory(base, name), JobDirectory(base, name)
    assert reader.has_ended()
    first.lock_shared()
    second.lock_shared()
    assert not reader.has_ended()
    assert not first.lock_exclusive()  # and releases the shared lock
    assert not reader.has_ended()
    assert second.lock_exclusive()
    assert not reader.has_ended()
    second.close()
    second.close()
    assert reader.has_ended()
    first.close()
    reader.close()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    job = JobDirectory(str(tmp_path / "jobs"), make_job_name(), create=True)
    job.lock_shared()
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            here.close()
            there.send(b"closed" if job.fd == -1 else b"open")
            there.recv(1)  # until the parent has checked
        os._exit(0)
    there.close()
    with here, JobDirectory(str(tmp_path / "jobs"), job.name) as reader:
        assert here.recv(10) == b"closed"
        assert not reader.has_ended()
        job.close()
        assert reader.has_ended()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_removed_directory_cannot_be_locked(tmp_path: Path) -> None:
    base, name = str(tmp_path / "jobs"), make_job_name()
    late = JobDirectory(base, name, create=True)
    make(tmp_path / "jobs")
    with JobDirectory(base, name) as other:
        assert other.lock_exclusive()
        other.remove()
    with pytest.raises(UnusableFileError, match="has just been removed"):
        late.lock_shared()
    # A new directory of that name is another directory.
    JobDirectory(base, name, create=True).close()
    with pytest.raises(UnusableFileError, match="has just been removed"):
        late.lock_shared()
    late.remove()
    assert name in list_job_names(base)


def test_removal_follows_no_link_and_removes_everything(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    name = make(base)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("")
    (base / name / "link").symlink_to(tmp_path / "precious")
    (base / name / "2.recorder").mkdir()
    (base / name / "2.recorder/deep").mkdir()
    os.mkfifo(base / name / "3.recorder")
    with JobDirectory(str(base), name) as job:
        job.remove()
    assert list(base.iterdir()) == []
    assert (tmp_path / "precious/file").exists()


def test_pruning_keeps_the_newest_ended_jobs_and_all_running_jobs(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    ended = [make(base, time=1000.0 + number) for number in range(6)]
    running = JobDirectory(str(base), make(base, time=1.0))
    running.lock_shared()
    prune(str(base), (10, 2**30))
    assert set(list_job_names(str(base))) == {*ended, running.name}
    prune(str(base), (4, 2**30))
    assert set(list_job_names(str(base))) == {*ended[2:], running.name}
    prune(str(base), (0, 0))
    assert list_job_names(str(base)) == [running.name]
    running.close()


def test_pruning_limits_the_bytes(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    ended = [make(base, size=2**20, time=1000.0 + number) for number in range(5)]
    prune(str(base), (100, 2**20 * 7 // 2))
    assert set(list_job_names(str(base))) == set(ended[2:])


def test_pruning_ignores_files_that_are_not_jobs(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    make(base)
    (base / "notes.txt").write_text("mine")
    (base / "20261121-0901-k3f9x2").write_text("a file with a job's name")
    (base / "20261121-0901-k3f9x3").symlink_to(tmp_path)
    prune(str(base), (0, 0))
    left = {"notes.txt", "20261121-0901-k3f9x2", "20261121-0901-k3f9x3"}
    assert {path.name for path in base.iterdir()} == left


def test_a_missing_base_directory_has_no_jobs(tmp_path: Path) -> None:
    assert list_job_names(str(tmp_path / "jobs")) == []
    prune(str(tmp_path / "jobs"), KEPT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, f"/tmp/phalanx-{os.geteuid()}"),
        ({"TMPDIR": "/var/tmp"}, f"/var/tmp/phalanx-{os.geteuid()}"),
        ({"TMPDIR": "relative"}, f"/tmp/phalanx-{os.geteuid()}"),
        ({"PHALANX_JOBS_DIR": "/a/b//", "TMPDIR": "/var/tmp"}, "/a/b"),
    ],
)
def test_the_base_directory_of_jobs(environ: dict[str, str], expected: str) -> None:
    assert env.jobs_directory(environ) == expected


@pytest.mark.parametrize(
    ("call", "environ", "message"),
    [
        (env.jobs_directory, {"PHALANX_JOBS_DIR": "jobs"}, "'jobs' in .*: expected an absolute"),
        (env.jobs_kept, {"PHALANX_JOBS_KEPT": "-1"}, "PHALANX_JOBS_KEPT=-1 .*from 0 up"),
        (env.jobs_kept, {"PHALANX_JOBS_KEPT_MIB": "1GB"}, "PHALANX_JOBS_KEPT_MIB='1GB'"),
        (env.job, {"PHALANX_JOB": "../../etc"}, r"PHALANX_JOB='\.\./\.\./etc' .*unset it"),
        (env.job, {"PHALANX_JOB": "20261121-0901-k3f9x2\n"}, "PHALANX_JOB="),
        (env.job, {"PHALANX_JOB": "\uff120261121-0901-k3f9x2"}, "PHALANX_JOB="),
    ],
)
def test_malformed_variables(call, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(environ)


def test_valid_variables() -> None:
    assert env.job({}) is None
    assert env.job({"PHALANX_JOB": ""}) is None
    assert env.job({"PHALANX_JOB": "none"}) == "none"
    assert env.job({"PHALANX_JOB": "20261121-0901-k3f9x2"}) == "20261121-0901-k3f9x2"
    assert env.jobs_kept({}) == (20, 256 * 2**20)
    assert env.jobs_kept({"PHALANX_JOBS_KEPT": "0", "PHALANX_JOBS_KEPT_MIB": "1"}) == (0, 2**20)


def test_the_documentation_of_the_variables_has_the_same_defaults() -> None:
    docs = env.VARIABLES
    count, size = env.jobs_kept({})
    assert re.search(rf"Unset: {count}\.", docs["PHALANX_JOBS_KEPT"])
    assert re.search(rf"Unset: {size // 2**20}\.", docs["PHALANX_JOBS_KEPT_MIB"])
