"""What a worker that has gone mad sends: it has the key, and nothing that it says need make sense.

Who has the key may have functions executed: so nothing here proves that nothing is. What must hold:
the worker neither crashes nor hangs, keeps nothing, and goes on for others.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import tempfile
import time
import zlib
from typing import Any

import torch

from phalanx.rpc.codec.message import (
    DTYPES,
    MAX_FRAME_SIZE,
    Kind,
    TensorDescriptor,
    TensorLocation,
    encode_frame,
)
from phalanx.rpc.shared_memory.sender import ShmSender
from phalanx.rpc.transport import auth, local, remote

__all__ = ["Mad"]

# It may say that it leaves, and is believed: then there is nothing more to be tried.
_KINDS = [kind for kind in Kind if kind is not Kind.LEAVE]
_NUMBERS = (0, 1, 2, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_LENGTHS = (MAX_FRAME_SIZE + 1, 10**12, 2**63, 2**64 - 1)


def _harmless(*values: Any) -> Any:
    return values


class Mad:
    """Sends to one worker, as worker 0 or in its name.

    Args:
        key: The job's.
        near_address: Where the worker listens on this host.
        far_address: The URL where it listens for other hosts; empty if it doesn't.
        shm_sender: That of worker 0.
        seed: Of what is sent.
    """

    def __init__(
        self,
        key: bytes,
        near_address: str,
        far_address: str,
        shm_sender: ShmSender,
        seed: int,
    ) -> None:
        self._key, self._address, self._far_address = key, near_address, far_address
        self._random = random.Random(seed)
        self._stream: local.LocalConnection | None = None
        self._far = remote.RemoteContext(key, "127.0.0.1") if far_address else None
        self._wake = os.eventfd(0)
        self._line: remote.RemoteConnection | None = None
        self._shm_sender = shm_sender
        # What else is open here: a file, a large one, memory without seals that says it is ours.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._file.truncate(2**33)
        self._memory = os.memfd_create("mad")
        segment = self._shm_sender._segments[64 * 2**10][0]
        os.write(self._memory, bytes(segment.memory[:4096]))
        os.ftruncate(self._memory, segment.size)

    def send(self) -> None:
        """Send one thing, of one kind or another."""
        if self._far is not None and self._random.randrange(2):
            self._send_far(self._frame(), self._behind())
            return
        ways = (self._send_near, self._announce)
        self._random.choices(ways, (98, 2))[0]()

    def close(self) -> None:
        """Stop it."""
        if self._stream is not None:
            self._stream.close()
        if self._line is not None:
            self._line.close()
        if self._far is not None:
            self._far.close()
        self._file.close()
        os.close(self._memory)

    # ---- ways to send ----

    def _connected(self) -> local.LocalConnection:
        if self._stream is None:
            self._stream = auth.connect(self._key, self._address)
        return self._stream

    def _send_near(self) -> None:
        stream = self._connected()
        try:
            stream.send(self._frame())
            if stream.read() is None:  # answers must be read, or nobody sends more of them
                raise ConnectionResetError
        except OSError:
            stream.close()
            self._stream = None

    def _announce(self) -> None:
        """More than there is, or than is allowed, and then no more."""
        stream = self._connected()
        length = self._random.choice((*_LENGTHS, 1000))
        data = local._LENGTH.pack(length) + self._random.randbytes(self._random.randrange(900))
        try:
            stream._socket.sendall(data)
            if length > MAX_FRAME_SIZE:
                # It is cut off for that; nothing else would end this.
                while stream.receive(time.monotonic() + 30) is not None:
                    pass
        except OSError:
            pass
        stream.close()
        self._stream = None

    def _send_far(self, frame: bytes, behind: list[memoryview]) -> None:
        assert self._far is not None
        if self._line is None or self._random.randrange(1000) == 0:
            if self._line is not None:
                self._line._socket.close(1000)
            self._line = remote.RemoteConnection(self._far, self._far_address, self._wake)
        self._line.send(frame, behind)
        while self._line._socket.poll(0):
            self._line._socket.recv_multipart()

    # ---- what is sent ----

    def _behind(self) -> list[memoryview]:
        if self._random.randrange(3):
            return []
        sizes = self._random.choices((0, 1, 7, 100, 5000), k=self._random.choice((1, 2, 50)))
        return [memoryview(bytes(size)) for size in sizes]

    def _frame(self) -> bytes:
        ways = (self._noise, self._mutated, self._lying_table, self._bad_content, self._bad_memory)
        return self._random.choices(ways, (1, 3, 2, 2, 2))[0]()

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(300))

    def _written(
        self, rows: list[TensorDescriptor], note: bytes, payload: bytes, is_apart: bool = False
    ) -> bytes:
        here = [
            bytes(row.size if 0 <= row.size < 2**20 else 3)
            for row in rows
            if row.location is TensorLocation.INLINE
        ]
        number = self._random.randrange(2**64)
        kind, extra = self._random.choice(_KINDS), self._random.randrange(2**32)
        return encode_frame(kind, 0, 0, number, extra, rows, note, payload, here, is_apart)

    def _mutated(self) -> bytes:
        """A good one, but for some bytes that aren't the pickle's; the checksum is right."""
        rows = [self._row() for _ in range(self._random.randrange(4))]
        frame = bytearray(self._written(rows, self._note(len(rows)), b""))
        for at in self._random.sample(range(8, len(frame) - 4), self._random.randrange(1, 6)):
            frame[at] = self._random.choice((0, 1, 127, 128, 255, self._random.randrange(256)))
        if frame[8] == 2:  # in the name of one who isn't mad it could spoil what is that one's
            frame[8] = 0
        struct.pack_into("<I", frame, len(frame) - 4, zlib.crc32(frame[:-4]))
        if self._random.randrange(10) == 0:
            return bytes(frame[: self._random.randrange(len(frame))])
        return bytes(frame)

    def _row(self) -> TensorDescriptor:
        place = self._random.choice(
            (
                TensorLocation.INLINE,
                TensorLocation.INLINE,
                TensorLocation.SHARED,
                TensorLocation.OUT_OF_BAND,
            )
        )
        shape = tuple(self._random.randrange(5) for _ in range(self._random.randrange(4)))
        numbers = (self._random.choice(_NUMBERS) for _ in range(3))
        return TensorDescriptor(self._random.choice(DTYPES), place, shape, *numbers)

    def _lying_table(self) -> bytes:
        """Shapes below zero, too large for anything, or whose product is too large for 64 bits."""
        sizes = (0, 1, 3, -1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1)
        shape = tuple(self._random.choice(sizes) for _ in range(self._random.randrange(1, 70)))
        kind = self._random.choice(DTYPES)
        size = self._random.choice((0, 8, 2**40, 2**64 - 1))
        for each in shape:
            size = size * each % 2**64 if self._random.randrange(2) else size
        fixed = struct.pack(
            "<BBHIIIQ",
            DTYPES.index(kind),
            self._random.randrange(3),
            len(shape),
            *(self._random.choice(_NUMBERS) for _ in range(3)),
            size,
        )
        table = fixed + struct.pack(f"<{len(shape)}q", *shape)
        count = self._random.choice((1, 1, 1, 0, 2, 65535))
        head = struct.pack(
            "<4sBBHIIIQQIII", b"PhR1", self._random.choice(_KINDS), self._random.randrange(3),
            count, 0, 0, 0, 7, 7, len(table), 0, 0,
        )  # fmt: skip
        return (body := head + table + bytes(self._random.randrange(9))) + struct.pack(
            "<I", zlib.crc32(body)
        )

    def _bad_content(self) -> bytes:
        """Pickles that are cut off, or aren't what was expected; notes that make no sense."""
        rows = [
            TensorDescriptor(torch.float32, TensorLocation.INLINE, (3,)),
            TensorDescriptor(torch.int64, TensorLocation.INLINE, ()),
        ]
        good: Any = (_harmless, (1, "a"), {}, True)
        values = (good, good[:3], 5, None, [], {}, ((0, 1), 0, 1), (("a", []), {}, None), [(1, 2)])
        payload = pickle.dumps(self._random.choice(values), 5)
        if self._random.randrange(2):
            payload = payload[: self._random.randrange(len(payload))]
        return self._written(rows, self._note(2), payload, self._random.randrange(20) == 0)

    def _note(self, tensors: int) -> bytes:
        how = self._random.randrange(4)
        if how == 0:
            return b""
        if how == 1:
            return self._random.randbytes(self._random.randrange(60))
        indices = self._random.choices((0, 1, 2, 2**32 - 1), k=self._random.randrange(1, 4))
        sources = self._random.randrange(2)
        counts = (len(indices), sources) if how == 2 else (2**32 - 1, 2**32 - 1)
        note = struct.pack("<QII", self._random.randrange(2**64), *counts)
        note += struct.pack(f"<{len(indices)}I", *indices)
        return note + struct.pack("<IQI", self._random.choice((0, 1, 2**32 - 1)), 5, 0) * sources

    def _bad_memory(self) -> bytes:
        """Blocks and files that aren't what they are said to be."""
        segment = self._shm_sender._segments[64 * 2**10][0]
        descriptors = (
            segment.fd, self._file.fileno(), self._memory, self._wake,
            self._random.randrange(64), self._random.choice(_NUMBERS),
        )  # fmt: skip
        row = TensorDescriptor(
            self._random.choice(DTYPES),
            TensorLocation.SHARED,
            self._random.choice(((0,), (5,), (2**13,), (2**20,), (2**40, 2), (0, 2**62))),
            self._random.choice((segment.number, segment.number + 1, 2**32 - 1)),
            self._random.choice(descriptors),
            self._random.choice((0, 1, 254, 255, 256, 2**31, 2**32 - 1)),
        )
        return self._written([row], b"", b"", self._random.randrange(9) == 0)
