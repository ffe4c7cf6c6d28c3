"""The commands on jobs when something is missing or fails."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from phalanx.cli import jobs as jobs_command
from phalanx.cli import main, run
from phalanx.diagnosis import explain, job_reader
from phalanx.errors import UsageError
from phalanx.recorder import job_directory
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from tests.job_directories import JobFixture
from tests.synthetic_jobs import build_straggling_job


def make_ended_job(jobs: Path, command: str = "train.py") -> str:
    """Create a job that has ended, without ranks."""
    with JobDirectory(str(jobs), make_job_name(), create=True) as job:
        job.write_description(1, command=[command])
        return job.name


def test_characters_that_the_terminal_lacks_are_escaped(jobs: Path, job: JobFixture) -> None:
    other = make_ended_job(jobs, "träin.py")
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
        assert b"\\u2500" not in done.stdout, (
            "table borders must not use characters that the terminal lacks"
        )


def test_a_missing_job_does_not_prevent_the_removal_of_others(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [make_ended_job(jobs) for _ in range(3)]
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
    assert job_directory.list_jobs() == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("no such job"), "no such job"),
        (OSError("a disk"), "a disk"),
        (KeyError("a\x1bbug"), r"KeyError: 'a\x1bbug'"),
    ],
)
@pytest.mark.parametrize("where", ["read", "render"])
def test_a_failure_to_explain_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: Exception,
    words: str,
) -> None:
    """Nothing is raised, so that `phalanx run` returns the exit code of the job."""

    def fail(*_: object) -> None:
        raise error

    read = fail if where == "read" else lambda _: build_straggling_job(2, 1)
    monkeypatch.setattr(job_reader, "read_job", read)
    monkeypatch.setattr(explain, "as_text", fail)
    run._explain("20261121-0901-k3f9x2")
    assert capsys.readouterr().err == f"\nphalanx run: can't explain it: {words}\n"


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx", "--version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    versions = (metadata.version("phalanx"), metadata.version("torch"))
    assert capsys.readouterr().out == "phalanx {}, torch {}\n".format(*versions)


def test_completion_in_bash() -> None:
    """Completion, which `phalanx --install-completion` sets up, knows the subcommands."""
    request = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": "phalanx e", "COMP_CWORD": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", "from phalanx.cli import main; main()"],
        capture_output=True,
        text=True,
        env={**os.environ, **request},
        timeout=60,
    )
    assert completed.stdout.split() == ["explain", "examples"], completed.stderr


def test_key_says_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.key"
    monkeypatch.setattr(sys, "argv", ["phalanx", "key", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert path.exists()
    assert capsys.readouterr().out.startswith(f"{path}: a new key")
