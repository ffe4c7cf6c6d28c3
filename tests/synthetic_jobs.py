"""Synthetic jobs for tests of the readers of flight recorders.

`NOW` is the time of the reading; times are given in seconds before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.observe.model import Group, Job, Operation, Process, Rank, Report

SECOND = 1_000_000_000
NOW = 5_000 * SECOND
CLOCK = 1_700_000_000 * SECOND
NAME = "20261121-0901-k3f9x2"
WORLD = 0xABCDEF0123


def ago(seconds: float) -> int:
    """Return the time `seconds` before `NOW`."""
    return NOW - round(seconds * SECOND)


def world(rank: int, size: int) -> Group:
    """Return the group of all ranks as one of them recorded it."""
    return Group(WORLD, "default", rank, size, tuple(range(size)), 40)


def collective(
    begin: float, end: float | None, waited: float = 0.0, waiting_for: int = -1, **more: Any
) -> Operation:
    """Return an all_reduce from `begin` to `end` seconds ago; under way if `end` is None."""
    sequence = more.pop("sequence", 41)
    return Operation(
        number=more.pop("number", sequence),
        kind=more.pop("kind", "all_reduce"),
        group=more.pop("group", 0),
        sequence=sequence,
        dtype="float32",
        count=1024,
        op="SUM",
        site=more.pop("site", "/srv/code/train.py:40"),
        begin=ago(begin),
        end=0 if end is None else ago(end),
        waited=round(waited * SECOND),
        waiting_for=waiting_for,
        **more,
    )


def message(
    begin: float, end: float | None, waited: float = 0.0, waiting_for: int = -1, **more: Any
) -> Operation:
    """Return a recv from rank 1, or a send, with tag 7."""
    more = {"kind": "recv", "peer": 1, "sequence": 7, **more}
    return replace(collective(begin, end, waited, waiting_for, **more), op="")


def rank(
    number: int,
    size: int = 2,
    history: Sequence[Operation] = (),
    open: Sequence[Operation] = (),  # noqa: A002
    state: str | None = "running",
    **more: Any,
) -> Rank:
    """Return a rank that has run for 60 s."""
    given: dict[str, Any] = {
        "pid": 4000 + number,
        "host": "node-a",
        "clock": CLOCK,
        "opened": ago(60),
        "groups": (world(number, size),),
        "operations": len(history) + len(open),
        "process": None if state is None else Process(state, 3.0, 300 * 2**20),
    }
    given.update(more)
    return Rank(number, history=tuple(history), open=tuple(open), **given)


def job(*ranks: Rank, **more: Any) -> Job:
    """Return a job of these ranks, which is running unless their processes are gone."""
    given: dict[str, Any] = {
        "command": ("python", "train.py"),
        "started": (CLOCK + ago(60)) / SECOND,
        "world_size": len(ranks),
        "now": NOW,
    }
    given.update(more)
    return Job(NAME, f"/tmp/phalanx-0/{NAME}", ranks=ranks, **given)


def build_straggling_job(size: int, slow: int, share: float = 0.6) -> Job:
    """Return a job of 2 steps per second in which all ranks wait for `slow` for this share."""
    return job(*(_build_straggling_rank(number, size, slow, share) for number in range(size)))


def _build_straggling_rank(number: int, size: int, slow: int, share: float) -> Rank:
    history = []
    for sequence in range(1, 21):
        end = 0.5 * (20 - sequence)
        waited = 0.0 if number == slow else 0.5 * share
        waiting_for = -1 if number == slow else slow
        history.append(collective(end + waited + 0.01, end, waited, waiting_for, sequence=sequence))
    reports = [Report(ago(0.5 * (20 - step)), step, 2.0 / step) for step in range(1, 21)]
    return rank(number, size, history, reports=tuple(reports))
