"""The matrix: inject each fault into a job of real processes, and judge `phalanx explain`.

A case is right if `phalanx explain --json` names exactly the ranks at fault, states the cause and
gives fitting advice. A job that hangs is judged twice: while it hangs, and after Ctrl-C.

With dumps alone, the job is judged once, some seconds after the fault, by dumps as NCCL's watchdog
makes them (`nccl_dumps`). Its ranks have no launcher. Before the first group there are no dumps.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.diagnosis.explain import as_json
from phalanx.diagnosis.job_reader import read_job_directory
from phalanx.diagnosis.torch_jobs import read_dumps
from phalanx.launcher.store import host_store, rank_variables
from phalanx.recorder.job_directory import JobDirectory, list_job_names
from tests import copies
from tests.fault_injection import fault_collectives, fault_deaths, fault_programs, fault_waits
from tests.fault_injection.faults import BACKEND, DUMPS, MARK, Case, fault_time

MODULES = (fault_deaths, fault_waits, fault_collectives, fault_programs)
CASES = {case.name: case for file in MODULES for case in file.CASES}

_ROOT = Path(__file__).parents[2]
_COMMAND = (copies.PHALANX,)
# Seconds within which a job must reach its fault, a hang must be found, and a job must end.
_START, _FIND, _END = 240.0, 30.0, 240.0
# Seconds by which the reported time of a death may precede or follow the fault.
_EARLY, _LATE = 0.1, 5.0
_WATCHDOG = 4.0
"""The time from a fault to the dumps by which it is judged, in seconds."""
_DEATHS = ("killed", "exited", "failed")
_UNSEEN_BY_DUMPS = (*_DEATHS, "finished", "interrupted", "stopped", "missing", "late")
"""The kinds that dumps cannot tell from one another, nor from a rank in its own code."""


@dataclass
class Trial:
    """The results of one case.

    Attributes:
        case: The case.
        precedes_dumps: Whether there is nothing to judge, since NCCL makes dumps from the first
            group on.
        names_ranks: Whether the diagnosis names exactly the ranks at fault.
        base: Directory of the job of the case and of the mark of its fault.
        backend: The backend of the groups.
        uses_dumps: Whether only dumps of PyTorch's Flight Recorder are read.
        wrong: Descriptions of mistakes.
        diagnosis: The diagnosis in one line.
        seconds: Wall time of the case.
    """

    case: Case
    base: str
    backend: str = "phalanx"
    uses_dumps: bool = False
    precedes_dumps: bool = False
    names_ranks: bool = True
    wrong: list[str] = field(default_factory=list)
    diagnosis: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """True if ranks, cause and advice are right."""
        return not self.wrong

    def judge(self, explanation: Mapping[str, Any], phase: str) -> None:
        """Compare an explanation with the expected one."""
        diagnosis, case = explanation["diagnosis"], self.case
        kind, cause, fix = case.kind, case.cause, case.advice
        if self.backend != "phalanx" and case.elsewhere is not None:
            kind, cause, fix = case.elsewhere
        kinds: tuple[str, ...] = (kind,)
        if self.uses_dumps and kind in _UNSEEN_BY_DUMPS:
            kinds, cause, fix = ("busy", "unreadable"), "has ended|has left no dump", "output"
        text = " ".join(diagnosis["text"])
        self.diagnosis = f"{diagnosis['kind']} {diagnosis['ranks']}: {text}"
        if sorted(diagnosis["ranks"]) != sorted(case.ranks):
            self.names_ranks = False
            self.wrong.append(f"{phase}: names ranks {diagnosis['ranks']}, not {list(case.ranks)}")
        if diagnosis["kind"] not in kinds:
            self.wrong.append(f"{phase}: kind {diagnosis['kind']}, not {' or '.join(kinds)}")
        if not re.search(cause, text, re.DOTALL):
            self.wrong.append(f"{phase}: the cause is not {cause!r}: {text}")
        own = diagnosis["text"] if self.uses_dumps else ()
        advice = "\n".join([*own, *explanation["advice"]])
        if not re.search(fix, advice):
            self.wrong.append(f"{phase}: no advice like {fix!r}: {advice}")
        self.wrong += [
            f"{phase}: {problem}"
            for problem in check_explanation(explanation, fault_time(self.mark))
        ]

    @property
    def dumps(self) -> str:
        """Path of the directory of the dumps."""
        return os.path.join(self.base, "dumps")

    @property
    def mark(self) -> str:
        """Path of the file that a rank creates right before the fault."""
        return os.path.join(self.base, "mark")

    @property
    def jobs(self) -> str:
        """Path of the directory of jobs."""
        return os.path.join(self.base, "jobs")


def check_explanation(explanation: Mapping[str, Any], fault_at: float = 0.0) -> list[str]:
    """Return mistakes in an explanation that do not depend on the fault: grammar and times.

    Args:
        explanation: The output of `phalanx explain --json`.
        fault_at: Time of the fault in Unix seconds; 0 if it is unknown.
    """
    wrong = agreement_errors([*explanation["diagnosis"]["text"], *explanation["advice"]])
    since = explanation["diagnosis"]["since"]
    started = explanation["job"]["started"] or 0.0  # dumps do not say
    if since is not None and not started - 1 <= since <= time.time() + 1:
        wrong.append(f"since {since}, outside of the job's life")
    dated = explanation["diagnosis"]["kind"] in _DEATHS and since is not None and fault_at
    if dated and not fault_at - _EARLY <= since <= fault_at + _LATE:
        wrong.append(f"it is dated {since - fault_at:.1f} s after the fault")
    return wrong


def agreement_errors(texts: Iterable[str]) -> list[str]:
    """Return the subjects and verbs in the sentences that do not agree in number."""
    return [f"{words[0]!r} in {text!r}" for text in texts if (words := _DISAGREEMENT.search(text))]


_DISAGREEMENT = re.compile(
    r"\b[Rr]ank \d+(?: \(pid \d+\))? (?:are|were|wait|have|call|use)\b"
    r"|\b[Rr]anks \d+(?:-\d+|(?:, \d+)* and \d+|(?:, \d+)+) (?:is|was|waits|has|calls|uses)\b"
    r"|\b[Rr]anks \d+(?![\d, -]| and)"
)


def run(case: Case, folder: Path, backend: str = "phalanx", *, uses_dumps: bool = False) -> Trial:
    """Inject a fault and judge its explanation; the directory of jobs is below `folder`."""
    base = folder / case.name
    (base / "dumps").mkdir(parents=True)
    trial, begin = Trial(case, str(base), backend, uses_dumps), time.monotonic()
    try:
        if uses_dumps:
            _judge_dumps(trial)
        else:
            with _start_job(trial) as process:
                _watch_job(trial, process)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        trial.names_ranks = False
        trial.wrong.append(str(error))
    trial.seconds = time.monotonic() - begin
    return trial


def _watch_job(trial: Trial, process: subprocess.Popen[str]) -> None:
    case = trial.case
    if case.hangs or case.disturb is not None:
        _until(lambda: fault_time(trial.mark), _START, "the fault")
    if case.hangs:
        trial.judge(_explain_hanging(trial), "alive")
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
        raise TimeoutError(f"phalanx explain failed: {done.stderr}")
    trial.judge(json.loads(done.stdout), "at the end")


def _judge_dumps(trial: Trial) -> None:
    store, size = host_store(), trial.case.size
    command = [sys.executable, "-m", "tests.fault_injection.faults", trial.case.name]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**_environment(trial), **rank_variables(rank, size, store.port)},
        )
        for rank in range(size)
    ]
    try:
        _until(lambda: fault_time(trial.mark), _START, "the fault")
        time.sleep(max(0.0, fault_time(trial.mark) + _WATCHDOG - time.time()))
        trial.precedes_dumps = not (trial.case.forms or os.listdir(trial.dumps))
        if not trial.precedes_dumps:
            trial.judge(as_json(read_dumps(trial.dumps)), "from the dumps")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _explain_hanging(trial: Trial) -> Mapping[str, Any]:
    """Return the first right explanation of a job that hangs, or the last one."""
    explanation: Mapping[str, Any] = {}

    def is_right() -> bool:
        nonlocal explanation
        with JobDirectory(trial.jobs, list_job_names(trial.jobs)[0]) as job:
            explanation = as_json(read_job_directory(job))
        attempt = replace(trial, wrong=[])
        attempt.judge(explanation, "alive")
        return attempt.right

    try:
        _until(is_right, _FIND, "the right diagnosis")
    except TimeoutError:
        if not explanation:
            raise
    return explanation


def _until(condition: Any, seconds: float, event: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{event} did not appear within {seconds:g} s")
        time.sleep(0.05)


@contextmanager
def _start_job(trial: Trial) -> Iterator[subprocess.Popen[str]]:
    options = ("run", "--nproc-per-node", str(trial.case.size), "--shutdown-timeout", "3")
    process = subprocess.Popen(
        [*_COMMAND, *options, "-m", "tests.fault_injection.faults", trial.case.name],
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
    variables = {"PHALANX_JOBS_DIR": trial.jobs, MARK: trial.mark, BACKEND: trial.backend}
    if trial.uses_dumps:
        variables |= {DUMPS: trial.dumps, "TORCH_FR_BUFFER_SIZE": "200"}
    return {**os.environ, **variables}
