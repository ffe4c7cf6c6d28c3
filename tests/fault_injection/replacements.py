"""Replacements: ranks of a training are killed one after another; `phalanx run --elastic` replaces
them.

Victims are random ranks, rank 0 included, and processes that are about to join, at random moments.
At least one rank that has the state stays. In the end, the parameters must equal those of an
undisturbed run with as many steps, bit for bit. The measured time starts before the kill, and ends
when a rank has completed a step with all ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

PHALANX = str(Path(sys.executable).with_name("phalanx"))
SCRIPT = "tests.fault_injection.elastic_training"
# Seconds that a job may take to make its first step, to continue after a kill, and to end.
LIMIT = 60.0
# Of the descriptors of a rank that has seen all changes.
MOST_GROWTH = 3
# Of the last victims, some may not have ended yet.
_DYING = 8


@dataclass
class Trial:
    """A job whose ranks are killed, and its results."""

    ranks: int
    spares: int
    kills: int = 0
    times: list[float] = field(default_factory=list)
    """Seconds from each kill to the next step that all ranks complete."""
    steps: int = 0
    seconds: float = 0.0
    undisturbed: float = 0.0
    """Steps per second of the run without kills."""
    wrong: list[str] = field(default_factory=list)


def _time(event: dict[str, Any]) -> float:
    moment: float = event["time"]
    return moment


class _Job:
    """A running job, as its logs show it."""

    def __init__(self, folder: Path, ranks: int, *options: str, steps: int | None = None) -> None:
        self.folder, self.ranks = folder, ranks
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._read: dict[Path, int] = {}
        folder.mkdir()
        command = [PHALANX, "run", "--nproc-per-node", str(ranks), *options, "-m", SCRIPT]
        command += [str(folder), *([] if steps is None else [str(steps)])]
        environment = {**os.environ, "PHALANX_JOBS_DIR": str(folder / "jobs")}
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of this kind that the ranks have logged, by time."""
        for log in self.folder.glob("*.log"):
            with open(log, "rb") as file:
                file.seek(self._read.get(log, 0))
                text = file.read()
            end = text.rfind(b"\n") + 1
            self._read[log] = self._read.get(log, 0) + end
            for line in text[:end].splitlines():
                event = {**json.loads(line), "pid": int(log.stem)}
                bisect.insort(self._events[event["event"]], event, key=_time)
        return self._events[kind]

    def is_complete_since(self, moment: float) -> float | None:
        """Return when a rank first completed a step that all ranks began after a moment."""
        changes, steps = self.events("ranks"), self.events("step")
        first = bisect.bisect(changes, moment, key=_time)
        if first == len(changes):
            return None
        begin = bisect.bisect(steps, changes[first]["time"], key=_time)
        complete = (each["time"] for each in steps[begin:] if each["size"] == self.ranks)
        return next(complete, None)

    def alive(self) -> tuple[list[int], list[int]]:
        """Return the pids that have the state of the training, and those that are about to join."""
        # Not by the number alone: a long trial uses so many that the system gives them out again.
        children = psutil.Process(self.process.pid).children()
        started = {each["pid"] for each in self.events("start")}
        running = [each.pid for each in children if each.pid in started and _runs(each)]
        joined = {each["pid"] for each in self.events("ranks")}
        return [p for p in running if p in joined], [p for p in running if p not in joined]

    def wait(self, ready: Callable[[], object], what: str) -> str:
        """Wait until `ready`; return what was not reached in time, or that the job has ended."""
        end = time.monotonic() + LIMIT
        while not ready():
            if self.process.poll() is not None:
                return f"the job ended with {self.process.returncode} before {what}"
            if time.monotonic() > end:
                return f"no {what} within {LIMIT} s"
            time.sleep(0.02)
        return ""


