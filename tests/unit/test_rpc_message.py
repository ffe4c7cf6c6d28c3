"""Messages of `phalanx.rpc`: encoding, parsing, and detection of malformed ones."""

from __future__ import annotations

import os
import random
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.rpc.message import (
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
    source=st.integers(0, WORKERS - 1),
    call=st.integers(0, 2**64 - 1),
    tensors=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(TensorLocation), shapes), max_size=5
    ),
    metadata=st.binary(max_size=30),
    payload=st.binary(max_size=300),
)
def test_round_trip(kind, source, call, tensors, metadata, payload) -> None:
    descriptors = [
        TensorDescriptor(dtype, location, shape, 3, 4, 5) for dtype, location, shape in tensors
    ]
    inline_data = [
        os.urandom(descriptor.size)
        for descriptor in descriptors
        if descriptor.location is TensorLocation.INLINE
    ]
    sizes = [
        descriptor.size
        for descriptor in descriptors
        if descriptor.location is TensorLocation.OUT_OF_BAND and descriptor.size
    ]
    out_of_band = [memoryview(os.urandom(size)) for size in sizes]
    frame = encode_frame(kind, source, call, 7, descriptors, metadata, payload, inline_data)
    message = parse(frame, out_of_band, range(WORKERS))
    assert message == (
        kind,
        source,
        call,
        7,
        descriptors,
        metadata,
        payload,
        inline_data,
        out_of_band,
        False,
    )


def make_frame() -> bytes:
    descriptors = [
        TensorDescriptor(torch.float32, TensorLocation.INLINE, (2, 3)),
        TensorDescriptor(torch.int64, TensorLocation.SHARED, (900,)),
    ]
    return encode_frame(Kind.CALL, 2, 3, 4, descriptors, b"metadata", b"payload", [bytes(24)])


@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    with pytest.raises(Malformed):
        parse(noise, [], range(WORKERS))


def test_damage() -> None:
    """Truncate the frame anywhere, change any byte, add data at the end."""
    frame = make_frame()
    for length in range(len(frame)):
        with pytest.raises(Malformed):
            parse(frame[:length], [], range(WORKERS))
    for at in range(len(frame)):
        changed = bytearray(frame)
        changed[at] ^= random.randrange(1, 256)
        with pytest.raises(Malformed):
            parse(bytes(changed), [], range(WORKERS))
    for extra in ([memoryview(b"more")], [memoryview(b"")]):
        with pytest.raises(Malformed, match="more out-of-band frames"):
            parse(frame, extra, range(WORKERS))
    with pytest.raises(Malformed, match="no worker has the id 2 of its sender"):
        parse(frame, [], range(2))


def test_invalid_fields() -> None:
    """Invalid fields with a valid checksum, from an attacker or a bug, are detected."""
    frame = make_frame()
    rejected_count = 0
    for at in range(len(frame) - 4):
        for value in (0, 1, 127, 128, 255):
            changed = bytearray(frame)
            changed[at] = value
            struct.pack_into("<I", changed, len(frame) - 4, zlib.crc32(changed[:-4]))
            try:
                message = parse(bytes(changed), [], range(WORKERS))
            except Malformed:
                rejected_count += 1
            else:
                assert sum(map(len, message.inline_data)) <= len(frame)
                assert len(message.descriptors) == 2
    assert rejected_count > 200
