"""Assignment of a transport's tags to their uses."""

__all__ = ["CHUNK_TAGS", "ENVELOPES", "LIVENESS", "chunk_tag", "data_tag"]

CHUNK_TAGS = 4096
"""The number of tags for the chunks of a collective, from tag 1 on.

Tag 0 is for the headers exchanged before a collective and for transfers that are not in chunks.
"""
LIVENESS = CHUNK_TAGS + 1
ENVELOPES = CHUNK_TAGS + 2
_FIRST_DATA_TAG = CHUNK_TAGS + 3
_DATA_TAGS = 2**20


def chunk_tag(number: int) -> int:
    """Return the tag of a collective's n-th chunk; all chunks in flight have different tags."""
    return 1 + number % CHUNK_TAGS


def data_tag(number: int) -> int:
    """Return the tag of the data of a sender's n-th message."""
    return _FIRST_DATA_TAG + number % _DATA_TAGS
