"""The output of `phalanx run` when ranks fail, word for word."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from phalanx.recorder.job_directory import list_job_names
from tests import copies

LIMIT = 100
PHALANX = [copies.PHALANX]
SCRIPT = """
import os, signal, time
import torch
import torch.distributed as dist
import phalanx
def step(rank):
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        {action}
    dist.all_reduce(x)
with phalanx.init(timeout={timeout}, device="cpu") as session:
    step(session.rank)
"""
SITE = "all_reduce #2 float32[4] SUM at script.py:11"
BEFORE = "all_reduce #1 float32[4] at script.py:8"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs `phalanx` with a script and returns its code and its stderr."""

    def call(*arguments, action="pass", timeout=60, **variables):
        (tmp_path / "script.py").write_text(SCRIPT.format(action=action, timeout=timeout))
        environ = {**os.environ, "TMPDIR": str(tmp_path), **variables}
        environ.pop("PHALANX_JOBS_DIR", None)
        done = subprocess.run(
            [*PHALANX, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
            timeout=LIMIT,
        )
        return done.returncode, done.stdout, done.stderr

    call.directory = tmp_path
    return call


def divide(err):
    """Return the lines of each rank without the prefix, and those of the launcher's report."""
    ranks, report = {0: [], 1: [], 2: []}, []
    for line in re.sub(r"\(pid \d+\)", "(pid PID)", err).splitlines():
        if found := re.match(r"\[rank (\d)\] (.*)", line):
            ranks[int(found[1])].append(re.sub(r'File ".*/', 'File "', found[2]))
        elif not line:
            break
        else:
            report.append(line)
    return ranks, report


def in_step(line, code, call=13):
    """Return the lines of the traceback of an exception in `step`."""
    return [
        "Traceback (most recent call last):",
        f'  File "script.py", line {call}, in <module>',
        "    step(session.rank)",
        f'  File "script.py", line {line}, in step',
        f"    {code}",
    ]


RAISE = 'raise ValueError("loss is not a number")'
CASES = {
    "exception": (
        RAISE,
        1,
        [*in_step(10, RAISE), "ValueError: loss is not a number"],
        f"PeerLost: {SITE}: rank 1 (pid PID) failed with ValueError: loss is not a number, "
        f"after {BEFORE}",
        "rank 1 (pid PID) exited with code 1: ValueError: loss is not a number",
    ),
    "exit": (
        "os._exit(7)",
        7,
        [],
        f"PeerLost: {SITE}: rank 1 (pid PID) exited with code 7, after {BEFORE}",
        "rank 1 (pid PID) exited with code 7",
    ),
    "signal": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        137,
        [],
        f"PeerLost: {SITE}: rank 1 (pid PID) was killed by SIGKILL, after {BEFORE}",
        "rank 1 (pid PID) was killed by SIGKILL (sent by hand, or by the kernel when memory ran "
        "out)",
    ),
    "inside torch": (
        "torch.nn.Linear(4, 2)(torch.ones(3, 5))",
        1,
        [
            *in_step(10, "torch.nn.Linear(4, 2)(torch.ones(3, 5))"),
            "  ... 3 frames inside torch, the last in forward (linear.py:LINE) ...",
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)",
        ],
        f"PeerLost: {SITE}: rank 1 (pid PID) failed with RuntimeError: mat1 and mat2 shapes cannot "
        f"be multiplied (3x5 and 4x2), after {BEFORE}",
        "rank 1 (pid PID) exited with code 1: RuntimeError: mat1 and mat2 shapes cannot be "
        "multiplied (3x5 and 4x2)",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", list(CASES))
def test_one_traceback_a_line_for_each_other_rank_and_the_verdict(run, case):
    action, expected_code, traceback, line, verdict = CASES[case]
    code, _, err = run("run", "--nproc-per-node", "3", "script.py", action=action)
    ranks, (first, *rest) = divide(re.sub(r"linear.py:\d+", "linear.py:LINE", err))
    assert code == expected_code, err
    # Markers below the source, which depend on the version of Python, are left out.
    assert [row for row in ranks[1] if set(row) - {" ", "^", "~"}] == traceback, err
    assert first == f"phalanx run: {verdict}"
    # The launcher stops a rank that has lost its peer, perhaps before it has printed that.
    failed = [rank for rank in (0, 2) if ranks[rank]]
    assert all(ranks[rank] == [line] for rank in failed), err
    stopped = [rank for rank in (0, 2) if rank not in failed]
    expected = [("failed", failed), ("stopped", stopped)]
    lines = [f"  {how} because of it: rank {', '.join(map(str, r))}" for how, r in expected if r]
    assert rest == lines, err


def test_an_exception_of_all_ranks_is_printed_once(run):
    options = ("--nproc-per-node", "3", "script.py")
    action = f"pass\n    {RAISE}"
    code, _, err = run("run", *options, action=action)
    assert code == 1, err
    ranks, (verdict, *rest) = divide(err)
    text = [*in_step(11, RAISE, 14), "ValueError: loss is not a number"]
    # The launcher may stop a rank before it has printed its line.
    (first,) = (rank for rank in ranks if len(ranks[rank]) > 1)
    assert [row for row in ranks[first] if set(row) - {" ", "^", "~"}] == text, err
    line = f"ValueError: loss is not a number (at script.py:11 in step, as on rank {first})"
    assert all(ranks[rank] in ([], [line]) for rank in ranks if rank != first), err
    found = re.fullmatch(r"phalanx run: rank (\d) .*: ValueError: loss is not a number", verdict)
    assert found, err
    others = [str(rank) for rank in ranks if ranks[rank] and rank != int(found[1])]
    assert not others or rest[0] == f"  the same exception on rank {', '.join(others)}"
    assert re.search(
        r"^Ranks? .* failed at .*: ValueError: loss is not a number$", err, re.MULTILINE
    )
    # A rank whose output is not shown does not print for the others.
    code, _, err = run("run", "--local-ranks-filter", "1", *options, action=action)
    ranks, _ = divide(err)
    assert code == 1, err
    assert [row for row in ranks[1] if set(row) - {" ", "^", "~"}] in ([], text), err
    assert not ranks[0] + ranks[2]


def test_after_a_timeout_the_first_line_names_the_late_rank(run):
    code, _, err = run(
        "run", "--nproc-per-node", "2", "script.py", action="time.sleep(90)", timeout=2
    )
    assert code == 1, err
    ranks, (first, *rest) = divide(re.sub(r"\d\.\d s ago", "SECONDS ago", err))
    late = f"; rank 1 is in its own code since {BEFORE}, SECONDS ago"
    assert first == (
        f"phalanx run: rank 1 (pid PID) was late: rank 0 waited for it in {SITE} until the timeout "
        f"of 2 s{late}"
    )
    assert ranks[0] == [
        f"CollectiveTimeout: {SITE}: rank 0 waited for rank 1 (pid PID) in {SITE} until the "
        f"timeout of 2 s on this rank{late}"
    ]
    assert rest == ["  failed because of it: rank 0"]


@pytest.mark.slow
def test_a_mismatch_blames_no_single_rank(run):
    code, _, err = run("run", "--nproc-per-node", "2", "script.py", action="dist.barrier()")
    assert code == 1, err
    _, (first, *_) = divide(err)
    pattern = r"phalanx run: ranks disagree: rank (\d) is in .* at script.py:1\d, rank (\d) in .*"
    found = re.fullmatch(pattern, first)
    assert found, err
    assert {found[1], found[2]} == {"0", "1"}


@pytest.mark.slow
def test_whole_tracebacks_are_kept(run):
    options = ("run", "--nproc-per-node", "2", "script.py")
    code, _, err = run(*options, action="torch.nn.Linear(4, 2)(torch.ones(3, 5))")
    assert code == 1
    inside = os.path.join("torch", "nn", "modules", "linear.py")
    assert inside not in err
    command = re.search(r"^To see the whole tracebacks: phalanx (.*)$", err, re.MULTILINE)
    assert command, err
    code, out, err = run(*command[1].split())
    assert (code, err) == (0, "")
    assert re.search(rf'^\[rank 1\]   File ".*{inside}", line', out, re.MULTILINE), out


@pytest.mark.slow
def test_whole_tracebacks_at_once(run):
    options = ("run", "--nproc-per-node", "2", "script.py")
    code, _, err = run(*options, action=RAISE, PHALANX_TRACEBACKS="all")
    assert code == 1
    assert "[rank 1] Traceback" in err
    assert "To see the whole tracebacks" not in err
    assert "[rank1]" not in err  # PyTorch's prefix, which says the same as that of the launcher


@pytest.mark.slow
def test_a_rank_that_is_not_shown_is_quoted_in_the_report(run):
    options = ("run", "--nproc-per-node", "2", "--local-ranks-filter", "0", "script.py")
    code, _, err = run(*options, action=RAISE)
    assert code == 1
    _, (first, *rest) = divide(err)
    assert first == "phalanx run: rank 1 (pid PID) exited with code 1; the end of its stderr:"
    assert "    | ValueError: loss is not a number" in rest


@pytest.mark.slow
def test_a_malformed_variable_is_one_line(run):
    code, _, err = run("run", "script.py", PHALANX_TRACEBACKS="some")
    assert code == 2
    assert re.fullmatch(r"phalanx: error: PHALANX_TRACEBACKS='some' in .*\n", err), err


def test_the_record_of_a_job_that_ended_well_is_kept_on_request(run):
    base = run.directory / f"phalanx-{os.geteuid()}"
    code, _, err = run("run", "--keep-record", "--nproc-per-node", "2", "script.py")
    (name,) = list_job_names(str(base))
    assert (code, err) == (0, f"phalanx run: the record is kept: phalanx trace {name}\n")
    code, out, err = run("explain", name)
    assert (code, err) == (0, "")
    assert "all ranks completed" in out
    assert len(list(Path(base, name).glob("*.recorder"))) == 2
