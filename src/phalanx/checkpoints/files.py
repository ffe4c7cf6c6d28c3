"""Writing and reading files, with their SHA-256 computed at the same time."""

import contextlib
import ctypes
import hashlib
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Size limit of a small file in bytes, far above any real manifest, so that a foreign file is not
# read forever.
MAX_SMALL_FILE = 2**30
# Bytes written, read and hashed at a time. It is large because each handover between threads may
# wait, on a busy machine for long.
BATCH = 32 * 2**20
# Maximum number of buffers in a batch; the system call accepts 1024.
BUFFERS = 512
# Parts of at most this many bytes are joined before they are written.
SMALL = 2**16
# Maximum number of batches waiting to be hashed. They use extra memory only for copied tensors.
BACKLOG = 8
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class ContentError(ValueError):
    """Raised if a file does not have the expected content."""


class _Hash:
    """A SHA-256 computed on a separate thread, as hashlib releases the GIL."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "phalanx-checkpoint")
        self._pending: deque[Future[None]] = deque()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def update(self, batch: Sequence[memoryview]) -> None:
        """Add buffers, which must not change until `hexdigest` returns."""
        if not self._pending and sum(map(len, batch)) <= SMALL:
            self._hash_batch(batch)
            return
        if len(self._pending) >= BACKLOG:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._hash_batch, batch))

    def _hash_batch(self, batch: Sequence[memoryview]) -> None:
        for buffer in batch:
            self._hash.update(buffer)

    def hexdigest(self) -> str:
        while self._pending:
            self._pending.popleft().result()
        return self._hash.hexdigest()


def byte_view(buffer: Tensor) -> memoryview:
    """Return a view of the memory of a uint8[n] tensor."""
    array: Any = buffer.numpy()
    return memoryview(array)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, flush it to disk, and return its length in bytes and its SHA-256.

    Blocks until the data is on disk.

    Raises:
        OSError: The file cannot be written. The caller must remove a partly written file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        with contextlib.closing(_Hash()) as sha:
            length = 0
            for batch in _batches(parts):
                sha.update(batch)
                start, length = length, length + _write(descriptor, batch)
                # Asks the kernel to start the writeback: a hint, so errors are ignored.
                _sync_file_range(descriptor, start, length - start, _SYNC_FILE_RANGE_WRITE)
            os.fsync(descriptor)
            return length, sha.hexdigest()
    finally:
        os.close(descriptor)


def _batches(parts: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """Yield all bytes in order, in batches of about `BATCH` bytes."""
    batch: list[memoryview] = []
    length = 0
    for buffer in _buffers(parts):
        batch.append(buffer)
        length += len(buffer)
        if length >= BATCH or len(batch) >= BUFFERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _buffers(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield small parts joined, and large parts in slices of at most `BATCH` bytes."""
    joined = bytearray()
    for part in parts:
        if len(part) <= SMALL:
            joined += part
        if joined and (len(part) > SMALL or len(joined) > SMALL):
            yield memoryview(bytes(joined))
            joined.clear()
        if len(part) > SMALL:
            view = memoryview(part)
            for start in range(0, len(view), BATCH):
                yield view[start : start + BATCH]
    if joined:
        yield memoryview(bytes(joined))


def _write(descriptor: int, batch: Sequence[memoryview]) -> int:
    """Write all bytes of some buffers, and return their number."""
    total = remaining = sum(map(len, batch))
    buffers = list(batch)
    while remaining:
        count = os.writev(descriptor, buffers)
        remaining -= count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return total


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_verified(path: Path, length: int, digest: str) -> Tensor:
    """Return the content of a file as a uint8[length], after checking its length and SHA-256.

    Raises:
        OSError: The file cannot be read.
        ContentError: The length or the SHA-256 differs.
    """
    with _open(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != length:
            raise ContentError(f"{path.name} has {actual} bytes, expected {length}")
        buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
        content = byte_view(buffer)
        with contextlib.closing(_Hash()) as sha:
            for start in range(0, length, BATCH):
                block = content[start : start + BATCH]
                _read(file, block, path)
                sha.update([block])
            if sha.hexdigest() != digest:
                raise ContentError(f"{path.name} is damaged: its SHA-256 differs")
    return buffer


def read_small(path: Path) -> bytes:
    """Return the content of a file of at most `MAX_SMALL_FILE` bytes.

    Raises:
        OSError: The file cannot be read.
        ContentError: The file is larger, or not a regular file.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SMALL_FILE:
            raise ContentError(f"{path.name} has {size} bytes, expected at most {MAX_SMALL_FILE}")
        buffer = bytearray(size)
        _read(file, memoryview(buffer), path)
    return bytes(buffer)


def _open(path: Path) -> Any:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be opened.
        ContentError: The file is not a regular file. Reading a FIFO, for example, may block
            forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ContentError(f"{path.name} is not a regular file")
    return open(descriptor, "rb", buffering=0)


def _read(file: Any, block: memoryview, path: Path) -> None:
    while block:
        count = file.readinto(block)
        if not count:
            raise ContentError(f"{path.name} is truncated")
        block = block[count:]
