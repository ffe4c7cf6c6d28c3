"""tools/check_clocks.py: upper bounds on durations are found, lower bounds and polls are not."""

from __future__ import annotations

import textwrap

import pytest

from tools.check_clocks import main, violations

REJECTED = [
    "assert time.monotonic() - start < 2",
    "assert 0.5 <= time.monotonic() - start < 2",
    "assert 2 > time.perf_counter() - start",
    "waited = time.monotonic() - start\n    assert 0.5 <= waited <= 2, waited",
    "took = monotonic() - start\n    assert took < 2 and True",
    "assert rank.error_time - end < 1.0",
    "assert abs(found.started - time.time()) < 60",
]
ACCEPTED = [
    "assert time.monotonic() - start >= 0.5",
    "waited = time.monotonic() - start\n    assert waited > 0.5",
    "while not done():\n        assert time.monotonic() < deadline",
    "assert 0 < found.started <= time.time()",
    "assert len(names) - 1 < 5",
]


def lines(body: str) -> list[int]:
    return list(violations(textwrap.dedent(f"def test():\n    {body}\n")))


@pytest.mark.parametrize("body", REJECTED)
def test_rejected(body: str) -> None:
    assert lines(body) == [1 + len(body.splitlines())]


@pytest.mark.parametrize("body", ACCEPTED)
def test_accepted(body: str) -> None:
    assert lines(body) == []


def test_the_suite_has_none() -> None:
    assert main() == 0
