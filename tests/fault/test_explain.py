"""`phalanx explain` with real processes: one of three goes wrong, and is named, alive and dead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.observe.diagnosis import diagnose
from phalanx.observe.explain import as_json, as_text
from phalanx.observe.job_reader import read_job
from tests.fault import explain_script
from tests.ranks import RankServer

SCRIPT = Path(explain_script.__file__)
COMMAND = [sys.executable, "-c", "from phalanx.cli import main; main()"]
LIMIT = 60.0
RANK_AT_FAULT = explain_script.RANK_AT_FAULT
# Which of them go on hanging: the others end at once, unless the ranks that are told stay.
HANGS = ("stopped", "busy", "unsent", "missing")
# Where the rank at fault is called from, and those who wait: the lines have these comments.
SITES = {"branch": "branch", "unsent": "unsent", "order": "order"}


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of jobs of this test alone."""
    folder = tmp_path / "jobs"
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(folder))
    return folder


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SCRIPT.parent
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def phalanx_run(scenario: str, seconds: float, *then: str) -> list[str]:
    options = ["run", "--nproc-per-node", "3", "--shutdown-timeout", "1"]
    return [*COMMAND, *options, str(SCRIPT), scenario, str(seconds), *then]


def explained(*arguments: str) -> str:
    """What the command prints."""
    result = subprocess.run(
        [*COMMAND, "explain", *arguments], capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def until(found: Callable[[], Any], what: str) -> Any:
    """Poll until this is true; what it was is returned."""
    deadline = time.monotonic() + LIMIT
    last = None
    while time.monotonic() < deadline:
        if last := found():
            return last
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}")


def is_named(kind: str) -> bool:
    """Whether the newest job has the rank at fault that is meant."""
    try:
        diagnosis = diagnose(read_job())
    except ValueError:  # there is no job yet
        return False
    return diagnosis.kind == kind and diagnosis.ranks == (RANK_AT_FAULT,)


def has_ended() -> bool:
    """Whether the launcher knows that the rank at fault has come to its end."""
    start = read_job().ranks[RANK_AT_FAULT].start
    return start is not None and start.code == 0


def line_of(comment: str) -> str:
    (line,) = (
        number
        for number, text in enumerate(SCRIPT.read_text().splitlines(), 1)
        if text.endswith(f"# {comment}")
    )
    return f"explain_script.py:{line}"


def check(scenario: str, kind: str = "") -> None:
    """What is said of the newest job names the rank at fault, why, and the lines."""
    kind = kind or scenario
    job = read_job()  # as the command does, which takes seconds to start
    diagnosis, text = as_json(job)["verdict"], as_text(job)
    assert (diagnosis["kind"], diagnosis["ranks"]) == (kind, [RANK_AT_FAULT]), text
    # The tense, and how long ago that was, may change from one reading to the next.
    assert f"\n{diagnosis['text'][0][:20]}" in text
    assert f"ank {RANK_AT_FAULT} " in diagnosis["text"][0]
    assert line_of("missing" if scenario == "missing" else "wait") in text
    if scenario in SITES:
        assert line_of(SITES[scenario]) in text
    assert "What to try:" in text


@pytest.mark.parametrize("scenario", [*HANGS, "branch", "finished", "order"])
def test_alive_and_after_ctrl_c(scenario: str) -> None:
    """It is explained while it hangs, without an end to its wait, and after Ctrl-C."""
    with started(*phalanx_run(scenario, 600, "stay")) as process:
        until(lambda: is_named(scenario), scenario)
        check(scenario)
        if scenario == "finished":  # Ctrl-C may not come before the end of the rank that has left
            until(has_ended, "the end of the culprit")
        assert process.poll() is None, "reading has ended the job"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + signal.SIGINT, err
    check(scenario)


@pytest.mark.parametrize("scenario", ("killed", "busy", "finished"))
def test_after_the_end(scenario: str) -> None:
    """The job fails; `phalanx run` says by itself why."""
    with started(*phalanx_run(scenario, 2)) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, None)
    check(scenario)
    assert json.loads(explained("--json"))["verdict"]["text"][0] in err.replace("\n", " ")
    assert line_of("wait") in explained()


def without_launcher(folder: str, scenario: str) -> None:
    """A rank that no launcher of ours has started."""
    os.environ["PHALANX_JOBS_DIR"] = folder
    os.environ["STORE"] = f"file://{os.environ['FOLDER']}/store"
    explain_script.main(scenario, "2")


@pytest.mark.parametrize(
    "scenario", ("killed", "stopped", "busy", "branch", "finished", "unsent", "missing", "order")
)
def test_after_the_deadline_without_a_launcher(
    ranks: RankServer, jobs: Path, scenario: str
) -> None:
    run = ranks.start(3, without_launcher, str(jobs), scenario, timeout=None)
    others = [rank for rank in range(3) if rank != RANK_AT_FAULT]
    assert not run.wait(LIMIT, others)
    ended = run.collect()
    assert [ended[rank].code for rank in others] == [1, 1], ended[0].report()
    check(scenario)


SPAWN = """
import os, sys, time
import torch.multiprocessing as mp
from tests.fault import explain_script

def rank(number, scenario):
    os.environ.update(RANK=str(number), WORLD_SIZE="3", STORE=f"file://{sys.argv[2]}")
    explain_script.main(scenario, "600", "stay")

if __name__ == "__main__":
    context = mp.start_processes(rank, (sys.argv[1],), nprocs=3, join=False, start_method="spawn")
    try:
        sys.stdin.read()
    finally:
        for process in context.processes:
            process.kill()
"""


# Only a launcher, and peers that end because of it, tell how a process ended.
@pytest.mark.parametrize(("scenario", "kind"), [("killed", "vanished"), ("busy", "busy")])
def test_started_by_torch_multiprocessing(tmp_path: Path, scenario: str, kind: str) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    process = subprocess.Popen(
        [sys.executable, str(script), scenario, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    try:
        until(lambda: is_named(kind), kind)
        check(scenario, kind)
    finally:
        process.communicate(timeout=LIMIT)
    until(lambda: not read_job().running, "the end of the ranks")
    if kind == "vanished":
        check(scenario, kind)
    else:  # all have been killed together: who was waited for is in the second sentence
        text = as_text(read_job())
        assert "it seems that they were killed" in text
        assert line_of("wait") in text


def test_a_job_that_is_not_there() -> None:
    result = subprocess.run(
        [*COMMAND, "explain", "nothing"], capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
