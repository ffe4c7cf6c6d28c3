"""The ranks of a group in the notation of a flight recorder: "0-3,6"."""

from __future__ import annotations

__all__ = ["parse_rank_ranges"]

_MAX_RANKS = 2**16
"""Maximum number of ranks of a group; a longer list was not written by a rank."""


def parse_rank_ranges(text: str) -> tuple[int, ...]:
    """Parse "0-3,6" into ranks in the job by rank in the group; empty if malformed."""
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
