"""Who uses which of an engine's tags."""

__all__ = ["CHUNKS", "ENVELOPES", "WATCH", "of_chunk", "of_data"]

CHUNKS = 4096
"""Tag 0 is for what ranks say before a collective; the next so many are for its chunks."""
WATCH = CHUNKS + 1
ENVELOPES = CHUNKS + 2
_DATA = CHUNKS + 3
_MESSAGES = 2**20


def of_chunk(number: int) -> int:
    """The tag of a collective's n-th chunk: those under way at once have different ones."""
    return 1 + number % CHUNKS


def of_data(number: int) -> int:
    """The tag of the data of a sender's n-th message."""
    return _DATA + number % _MESSAGES