def run(
    folder: Path,
    seed: int,
    kills: int,
    ranks: int,
    spares: int,
    pause: float,
    report: Callable[[], None] = lambda: None,
) -> Trial:
    """Run a job with kills, and the same steps without kills.

    Args:
        folder: A folder that this trial fills.
        seed: Seed of the victims and the moments.
        kills: Number of kills.
        ranks: World size.
        spares: Number of spares.
        pause: Mean time between kills in seconds. The next kill may come during the recovery.
        report: Called after each kill.
    """
    random, trial = Random(f"{seed} replacements"), Trial(ranks, spares)
    options = ("--elastic", "--spares", str(spares), "--max-restarts", str(10 * kills + 10))
    job = _Job(folder / "disturbed", ranks, *options)
    try:
        problem = job.wait(lambda: len(job.events("step")) >= ranks, "first step")
        begin, moments = time.monotonic(), list[float]()
        killed = deque[int](maxlen=_DYING)
        while not problem and len(moments) < kills:
            time.sleep(random.expovariate(1 / pause))
            victims = _choose(random, job, killed)
            killed += victims
            moments += [_kill(victim) for victim in victims]
            report()
            if random.random() < 0.8 or len(moments) >= kills:
                since = moments[-1]
                problem = job.wait(lambda since=since: job.is_complete_since(since), "step")  # type: ignore[misc]
        trial.seconds = time.monotonic() - begin
        trial.kills = len(moments)
        trial.times = [end - at for at in moments if (end := job.is_complete_since(at))]
        (job.folder / "stop").touch()
        problem = problem or _wait_for_end(job)
        if problem:
            problem += f"\n{_explain(job)}"
    finally:
        job.process.kill()
        job.process.wait()
    if problem:
        trial.wrong.append(f"{problem}:\n{job.output[-12000:]}")
        return trial
    _compare(trial, job, folder)
    return trial


def _explain(job: _Job) -> str:
    """Return what `phalanx explain` says of a job, after its ranks have printed their stacks."""
    events = {pid: job.events("ranks")[-1] for pid in job.alive()[0]}
    for pid in (pids := [*job.alive()[0], *job.alive()[1]]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    environment = {**os.environ, "PHALANX_JOBS_DIR": str(job.folder / "jobs")}
    explained = subprocess.run(
        [PHALANX, "explain"], env=environment, capture_output=True, text=True, check=False
    )
    return f"processes {pids}, last change {events}\n{explained.stdout}{explained.stderr}"


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _choose(random: Random, job: _Job, killed: Collection[int]) -> list[int]:
    joined, joining = ([pid for pid in pids if pid not in killed] for pids in job.alive())
    victims = random.sample(joined, min(random.choice((1, 1, 1, 2)), max(len(joined) - 1, 0)))
    if joining and random.random() < 0.3:
        victims = [random.choice(joining)]
    return victims


def _kill(victim: int) -> float:
    moment = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return moment


def _wait_for_end(job: _Job) -> str:
    try:
        code = job.process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        return f"the job did not end within {LIMIT} s"
    return f"the job ended with {code}" if code else ""


def _compare(trial: Trial, job: _Job, folder: Path) -> None:
    """Compare the end of the job with that of an undisturbed one."""
    ends = job.events("end")
    trial.steps = max((each["completed"] for each in ends), default=0)
    reference = _Job(folder / "undisturbed", trial.ranks, steps=trial.steps)
    reference.process.wait()
    expected = reference.events("end")
    steps = [each["time"] for each in reference.events("step")]
    if len(steps) > 1:
        trial.undisturbed = trial.steps / (steps[-1] - steps[0])
    found = {(each["completed"], each["digest"]) for each in ends}
    wanted = {(each["completed"], each["digest"]) for each in expected}
    if found != wanted or len(ends) != trial.ranks or len(wanted) != 1:
        trial.wrong.append(f"the ranks end with {found}, expected {wanted}")
    most = max((each["descriptors"] for each in expected), default=0) + MOST_GROWTH
    trial.wrong += [
        f"process {each['pid']} has {each['descriptors']} descriptors at the end, at most {most} "
        "expected"
        for each in ends
        if each["descriptors"] > most
    ]
    # Ranks have the folder among their arguments, and all that began as spares the launcher's pid.
    marks = {str(job.folder), str(job.process.pid)}
    trial.wrong += [
        f"process {process.pid} is left"
        for process in psutil.process_iter(["cmdline"])
        if marks & set(process.info["cmdline"] or ())
    ]
