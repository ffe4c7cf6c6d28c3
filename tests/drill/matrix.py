"""The matrix: every fault is injected into a job of real processes, and `explain` is judged.

A case is fully right if `phalanx explain --json` names the ranks at fault and no other, says the
cause and gives advice that fits. A job that hangs is judged twice: while it hangs, and after
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.observe.explain import as_json
from phalanx.observe.job_directory import JobDirectory, list_job_names
from phalanx.observe.job_reader import read_job_directory
from tests.drill import fault_collectives, fault_deaths, fault_programs, fault_waits
from tests.drill.faults import MARK, Case, struck

FILES = (fault_deaths, fault_waits, fault_collectives, fault_programs)
CASES = {case.name: case for file in FILES for case in file.CASES}

_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-c", "from phalanx.cli import main; main()")
# Seconds in which a job must come to its fault, a hang must be found, and a job must end.
_START, _FIND, _END = 240.0, 30.0, 240.0
# Seconds around the fault that a death may be dated to; the launcher notices some of them.
_EARLY, _LATE = 0.1, 5.0
_DEATHS = ("killed", "exited", "failed")


@dataclass
class Trial:
    """What came of one case.

    Attributes:
        case: The case.
        ranks: Whether the ranks at fault were named, and no others.
        wrong: What is not right, in words.
        verdict: The verdict in a line.
        seconds: Wall time of the whole.
    """

    case: Case
    base: str
    """The directory of the case's job, and of the mark of its fault."""
    ranks: bool = True
    wrong: list[str] = field(default_factory=list)
    diagnosis: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether ranks, cause and advice are right."""
        return not self.wrong

    def judge(self, found: Mapping[str, Any], when: str) -> None:
        """Compare an explanation with what the case expects."""
        diagnosis, case = found["diagnosis"], self.case
        text = " ".join(diagnosis["text"])
        self.verdict = f"{diagnosis['kind']} {diagnosis['ranks']}: {text}"
        if sorted(diagnosis["ranks"]) != sorted(case.ranks):
            self.ranks = False
            self.wrong.append(f"{when}: names ranks {diagnosis['ranks']}, not {list(case.ranks)}")
        if diagnosis["kind"] != case.kind:
            self.wrong.append(f"{when}: kind {diagnosis['kind']}, not {case.kind}")
        if not re.search(case.cause, text, re.DOTALL):
            self.wrong.append(f"{when}: the cause is not {case.cause!r}: {text}")
        advice = "\n".join(found["advice"])
        if not re.search(case.advice, advice):
            self.wrong.append(f"{when}: no advice like {case.advice!r}: {advice}")
        self.wrong += [f"{when}: {what}" for what in faults_of(found, struck(self.mark))]

    @property
    def mark(self) -> str:
        """The file that a rank makes right before the fault."""
        return os.path.join(self.base, "mark")

    @property
    def jobs(self) -> str:
        """The directory of jobs."""
        return os.path.join(self.base, "jobs")


def faults_of(found: Mapping[str, Any], event: float = 0.0) -> list[str]:
    """List what is wrong with an explanation whatever the fault was: grammar, and times.

    Args:
        found: What `phalanx explain --json` prints.
        event: When the fault came, in Unix seconds; 0 if that isn't known.
    """
    wrong = faults_in([*found["diagnosis"]["text"], *found["advice"]])
    since = found["diagnosis"]["since"]
    if since is not None and not found["job"]["started"] - 1 <= since <= time.time() + 1:
        wrong.append(f"since {since}, outside of the job's life")
    dated = found["diagnosis"]["kind"] in _DEATHS and since is not None and event
    if dated and not event - _EARLY <= since <= event + _LATE:
        wrong.append(f"it is dated {since - event:.1f} s after the fault")
    return wrong


def faults_in(texts: Iterable[str]) -> list[str]:
    """List the subjects and verbs in some sentences that don't agree in number."""
    return [f"{words[0]!r} in {text!r}" for text in texts if (words := _DISAGREE.search(text))]


_DISAGREE = re.compile(
    r"\b[Rr]ank \d+(?: \(pid \d+\))? (?:are|were|wait|have|call|use)\b"
    r"|\b[Rr]anks \d+(?:-\d+|(?:, \d+)* and \d+|(?:, \d+)+) (?:is|was|waits|has|calls|uses)\b"
    r"|\b[Rr]anks \d+(?![\d, -]| and)"
)


def run(case: Case, folder: Path) -> Trial:
    """Inject a fault and judge what is said of it; the jobs' directory is below `folder`."""
    base = folder / case.name
    base.mkdir(parents=True)
    trial, begin = Trial(case, str(base)), time.monotonic()
    with _started(trial) as process:
        try:
            _observe(trial, process)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            trial.ranks = False
            trial.wrong.append(str(error))
    trial.seconds = time.monotonic() - begin
    return trial


def _observe(trial: Trial, process: subprocess.Popen[str]) -> None:
    case = trial.case
    if case.hangs or case.disturb is not None:
        _until(lambda: struck(trial.mark), _START, "the fault")
    if case.hangs:
        trial.judge(_found_alive(trial), "alive")
        process.send_signal(signal.SIGINT)
    if case.disturb is not None:
        case.disturb(process)
    process.communicate(timeout=_END)
    done = subprocess.run(
        [*_COMMAND, "explain", "--json"],
        capture_output=True,
        text=True,
        timeout=_END,
        check=False,
        env=_environment(trial),
    )
    if done.returncode:
        raise TimeoutError(f"nothing to explain: {done.stderr}")
    trial.judge(json.loads(done.stdout), "at the end")


def _found_alive(trial: Trial) -> Mapping[str, Any]:
    """Return the explanation while the job hangs: the first that is right, or the last."""
    found: Mapping[str, Any] = {}

    def is_right() -> bool:
        nonlocal found
        with JobDirectory(trial.jobs, list_job_names(trial.jobs)[0]) as job:
            found = as_json(read_job_directory(job))
        again = Trial(trial.case, trial.base)
        again.judge(found, "alive")
        return again.right

    try:
        _until(is_right, _FIND, "the right verdict")
    except TimeoutError:
        if not found:
            raise
    return found


def _until(condition: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} has not come within {seconds:g} s")
        time.sleep(0.05)


@contextmanager
def _started(trial: Trial) -> Iterator[subprocess.Popen[str]]:
    options = ("run", "--nproc-per-node", str(trial.case.size), "--shutdown-timeout", "3")
    process = subprocess.Popen(
        [*_COMMAND, *options, "-m", "tests.drill.faults", trial.case.name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env=_environment(trial),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _environment(trial: Trial) -> dict[str, str]:
    return {**os.environ, "PHALANX_JOBS_DIR": trial.jobs, MARK: trial.mark}
