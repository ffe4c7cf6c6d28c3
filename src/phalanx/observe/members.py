"""The ranks of a group as a black box notes them: "0-3,6"."""

from __future__ import annotations

__all__ = ["ranks_of"]

_MOST = 2**16
"""No group has more; a text that says so was not written by a rank."""


def ranks_of(text: str) -> tuple[int, ...]:
    """Read "0-3,6" as ranks in the job by rank in the group; none if the text makes no sense."""
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return ()
        numbers = range(int(first), int(last or first) + 1)
        if len(ranks) + len(numbers) > _MOST:
            return ()
        ranks += numbers
    return tuple(ranks)
