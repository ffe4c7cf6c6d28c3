"""Finding and removing jobs by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.diagnosis import job_reader
from phalanx.errors import UsageError
from phalanx.recorder import job_directory
from phalanx.recorder.job_directory import JobDirectory, make_job_name


def test_finding_a_job(jobs: Path) -> None:
    with pytest.raises(
        UsageError, match=f"there is no job in {jobs}: only running and failed jobs"
    ):
        job_directory.find_job()
    with pytest.raises(UsageError, match="there is no job 'x' in"):
        job_directory.find_job("x")
    made = ["20261121-0901-aaaaaa", "20261121-0902-bbbbbb", "20261121-0902-cccccc"]
    for number, name in enumerate(made):
        JobDirectory(str(jobs), name, create=True).close()
        os.utime(jobs / name, (1000 - number,) * 2)
    cases = [(None, made[0]), (made[1], made[1]), ("20261121-0901", made[0])]
    for text, name in [*cases, ("20261121-0902-c", made[2])]:
        with job_directory.find_job(text) as found:
            assert found.name == name
    assert job_directory.list_jobs() == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20261121-0902-bbbbbx", "did you mean .*20261121-0902-bbbbbb"),
        (
            "2026",
            "'2026' matches more than one job, 20261121-0902-bbbbbb or 20261121-0901-aaaaaa: "
            "give more",
        ),
        ("zzz", "there is no job 'zzz' in .*: expected 20261121.*`phalanx jobs` lists all"),
        ("", "there is no job ''"),
        ("../jobs/20261121-0901-aaaaaa", "there is no job '../jobs"),
        ("20261121-0901-aaaaaa/../..", "there is no job '20261121-0901-aaaaaa/"),
        ("/etc", "there is no job '/etc'"),
        ("..", "there is no job '..'"),
        ("a\0b", r"there is no job 'a\\x00b'"),
        ("\x1b[2J\u202e\n", r"there is no job '\\x1b\[2J\\u202e\\n'"),
        ("\ud800", r"there is no job '\\ud800'"),
        ("x" * 100_000, r"there is no job 'xxx.*\.\.\..*xxx'"),
    ],
)
def test_invalid_names(jobs: Path, text: str, message: str) -> None:
    for name in ("20261121-0901-aaaaaa", "20261121-0902-bbbbbb"):
        JobDirectory(str(jobs), name, create=True).close()
        os.utime(jobs / name, (int(name[12]),) * 2)
    with pytest.raises(UsageError, match=message) as caught:
        job_directory.find_job(text)
    assert len(str(caught.value)) < 400 + len(str(jobs))
    with pytest.raises(UsageError, match=message):
        job_directory.remove_job(text)
    assert len(job_directory.list_jobs()) == 2


def test_removing_a_job(jobs: Path) -> None:
    held = JobDirectory(str(jobs), make_job_name(), create=True)
    held.lock_shared()
    with pytest.raises(UsageError, match=f"job {held.name} is still running: end it first"):
        job_directory.remove_job(held.name)
    held.close()
    assert job_directory.remove_job(held.name[:-1]) == held.name
    assert list(jobs.iterdir()) == []


def test_an_unusable_directory_is_a_usage_error(jobs: Path) -> None:
    jobs.write_text("")
    with pytest.raises(UsageError, match="is a file, expected a directory"):
        job_reader.read_job()


def run_as_another_user(call: Callable[[], object]) -> str:
    """Return the exception that `call` raises in a process of another user.

    If this user is not root, the process is of this user.
    """
    reading_end, writing_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing"
        try:
            if os.geteuid() == 0:
                os.setresuid(12345, 12345, 12345)
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing_end, text.encode())
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def test_another_users_jobs_are_not_read(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JobDirectory(str(jobs), make_job_name(), create=True).close()
    if os.geteuid() != 0:
        monkeypatch.setenv("PHALANX_JOBS_DIR", "/root")
    for call in (job_directory.list_jobs, job_directory.find_job, job_reader.read_job):
        text = run_as_another_user(call)
        assert text.startswith("UsageError: "), text
        assert "cannot be opened (Permission denied)" in text or "belongs to user 0" in text
