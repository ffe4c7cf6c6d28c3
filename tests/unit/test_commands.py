"""The commands on jobs: what they do where something is in their way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import jobs as jobs_command
from phalanx.cli import main, run
from phalanx.errors import UsageError
from phalanx.observe import explain, job_lookup, job_reader
from phalanx.observe.job_directory import JobDirectory, describe_job, make_job_name
from tests.made_jobs import JobFixture
from tests.synthetic_jobs import build_straggling_job


def made(jobs: Path, command: str = "train.py") -> str:
    """A job that has ended, without a rank."""
    with JobDirectory(str(jobs), make_job_name(), create=True) as job:
        job.write_description({**describe_job(job.name, 1), "command": [command]})
        return job.name


def test_a_terminal_that_lacks_characters_gets_their_numbers(jobs: Path, job: JobFixture) -> None:
    other = made(jobs, "träin.py")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for arguments in (["jobs"], ["explain", other], ["explain", job.name], ["watch", job.name]):
        done = subprocess.run(
            [sys.executable, "-c", "from phalanx.cli import main; main()", *arguments],
            capture_output=True,
            env={**environment, "COLUMNS": "200"},
            timeout=60,
        )
        assert b"Traceback" not in done.stderr, done.stderr
        assert (b"tr\\xe4in.py" in done.stdout) is (job.name not in arguments)
        assert b"\\u2500" not in done.stdout, "what a table is drawn with"


def test_a_job_that_is_gone_does_not_keep_others_from_being_removed(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [made(jobs) for _ in range(3)]
    listed = jobs_command._read_summaries()
    JobDirectory(str(jobs), listed[0][0].name).remove()
    gone = listed[0][0].name
    monkeypatch.setattr(jobs_command, "_read_summaries", lambda: listed)
    monkeypatch.setattr("sys.argv", ["phalanx", "jobs", "--remove-ended"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert {*shown.out.splitlines()} == {f"removed {name}" for name in names if name != gone}
    assert f"there is no job '{gone}'" in shown.err
    assert job_lookup.list_jobs() == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("no such job"), "no such job"),
        (OSError("a disk"), "a disk"),
        (KeyError("a\x1bbug"), r"KeyError: 'a\x1bbug'"),
    ],
)
@pytest.mark.parametrize("where", ["read", "render"])
def test_what_can_not_be_explained_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: Exception,
    words: str,
) -> None:
    """And nothing is raised, that the exit code of the job may come out."""

    def fail(*_: object) -> None:
        raise error

    read = fail if where == "read" else lambda _: build_straggling_job(2, 1)
    monkeypatch.setattr(job_reader, "read_job", read)
    monkeypatch.setattr(explain, "as_text", fail)
    run._explain("20261121-0901-k3f9x2")
    assert capsys.readouterr().err == f"\nphalanx run: can't explain it: {words}\n"
