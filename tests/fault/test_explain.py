"""`phalanx explain` with real processes: the rank at fault of three is named."""

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

from phalanx.diagnosis.explain import as_json, as_text
from phalanx.diagnosis.job_reader import read_job
from phalanx.diagnosis.kinds import diagnose
from tests import copies
from tests.fault import explain_script
from tests.ranks import RankServer

SCRIPT = Path(explain_script.__file__)
COMMAND = [copies.PHALANX]
LIMIT = 60.0
RANK_AT_FAULT = explain_script.RANK_AT_FAULT
# Scenarios that hang; the others end at once, unless the notified ranks stay alive.
HANGS = ("stopped", "busy", "unsent", "missing")
# Comments that mark the lines of the rank at fault.
SITES = {"branch": "branch", "unsent": "unsent", "order": "order"}


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a directory of jobs for this test."""
    folder = tmp_path / "jobs"
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(folder))
    return folder


@contextlib.contextmanager
def start_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
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


def run_explain(*arguments: str) -> str:
    """Run `phalanx explain` and return its output."""
    result = subprocess.run(
        [*COMMAND, "explain", *arguments], capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def wait_until(found: Callable[[], Any], description: str) -> Any:
    """Poll until a value is true, and return it."""
    deadline = time.monotonic() + LIMIT
    last = None
    while time.monotonic() < deadline:
        if last := found():
            return last
        time.sleep(0.05)
    raise AssertionError(f"did not happen: {description}")


def is_diagnosed(kind: str) -> bool:
    """Return whether the diagnosis of the newest job is the expected one."""
    try:
        diagnosis = diagnose(read_job())
    except ValueError:  # there is no job yet
        return False
    return diagnosis.kind == kind and diagnosis.ranks == (RANK_AT_FAULT,)


def has_ended() -> bool:
    """Return whether the launcher has recorded the end of the rank at fault."""
    start = read_job().ranks[RANK_AT_FAULT].start
    return start is not None and start.code == 0


def find_line(comment: str) -> str:
    (line,) = (
        number
        for number, text in enumerate(SCRIPT.read_text().splitlines(), 1)
        if text.endswith(f"# {comment}")
    )
    return f"explain_script.py:{line}"


def check(scenario: str, kind: str = "") -> None:
    """Check that the explanation of the newest job names rank, cause and lines."""
    kind = kind or scenario
    job = read_job()  # in this process, since the command takes seconds to start
    diagnosis, text = as_json(job)["diagnosis"], as_text(job)
    assert (diagnosis["kind"], diagnosis["ranks"]) == (kind, [RANK_AT_FAULT]), text
    # Tense and durations may differ between readings.
    assert f"\n{diagnosis['text'][0][:20]}" in text
    assert f"ank {RANK_AT_FAULT} " in diagnosis["text"][0]
    assert find_line("missing" if scenario == "missing" else "wait") in text
    if scenario in SITES:
        assert find_line(SITES[scenario]) in text
    assert "Suggested fixes:" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scenario", [*HANGS, "branch", "finished", "order"])
def test_while_running_and_after_ctrl_c(scenario: str) -> None:
    """The job is explained while it hangs, before its timeout, and after Ctrl-C."""
    with start_process(*phalanx_run(scenario, 600, "stay")) as process:
        wait_until(lambda: is_diagnosed(scenario), scenario)
        check(scenario)
        if scenario == "finished":  # Ctrl-C must come after the end of the rank that has left
            wait_until(has_ended, "the end of the rank at fault")
        assert process.poll() is None, "reading has ended the job"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + signal.SIGINT, err
    check(scenario)


LATE_FORWARDER = """
import time

from phalanx.cli import main
from phalanx.launcher.output_forwarder import OutputForwarder

step = OutputForwarder.step

def late_step(self, timeout):
    if timeout:
        time.sleep(0.3)
        step(self, timeout)

OutputForwarder.step = late_step
main()
"""


@pytest.mark.slow
def test_a_death_that_the_agent_sees_first() -> None:
    """The agent stops the other ranks before the forwarder has seen which one failed."""
    command = [sys.executable, "-c", LATE_FORWARDER, *phalanx_run("killed", 2)[len(COMMAND) :]]
    with start_process(*command) as process:
        process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, None)
    check("killed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scenario", ("killed", "busy", "finished"))
def test_after_the_end(scenario: str) -> None:
    """The job fails, and `phalanx run` prints the explanation."""
    with start_process(*phalanx_run(scenario, 2)) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, None)
    check(scenario)
    assert json.loads(run_explain("--json"))["diagnosis"]["text"][0] in err.replace("\n", " ")
    assert find_line("wait") in run_explain()


def without_launcher(folder: str, scenario: str) -> None:
    """Run a rank that was not started by a Phalanx launcher."""
    os.environ["PHALANX_JOBS_DIR"] = folder
    os.environ["STORE"] = f"file://{os.environ['FOLDER']}/store"
    explain_script.main(scenario, "2")


@pytest.mark.sampled(1)
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


UNIMPORTABLE = """
import os, sys
import phalanx

def rank():
    if os.environ["RANK"] == "1":
        import no_such_module
    with phalanx.init():
        pass

if __name__ == "__main__":
    phalanx.launch(rank, nprocs=3) if sys.argv[1:] else rank()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", ("run", "launch"))
def test_an_exception_before_joining(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNIMPORTABLE)
    run = [*COMMAND, "run", "--nproc-per-node", "3", str(script)]
    command = run if launcher == "run" else [sys.executable, str(script), "launch"]
    assert subprocess.run(command, capture_output=True, timeout=LIMIT).returncode == 1
    job = read_job()
    diagnosis = as_json(job)["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("failed", [1]), as_text(job)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in diagnosis["text"][0]


HEALTHY = """
import time
import phalanx
import torch.distributed as dist

with phalanx.init():
    dist.barrier()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEALTHY)
    with start_process(*COMMAND, "run", "--nproc-per-node", "2", str(script)) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(number)
        process.communicate(timeout=LIMIT)
    text = as_text(read_job())
    assert f"The launcher was ended by {number.name} and stopped ranks 0 and 1" in text


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


@pytest.mark.slow
# Only a launcher, and peers that fail because of it, record how a process ended.
@pytest.mark.sampled(1)
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
        wait_until(lambda: is_diagnosed(kind), kind)
        check(scenario, kind)
    finally:
        process.communicate(timeout=LIMIT)
    wait_until(lambda: not read_job().running, "the end of the ranks")
    if kind == "vanished":
        check(scenario, kind)
    else:  # all were killed together; the second sentence describes the waits
        text = as_text(read_job())
        assert "they were probably killed" in text
        assert find_line("wait") in text


def test_a_missing_job() -> None:
    result = subprocess.run(
        [*COMMAND, "explain", "nothing"], capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
