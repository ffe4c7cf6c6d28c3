"""Assignment of a transport's tags to their uses."""

__all__ = ["CHUNKS", "ENVELOPES", "WATCH", "of_chunk", "of_data"]

CHUNKS = 4096
"""Number of tags for the chunks of a collective, from tag 1 on.

Tag 0 is for the headers exchanged before a collective and for transfers that are not in chunks.
"""
WATCH = CHUNKS + 1
ENVELOPES = CHUNKS + 2
_DATA = CHUNKS + 3
_MESSAGES = 2**20


def of_chunk(number: int) -> int:
    """Return the tag of a collective's n-th chunk; chunks in flight together differ in it."""
    return 1 + number % CHUNKS


def of_data(number: int) -> int:
    """Return the tag of the data of a sender's n-th message."""
    return _DATA + number % _MESSAGES
