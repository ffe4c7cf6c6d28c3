"""The arguments of `phalanx run` and of the commands that read jobs, without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import ArgumentTypeError, UsageError
from phalanx.launcher.arguments import describe_misplaced_options, parse_arguments
from tests.job_directories import JobFixture

COMMAND = (
    "import sys\nfrom phalanx.cli import main\n"
    "try:\n    main()\nfinally:\n    sys.stderr.write(f\"torch: {'torch' in sys.modules}\")\n"
)


def run_alone(*arguments: str, **environment: str) -> tuple[int, str, bool]:
    """Run a command; returns its code, its output and errors, and whether it imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=100,
    )
    text, _, is_imported = (done.stdout + done.stderr).rpartition("torch: ")
    return done.returncode, text, {"True": True, "False": False}[is_imported]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two scripts, which is the working directory."""
    for name in ("train.py", "evaluate.py"):
        (tmp_path / name).write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bad", "unrecognized arguments: --bad; `phalanx run --help`"),
        ("--nproc-per-nodes 2 train.py", "did you mean `--nproc-per-node 2`?"),
        ("--nproc_per_nodes=2 train.py", "did you mean `--nproc-per-node 2`?"),
        ("--tee 3 --elastc train.py", "unrecognized arguments: --elastc; did you mean `--elastic`"),
        ("-n 2 train.py", "unrecognized arguments: -n; did you mean `--nproc-per-node 2`?"),
        ("-np4 train.py", "did you mean `--nproc-per-node 4`?"),
        ("--nproc 2 train.py", "did you mean `--nproc-per-node 2`?"),
        ("--num_processes 2 train.py", "did you mean `--nproc-per-node 2`?"),
        ("--hostfile hosts train.py", "did you mean `--hosts @hosts`?"),
        ("-t3 -q train.py", "unrecognized arguments: -q; `phalanx run --help`"),
        ("", "no script: expected"),
        ("--max-restarts 3", "no script: expected"),
        ("--max-restarts x train.py", "argument --max-restarts"),
        ("--max-restarts -1 train.py", "--max-restarts is -1: expected an integer, at least 0"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node is 0: expected an integer"),
        ("--nproc-per-node atuo train.py", "did you mean 'auto'?"),
        ("--elastic --nproc-per-node 4:2 train.py", "expected MIN:MAX with MIN <= MAX"),
        ("--nproc-per-node 2:4 train.py", "give --elastic too"),
        ("--nproc-per-node 2 --simulate-hosts 3 train.py", "expected an integer from 1 to 2"),
        ("--simulate-hosts x train.py", "--simulate-hosts is 'x': expected an integer"),
        ("--nnodes 2 --node-rank 5 train.py", "--node-rank is 5: expected 0 to 1"),
        ("--tee 7 train.py", "--tee is '7': expected 0, 1 (stdout)"),
        ("--local-ranks-filter a train.py", "expected a comma-separated list of integers"),
        ("--replace glo train.py", "'glo' cannot be replaced"),
        ("--rejoin 3 train.py", "give --elastic too"),
        ("--ssh ssh train.py", "give --hosts too"),
        ("--hosts a:x train.py", "'a:x' has 'x' as its number of ranks"),
        ("--key-file none train.py", "--key-file is none, which cannot be read"),
        ("tran.py", "there is no script 'tran.py'"),
        ("train", "did you mean 'train.py'?"),
        ("sub/train.py", "there is no script 'sub/train.py'"),
        ("-m trian", "did you mean 'train'?"),
        ("-m train.py", "omit it to run the script 'train.py'"),
    ],
)
def test_mistakes(folder: Path, words: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_arguments(words.split())


def test_a_script_elsewhere(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/train.py").touch()
    message = "there is no script 'sub/trian.py'.*; did you mean 'sub/train.py'"
    with pytest.raises(UsageError, match=message):
        parse_arguments(["sub/trian.py"])


def test_options_after_the_script_are_the_scripts(folder: Path) -> None:
    args = parse_arguments(["train.py", "--nproc-per-node", "2", "--lr", "1", "--tee=3", "--hel"])
    assert args.training_script_args == ["--nproc-per-node", "2", "--lr", "1", "--tee=3", "--hel"]
    note = describe_misplaced_options(args)
    assert note.startswith("train.py got --nproc-per-node, --tee=3: options of `phalanx run` come")
    assert describe_misplaced_options(parse_arguments(["train.py", "--lr", "1", "--help"])) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --nproc-per-node tow train.py", "--nproc-per-node is 'tow'"),
        ("run --hosts a: train.py", "--hosts is 'a:'"),
        ("run --hosts a,b --export = train.py", "--export is '='"),
        ("rnu train.py", "did you mean `phalanx run train.py`?"),
        ("explain missing", "there is no job 'missing'"),
        ("watch missing", "there is no job 'missing'"),
        ("trace missing", "there is no job 'missing'"),
        ("jobs --remove missing", "there is no job 'missing'"),
        ("key train.py", "train.py"),
        ("examples .", "exists"),
    ],
)
def test_a_mistake_is_answered_without_torch(
    folder: Path, jobs: Path, words: str, message: str
) -> None:
    code, text, is_imported = run_alone(*words.split())
    assert (code, is_imported) == (2, False), text
    assert message in text


def test_a_mistake_is_answered_before_modules_are_preloaded(folder: Path) -> None:
    code, text, is_imported = run_alone("run", "--bad", "train.py", PHALANX_PRELOAD="torch")
    assert (code, is_imported) == (2, False), text
    assert "unrecognized arguments: --bad" in text


@pytest.mark.parametrize(
    "words",
    [
        *("--help", "--version", "run --help", "doctor --help", "jobs", "explain"),
        *("explain --json", "watch --once"),
    ],
)
def test_what_reads_a_job_needs_no_torch(jobs: Path, job: JobFixture, words: str) -> None:
    code, text, is_imported = run_alone(*words.split())
    assert (code, is_imported) == (int(words == "watch --once"), False), text  # the job has failed
    assert text


def test_errors_of_wrong_calls_have_their_public_name() -> None:
    for kind in (UsageError, ArgumentTypeError):
        assert kind.__module__ == "phalanx.errors"
    assert issubclass(UsageError, ValueError)
    assert issubclass(UsageError, RuntimeError)
