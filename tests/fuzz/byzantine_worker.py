"""A Byzantine worker: it has the key and sends arbitrary data.

A worker with the key may have functions executed, so these tests do not check that none is. They
check that the victim neither crashes, hangs nor leaks, and still serves other workers.
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

from phalanx.rpc import local_connection as local
from phalanx.rpc import remote_connection as remote
from phalanx.rpc.message import (
    DTYPES,
    MAX_FRAME_SIZE,
    Kind,
    TensorDescriptor,
    TensorLocation,
    encode_frame,
)
from phalanx.rpc.shared_memory import ShmSender

__all__ = ["ByzantineWorker"]

# Without LEAVE, which is trusted and would end the test.
_KINDS = [kind for kind in Kind if kind is not Kind.LEAVE]
_NUMBERS = (0, 1, 2, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_LENGTHS = (MAX_FRAME_SIZE + 1, 10**12, 2**63, 2**64 - 1)


def _harmless(*values: Any) -> Any:
    return values


class ByzantineWorker:
    """A sender of arbitrary data to one worker, as worker 0 or in its name.

    Args:
        key: The key of the job.
        local_address: The address on which the worker listens for this host.
        remote_address: The URL on which it listens for other hosts; empty if it does not.
        shm_sender: The sender of worker 0.
        seed: The seed of the random data.
    """

    def __init__(
        self,
        key: bytes,
        local_address: str,
        remote_address: str,
        shm_sender: ShmSender,
        seed: int,
    ) -> None:
        self._key, self._address, self._remote_address = key, local_address, remote_address
        self._random = random.Random(seed)
        self._connection: local.LocalConnection | None = None
        self._remote_context = remote.RemoteContext(key, "127.0.0.1") if remote_address else None
        self._eventfd = os.eventfd(0)
        self._remote_connection: remote.RemoteConnection | None = None
        self._shm_sender = shm_sender
        # Other open files: a large file, and unsealed memory with the header of a segment.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._file.truncate(2**33)
        self._memory = os.memfd_create("byzantine")
        segment = self._shm_sender._segments[64 * 2**10][0]
        os.write(self._memory, os.pread(segment.descriptor, 4096, 0))
        os.ftruncate(self._memory, segment.size)

    def send(self) -> None:
        """Send one random frame."""
        if self._remote_context is not None and self._random.randrange(2):
            self._send_remote(self._frame(), self._make_out_of_band())
            return
        methods = (self._send_local, self._announce)
        self._random.choices(methods, (98, 2))[0]()

    def close(self) -> None:
        """Close all connections and files."""
        if self._connection is not None:
            self._connection.close()
        if self._remote_connection is not None:
            self._remote_connection.close()
        if self._remote_context is not None:
            self._remote_context.close()
        self._file.close()
        os.close(self._memory)

    # ---- sending ----

    def _connect(self) -> local.LocalConnection:
        if self._connection is None:
            self._connection = local.connect(self._key, self._address)
        return self._connection

    def _send_local(self) -> None:
        connection = self._connect()
        try:
            connection.send(self._frame())
            if connection.read() is None:  # unread answers would block the victim
                raise ConnectionResetError
        except OSError:
            connection.close()
            self._connection = None

    def _announce(self) -> None:
        """Announce more data than is sent or allowed, then close the connection."""
        connection = self._connect()
        length = self._random.choice((*_LENGTHS, 1000))
        data = local._LENGTH.pack(length) + self._random.randbytes(self._random.randrange(900))
        try:
            connection._socket.sendall(data)
            if length > MAX_FRAME_SIZE:
                # The victim must close the connection.
                while connection.receive(time.monotonic() + 30) is not None:
                    pass
        except OSError:
            pass
        connection.close()
        self._connection = None

    def _send_remote(self, frame: bytes, out_of_band: list[memoryview]) -> None:
        assert self._remote_context is not None
        if self._remote_connection is None or self._random.randrange(1000) == 0:
            if self._remote_connection is not None:
                self._remote_connection._socket.close(1000)
            self._remote_connection = remote.RemoteConnection(
                self._remote_context, self._remote_address, self._eventfd
            )
        self._remote_connection.send(frame, out_of_band)
        while self._remote_connection._socket.poll(0):
            self._remote_connection._socket.recv_multipart()

    # ---- frames ----

    def _make_out_of_band(self) -> list[memoryview]:
        if self._random.randrange(3):
            return []
        sizes = self._random.choices((0, 1, 7, 100, 5000), k=self._random.choice((1, 2, 50)))
        return [memoryview(bytes(size)) for size in sizes]

    def _frame(self) -> bytes:
        methods = (self._noise, self._mutated, self._bad_table, self._bad_content, self._bad_memory)
        return self._random.choices(methods, (1, 3, 2, 2, 2))[0]()

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(300))

    def _encode(
        self,
        descriptors: list[TensorDescriptor],
        metadata: bytes,
        payload: bytes,
        is_pickle_in_tensor: bool = False,
    ) -> bytes:
        inline_data = [
            bytes(descriptor.size if 0 <= descriptor.size < 2**20 else 3)
            for descriptor in descriptors
            if descriptor.location is TensorLocation.INLINE
        ]
        number = self._random.randrange(2**64)
        kind, extra = self._random.choice(_KINDS), self._random.randrange(2**32)
        return encode_frame(
            kind,
            0,
            number,
            extra,
            descriptors,
            metadata,
            payload,
            inline_data,
            is_pickle_in_tensor,
        )

    def _mutated(self) -> bytes:
        """Return a valid frame with some bytes changed outside the pickle and a valid checksum."""
        descriptors = [self._make_descriptor() for _ in range(self._random.randrange(4))]
        frame = bytearray(self._encode(descriptors, self._make_metadata(len(descriptors)), b""))
        for at in self._random.sample(range(8, len(frame) - 4), self._random.randrange(1, 6)):
            frame[at] = self._random.choice((0, 1, 127, 128, 255, self._random.randrange(256)))
        if frame[8] == 2:  # in the name of an honest worker it could damage that worker's state
            frame[8] = 0
        struct.pack_into("<I", frame, len(frame) - 4, zlib.crc32(frame[:-4]))
        if self._random.randrange(10) == 0:
            return bytes(frame[: self._random.randrange(len(frame))])
        return bytes(frame)

    def _make_descriptor(self) -> TensorDescriptor:
        location = self._random.choice(
            (
                TensorLocation.INLINE,
                TensorLocation.INLINE,
                TensorLocation.SHARED,
                TensorLocation.OUT_OF_BAND,
            )
        )
        shape = tuple(self._random.randrange(5) for _ in range(self._random.randrange(4)))
        numbers = (self._random.choice(_NUMBERS) for _ in range(3))
        return TensorDescriptor(self._random.choice(DTYPES), location, shape, *numbers)

    def _bad_table(self) -> bytes:
        """Return a frame with negative or excessive shapes, or shapes whose product overflows."""
        sizes = (0, 1, 3, -1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1)
        shape = tuple(self._random.choice(sizes) for _ in range(self._random.randrange(1, 70)))
        kind = self._random.choice(DTYPES)
        size = self._random.choice((0, 8, 2**40, 2**64 - 1))
        for dimension in shape:
            size = size * dimension % 2**64 if self._random.randrange(2) else size
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
        header = struct.pack(
            "<4sBBHIIQQIII", b"PhR2", self._random.choice(_KINDS), self._random.randrange(3),
            count, 0, 0, 7, 7, len(table), 0, 0,
        )  # fmt: skip
        return (body := header + table + bytes(self._random.randrange(9))) + struct.pack(
            "<I", zlib.crc32(body)
        )

    def _bad_content(self) -> bytes:
        """Return a frame with a truncated or unexpected pickle, or invalid autograd metadata."""
        descriptors = [
            TensorDescriptor(torch.float32, TensorLocation.INLINE, (3,)),
            TensorDescriptor(torch.int64, TensorLocation.INLINE, ()),
        ]
        valid: Any = (_harmless, (1, "a"), {}, True)
        values = (
            valid,
            valid[:3],
            5,
            None,
            [],
            {},
            ((0, 1), 0, 1),
            (("a", []), {}, None),
            [(1, 2)],
        )
        payload = pickle.dumps(self._random.choice(values), 5)
        if self._random.randrange(2):
            payload = payload[: self._random.randrange(len(payload))]
        return self._encode(
            descriptors, self._make_metadata(2), payload, self._random.randrange(20) == 0
        )

    def _make_metadata(self, tensors: int) -> bytes:
        variant = self._random.randrange(4)
        if variant == 0:
            return b""
        if variant == 1:
            return self._random.randbytes(self._random.randrange(60))
        indices = self._random.choices((0, 1, 2, 2**32 - 1), k=self._random.randrange(1, 4))
        sources = self._random.randrange(2)
        counts = (len(indices), sources) if variant == 2 else (2**32 - 1, 2**32 - 1)
        metadata = struct.pack("<QII", self._random.randrange(2**64), *counts)
        metadata += struct.pack(f"<{len(indices)}I", *indices)
        return (
            metadata + struct.pack("<IQI", self._random.choice((0, 1, 2**32 - 1)), 5, 0) * sources
        )

    def _bad_memory(self) -> bytes:
        """Return a frame with invalid blocks and file descriptors."""
        segment = self._shm_sender._segments[64 * 2**10][0]
        descriptors = (
            segment.descriptor, self._file.fileno(), self._memory, self._eventfd,
            self._random.randrange(64), self._random.choice(_NUMBERS),
        )  # fmt: skip
        descriptor = TensorDescriptor(
            self._random.choice(DTYPES),
            TensorLocation.SHARED,
            self._random.choice(((0,), (5,), (2**13,), (2**20,), (2**40, 2), (0, 2**62))),
            self._random.choice((segment.number, segment.number + 1, 2**32 - 1)),
            self._random.choice(descriptors),
            self._random.choice((0, 1, 254, 255, 256, 2**31, 2**32 - 1)),
        )
        return self._encode([descriptor], b"", b"", self._random.randrange(9) == 0)
