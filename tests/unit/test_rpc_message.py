"""Messages of `phalanx.rpc`: what is written is read, and anything else is told from it."""

from __future__ import annotations

import os
import random
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.rpc.codec.message import (
    DTYPES,
    Kind,
    Malformed,
    TensorDescriptor,
    TensorLocation,
    encode_frame,
    parse,
)

WORKERS = 5
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tables = st.tuples(st.sampled_from(DTYPES), st.sampled_from(TensorLocation), shapes)


@given(
    kind=st.sampled_from(Kind),
    numbers=st.tuples(st.integers(0, WORKERS - 1), st.integers(0, WORKERS - 1)),
    call=st.integers(0, 2**64 - 1),
    tensors=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(TensorLocation), shapes), max_size=5
    ),
    note=st.binary(max_size=30),
    payload=st.binary(max_size=300),
)
def test_what_is_written_is_read(kind, numbers, call, tensors, note, payload) -> None:
    rows = [TensorDescriptor(dtype, place, shape, 3, 4, 5) for dtype, place, shape in tensors]
    here = [os.urandom(row.size) for row in rows if row.location is TensorLocation.INLINE]
    sizes = [row.size for row in rows if row.location is TensorLocation.OUT_OF_BAND and row.size]
    behind = [memoryview(os.urandom(size)) for size in sizes]
    frame = encode_frame(kind, *numbers, call, 7, rows, note, payload, here)
    message = parse(frame, behind, WORKERS)
    assert message == (kind, *numbers, call, 7, rows, note, payload, here, behind, False)


def a_frame() -> bytes:
    rows = [
        TensorDescriptor(torch.float32, TensorLocation.INLINE, (2, 3)),
        TensorDescriptor(torch.int64, TensorLocation.SHARED, (900,)),
    ]
    return encode_frame(Kind.CALL, 1, 2, 3, 4, rows, b"note", b"payload", [bytes(24)])


@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    with pytest.raises(Malformed):
        parse(noise, [], WORKERS)


def test_damage() -> None:
    """Cut anywhere, one byte changed anywhere, more at the end."""
    frame = a_frame()
    for length in range(len(frame)):
        with pytest.raises(Malformed):
            parse(frame[:length], [], WORKERS)
    for at in range(len(frame)):
        changed = bytearray(frame)
        changed[at] ^= random.randrange(1, 256)
        with pytest.raises(Malformed):
            parse(bytes(changed), [], WORKERS)
    for wrong in ([memoryview(b"more")], [memoryview(b"")]):
        with pytest.raises(Malformed, match="more frames behind it"):
            parse(frame, wrong, WORKERS)
    with pytest.raises(Malformed, match="from worker 1 for 2 of 2"):
        parse(frame, [], 2)


def test_fields_that_lie() -> None:
    """With a checksum that is right: by one who knows how, or a mistake of ours."""
    frame = a_frame()
    lies = 0
    for at in range(len(frame) - 4):
        for value in (0, 1, 127, 128, 255):
            changed = bytearray(frame)
            changed[at] = value
            struct.pack_into("<I", changed, len(frame) - 4, zlib.crc32(changed[:-4]))
            try:
                message = parse(bytes(changed), [], WORKERS)
            except Malformed:
                lies += 1
            else:
                assert sum(map(len, message.inline_data)) <= len(frame)
                assert len(message.descriptors) == 2
    assert lies > 200
