"""Bytes to disk and back, their SHA-256 taken on the way."""

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ContentError", "memory", "read_checked", "read_small", "sync_directory", "write_file"]

# What is written, read and hashed at once, in bytes.
BLOCK = 4 * 2**20
# Smaller parts are put together first: a system call and a change of threads cost more than a copy.
SMALL = 2**18
# Blocks that may wait to be hashed. They hold memory only where a tensor had to be copied.
BACKLOG = 64
# Bytes after which the disk is told to begin, rather than at the end only.
EARLY = 8 * BLOCK

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class ContentError(ValueError):
    """A file that doesn't hold what it should."""


class _Hash:
    """SHA-256 on a thread of its own: OpenSSL leaves the interpreter alone meanwhile."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "phalanx-snapshot")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> "_Hash":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def update(self, block: memoryview) -> None:
        """Take a block in; it must not change until `hexdigest`."""
        if len(block) <= SMALL and not self._pending:
            self._hash.update(block)
            return
        if len(self._pending) >= BACKLOG:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._hash.update, block))

    def hexdigest(self) -> str:
        while self._pending:
            self._pending.popleft().result()
        return self._hash.hexdigest()


def memory(buffer: Tensor) -> memoryview:
    """Return the memory of a uint8[n]."""
    array: Any = buffer.numpy()
    return memoryview(array)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, flush it to the disk, and return its length and SHA-256.

    Blocks until the disk has it.

    Raises:
        OSError: The system's; what has been written stays, for the caller to remove.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        with _Hash() as sha:
            length = begun = 0
            for block in _blocks(parts):
                sha.update(block)
                _write(descriptor, block)
                length += len(block)
                if length - begun >= EARLY:
                    _start_writing(descriptor, begun, length - begun)
                    begun = length
            os.fsync(descriptor)
            return length, sha.hexdigest()
    finally:
        os.close(descriptor)


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield all bytes in order: large parts in blocks of their own memory, small ones together."""
    together = bytearray()
    for part in parts:
        if len(part) <= SMALL and len(together) + len(part) <= BLOCK:
            together += part
            continue
        if together:
            yield memoryview(bytes(together))
            together.clear()
        whole = memoryview(part)
        for start in range(0, len(whole), BLOCK):
            yield whole[start : start + BLOCK]
    if together:
        yield memoryview(bytes(together))


def _start_writing(descriptor: int, start: int, length: int) -> None:
    """Have the kernel begin with bytes that were written; a hint, whatever becomes of it."""
    _sync_file_range(descriptor, start, length, _SYNC_FILE_RANGE_WRITE)


def _write(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checked(path: Path, length: int, digest: str) -> Tensor:
    """Return a file as a uint8[length], once its length and SHA-256 are as they should be.

    Raises:
        OSError: The file can't be read.
        ContentError: It isn't what was written.
    """
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != length:
            raise ContentError(f"{path.name} has {found} bytes, {length} were written")
        buffer = torch.empty(length, dtype=torch.uint8)
        content = memory(buffer)
        with _Hash() as sha:
            for start in range(0, length, BLOCK):
                block = content[start : start + BLOCK]
                _read(file, block, path)
                sha.update(block)
            if sha.hexdigest() != digest:
                raise ContentError(f"{path.name} isn't what was written: its SHA-256 differs")
    return buffer


def read_small(path: Path, limit: int) -> bytes:
    """Return a file of at most `limit` bytes.

    Raises:
        OSError: It can't be read.
        ContentError: It is larger.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ContentError(f"{path.name} has {size} bytes, expected at most {limit}")
        buffer = bytearray(size)
        _read(file, memoryview(buffer), path)
    return bytes(buffer)


def _read(file: Any, block: memoryview, path: Path) -> None:
    while block:
        count = file.readinto(block)
        if not count:
            raise ContentError(f"{path.name} ends early")
        block = block[count:]
