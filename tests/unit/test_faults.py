"""Faults as values: their text, and rejected arguments."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from phalanx.errors import UsageError
from phalanx.testing import Fault, crash, delay, enable_faults, fail, kill, skip, stop
from phalanx.testing.faults import check_faults


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (kill(2, 7), "kill(rank=2, nth=7, sig=SIGKILL)"),
        (kill(2, 7, sig=15, after=0.5), "kill(rank=2, nth=7, sig=SIGTERM, after=0.5)"),
        (crash(0, 1, "barrier", code=3), "crash(rank=0, nth=1, operation='barrier', code=3)"),
        (fail(0, 1, error=MemoryError()), "fail(rank=0, nth=1, error=MemoryError())"),
        (stop(1, 2, seconds=0.25), "stop(rank=1, nth=2, seconds=0.25)"),
        (delay(1, 2, seconds=3), "delay(rank=1, nth=2, seconds=3)"),
        (skip(1, 2, "isend"), "skip(rank=1, nth=2, operation='send')"),
        (
            skip(1, 2, "all_gather_into_tensor"),
            "skip(rank=1, nth=2, operation='all_gather_single')",
        ),
    ],
)
def test_the_text_of_a_fault_is_its_call(fault: Fault, words: str) -> None:
    assert str(fault) == words


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "negative rank": (lambda: kill(-1, 1), r"rank=-1.*: rank is -1, expected an integer from 0"),
    "no rank": (lambda: kill("0", 1), r"rank is '0', expected an integer from 0"),  # type: ignore[arg-type]
    "operation 0": (lambda: stop(0, 0), r"nth=0.*: nth is 0, expected an integer from 1"),
    "boolean": (lambda: stop(0, True), r"nth is True, expected an integer from 1"),
    "unknown operation": (
        lambda: skip(0, 1, "allreduce"),
        r"no operation is named 'allreduce'; expected all_gather, .*all_reduce, .*send",
    ),
    "no signal": (
        lambda: kill(0, 1, sig=99),
        r"sig is 99, expected a signal such as signal.SIGTERM",
    ),
    "exit code": (lambda: crash(0, 1, code=256), r"code is 256, expected an integer from 0 to 255"),
    "exit code as text": (
        lambda: crash(0, 1, code="1"),
        r"crash: code is '1', expected an integer",
    ),  # type: ignore[arg-type]
    "signal's name": (lambda: kill(0, 1, sig="SIGTERM"), r"sig is 'SIGTERM', expected a signal"),  # type: ignore[arg-type]
    "list for a signal": (lambda: kill(0, 1, sig=[9]), r"sig is \[9\], expected a signal"),  # type: ignore[arg-type]
    "operation in a list": (
        lambda: kill(0, 1, ["send"]),
        r"operation is \['send'\], expected a name",
    ),  # type: ignore[arg-type]
    "no operation": (lambda: skip(0, 1, None), r"operation is None, expected a name"),  # type: ignore[arg-type]
    "seconds as text": (lambda: delay(0, 1, seconds="3"), r"seconds is '3', expected seconds"),  # type: ignore[arg-type]
    "no seconds": (lambda: delay(0, 1, seconds=None), r"seconds is None, expected seconds"),  # type: ignore[arg-type]
    "after as text": (lambda: kill(0, 1, after="1"), r"after is '1', expected seconds"),  # type: ignore[arg-type]
    "class for an exception": (
        lambda: fail(0, 1, error=ValueError),  # type: ignore[arg-type]
        r"error is <class 'ValueError'>, expected an exception such as MemoryError",
    ),
    "one for a list": (
        lambda: check_faults(kill(0, 1), 3),
        r"faults is Fault\(.*, expected a list such as",
    ),
    "none": (lambda: check_faults(None, 3), r"faults is None, expected a list"),
    "rank of enable_faults": (
        lambda: enable_faults([], "1"),
        r"enable_faults: rank is '1', expected an integer from 0",
    ),  # type: ignore[arg-type]
    "no exception": (lambda: fail(0, 1, error="x"), r"error is 'x', expected an exception"),  # type: ignore[arg-type]
    "negative seconds": (lambda: delay(0, 1, seconds=-1), r"seconds is -1, expected seconds"),
    "endless": (lambda: stop(0, 1, seconds=float("inf")), r"seconds is inf, expected seconds"),
    "no number": (lambda: kill(0, 1, after=float("nan")), r"after is nan, expected seconds"),
    "rank outside": (lambda: check_faults([kill(3, 1)], 3), r"rank=3.*: rank 3, expected 0 to 2"),
    "no fault": (
        lambda: check_faults(["kill"], 3),
        r"faults contains 'kill', expected faults such as kill\(...\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_fault_is_rejected(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("rank", (None, "one"))
def test_enabling_faults_without_a_rank(monkeypatch: pytest.MonkeyPatch, rank: str | None) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(UsageError, match="RANK is not set or not a number"):
        enable_faults([kill(0, 1, sig=signal.SIGTERM)])
