"""Ranks of a job from the contents of their flight recorders."""

from __future__ import annotations

from typing import Any

from phalanx.diagnosis import model

_SAME_NAMES = (
    *("rank", "pid", "host", "clock", "opened", "ending", "exception", "ended"),
    *("operations", "note", "main_thread_wait", "lone_wait"),
)
"""The entries of a recorder that `model.Rank` has under the same names."""
_MAX_RANKS = 2**16
"""Maximum number of ranks of a group; a longer list was not written by a rank."""


def build_rank(recorder: dict[str, Any], start: model.Start | None = None) -> model.Rank:
    """Return the rank that wrote a flight recorder.

    Args:
        recorder: The content of the recorder, as returned by `read_recorder` or by the native core.
        start: The launcher's record of the rank.
    """
    return model.Rank(
        **{name: recorder[name] for name in _SAME_NAMES},
        groups=tuple(map(_build_group, recorder["groups"])),
        open=tuple(model.Operation(**operation) for operation in recorder["open"]),
        history=tuple(model.Operation(**operation) for operation in recorder["done"]),
        reports=tuple(model.Report(*report) for report in recorder["reports"]),
        links=tuple(model.Link(**link) for link in recorder["links"]),
        start=start,
    )


def _build_group(record: dict[str, Any]) -> model.Group:
    members = parse_rank_ranges(record["members"])
    # A list that is longer than the group was not written by a rank.
    members = members if len(members) <= record["size"] else ()
    return model.Group(**{**record, "members": members})


def parse_rank_ranges(text: str) -> tuple[int, ...]:
    """Parse the members of a recorded group, such as "0-3,6"; empty if malformed.

    Returns:
        The ranks in the job by rank in the group.
    """
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return ()
        numbers = range(int(first), int(last or first) + 1)
        if len(ranks) + len(numbers) > _MAX_RANKS:
            return ()
        ranks += numbers
    return tuple(ranks)
