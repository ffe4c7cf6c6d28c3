"""Faults as values: what they say of themselves, and which are refused."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from phalanx.errors import UsageError
from phalanx.testing import Fault, arm, crash, delay, fail, kill, skip, stop
from phalanx.testing.faults import check


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (kill(2, 7), "kill(rank=2, at=7, by=SIGKILL)"),
        (kill(2, 7, by=15, after=0.5), "kill(rank=2, at=7, by=SIGTERM, after=0.5)"),
        (crash(0, 1, "barrier", code=3), "crash(rank=0, at=1, of='barrier', code=3)"),
        (fail(0, 1, error=MemoryError()), "fail(rank=0, at=1, error=MemoryError())"),
        (stop(1, 2, seconds=0.25), "stop(rank=1, at=2, seconds=0.25)"),
        (delay(1, 2, seconds=3), "delay(rank=1, at=2, seconds=3)"),
        (skip(1, 2, "isend"), "skip(rank=1, at=2, of='send')"),
        (skip(1, 2, "all_gather_into_tensor"), "skip(rank=1, at=2, of='all_gather_single')"),
    ],
)
def test_a_fault_reads_as_it_was_written(fault: Fault, words: str) -> None:
    assert str(fault) == words


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "negative rank": (lambda: kill(-1, 1), r"rank=-1.*: rank is -1, expected an integer from 0"),
    "no rank": (lambda: kill("0", 1), r"rank is '0', expected an integer from 0"),  # type: ignore[arg-type]
    "operation 0": (lambda: stop(0, 0), r"at=0.*: at is 0, expected an integer from 1"),
    "a truth": (lambda: stop(0, True), r"at is True, expected an integer from 1"),
    "unknown operation": (
        lambda: skip(0, 1, "allreduce"),
        r"no operation is named 'allreduce'; expected all_gather, .*all_reduce, .*send",
    ),
    "no signal": (lambda: kill(0, 1, by=99), r"by is 99, expected a signal, as signal.SIGTERM"),
    "exit code": (lambda: crash(0, 1, code=256), r"code is 256, expected an integer from 0 to 255"),
    "exit code as text": (
        lambda: crash(0, 1, code="1"),
        r"crash: code is '1', expected an integer",
    ),  # type: ignore[arg-type]
    "signal's name": (lambda: kill(0, 1, by="SIGTERM"), r"by is 'SIGTERM', expected a signal"),  # type: ignore[arg-type]
    "list for a signal": (lambda: kill(0, 1, by=[9]), r"by is \[9\], expected a signal"),  # type: ignore[arg-type]
    "operation in a list": (lambda: kill(0, 1, ["send"]), r"of is \['send'\], expected the name"),  # type: ignore[arg-type]
    "no operation": (lambda: skip(0, 1, None), r"of is None, expected the name"),  # type: ignore[arg-type]
    "seconds as text": (lambda: delay(0, 1, seconds="3"), r"seconds is '3', expected seconds"),  # type: ignore[arg-type]
    "no seconds": (lambda: delay(0, 1, seconds=None), r"seconds is None, expected seconds"),  # type: ignore[arg-type]
    "after as text": (lambda: kill(0, 1, after="1"), r"after is '1', expected seconds"),  # type: ignore[arg-type]
    "class for an exception": (
        lambda: fail(0, 1, error=ValueError),  # type: ignore[arg-type]
        r"error is <class 'ValueError'>, expected an exception, as MemoryError",
    ),
    "one for a list": (lambda: check(kill(0, 1), 3), r"faults is Fault\(.*, expected a list, as"),
    "none": (lambda: check(None, 3), r"faults is None, expected a list"),
    "arm's rank": (lambda: arm([], "1"), r"arm: rank is '1', expected an integer from 0"),  # type: ignore[arg-type]
    "no exception": (lambda: fail(0, 1, error="x"), r"error is 'x', expected an exception"),  # type: ignore[arg-type]
    "negative seconds": (lambda: delay(0, 1, seconds=-1), r"seconds is -1, expected seconds"),
    "endless": (lambda: stop(0, 1, seconds=float("inf")), r"seconds is inf, expected seconds"),
    "no number": (lambda: kill(0, 1, after=float("nan")), r"after is nan, expected seconds"),
    "rank outside": (lambda: check([kill(3, 1)], 3), r"rank=3.*: rank 3, expected 0 to 2"),
    "no fault": (lambda: check(["kill"], 3), r"faults has 'kill', expected kill\(...\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fault_is_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("rank", (None, "one"))
def test_arming_a_process_without_a_rank(monkeypatch: pytest.MonkeyPatch, rank: str | None) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(UsageError, match="RANK is not set, or no number"):
        arm([kill(0, 1, by=signal.SIGTERM)])
