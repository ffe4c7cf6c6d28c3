"""The core's check for buffers that share memory, against sets of their bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx import _native

INT16 = _native.DTYPES["int16"]
SIZE = 2
# Address 0 stands for no memory.
buffers = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), max_size=5)


def bytes_of(start: int, count: int) -> set[int]:
    return set(range(start, start + count * SIZE))


@given(buffers, buffers)
def test_overlap(inputs: list[tuple[int, int]], candidates: list[tuple[int, int]]) -> None:
    outputs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for start, count in candidates:  # outputs do not overlap each other
        if not taken & bytes_of(start, count):
            outputs.append((start, count))
            taken |= bytes_of(start, count)
    found = _native.overlap(
        [start for start, _ in inputs],
        [count for _, count in inputs],
        [start for start, _ in outputs],
        [count for _, count in outputs],
        INT16,
    )
    assert found is any(bytes_of(*each) & taken for each in inputs)


@given(buffers)
def test_common_memory(parts: list[tuple[int, int]]) -> None:
    taken = [each for part in parts for each in bytes_of(*part)]
    found = _native.have_common_memory(
        [start for start, _ in parts], [count * SIZE for _, count in parts]
    )
    assert found is (len({*taken}) < len(taken))


@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4), st.integers(0, 6))
def test_misplaced(part: int, parts: list[int], count: int) -> None:
    for rank, own in enumerate(parts):
        others = [each for owner, each in enumerate(parts) if owner != rank or each != part]
        shared = any(bytes_of(part, count) & bytes_of(each, count) for each in others)
        assert _native.is_misplaced(part, parts, count, INT16, rank) is shared, own
