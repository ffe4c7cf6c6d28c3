"""Bytes to disk and back, their SHA-256 taken on the way."""

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

__all__ = ["ContentError", "memory", "read_checked", "read_small", "sync_directory", "write_file"]

# What is written, read and hashed at once, in bytes: it stays in the cache from one to the other.
BLOCK = 4 * 2**20
# Blocks that may wait to be hashed. They hold memory only where a tensor had to be copied.
BACKLOG = 16


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
            length = 0
            for part in parts:
                whole = memoryview(part)
                for start in range(0, len(whole), BLOCK):
                    block = whole[start : start + BLOCK]
                    sha.update(block)
                    _write(descriptor, block)
                length += len(whole)
            os.fsync(descriptor)
            return length, sha.hexdigest()
    finally:
        os.close(descriptor)


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
