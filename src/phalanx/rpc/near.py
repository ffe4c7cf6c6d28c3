"""Connections to workers of the same host: plain sockets of the host.

Nothing stands between the thread that calls and the one that executes: each message wakes one
thread, where ZeroMQ's own threads would have to be woken in between, three times per direction.
That is half of the time of a short call. So on a host ZeroMQ is not used, nor is anything encrypted
that doesn't leave the kernel; but before a byte of a message is read, both ends prove that they
know the job's key (`door.py`).
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from phalanx.rpc.spin import Spin
from phalanx.rpc.wire import FRAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.rpc.freight import Frames

__all__ = ["Stream", "is_readable"]

_LENGTH = struct.Struct("<Q")
_TIME = struct.Struct("ll")
_CHUNK = 32 * 2**10
_AT_A_TIME = 2 * 2**20
"""Bytes to read before others have their turn."""
_MOST_WAITING = FRAME
"""Bytes of answers that nobody reads, until the connection ends."""
_LOOK = 1e-3
"""Seconds that a caller looks for its answer before it sleeps."""


class Stream:
    """A connection whose other end has proved that it knows the key."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.descriptor = connection.fileno()
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()
        self._timeout: float | None = None
        self._spin = Spin(_LOOK)
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._queued, self._is_sending = 0, False
        self._parts: list[memoryview] = []
        """Of the queue's message that is on its way; only who has set `_is_sending` touches it."""

    def send(
        self,
        frame: bytes,
        behind: Sequence[memoryview] = (),  # noqa: ARG002
        end: float = math.inf,
    ) -> None:
        """Send a message, on a connection that nobody else sends by; blocks while nobody reads.

        Args:
            frame: The message.
            behind: Empty; on a host nothing goes behind it.
            end: When to give up, in monotonic seconds; a part of it may be out then.

        Raises:
            TimeoutError: It wasn't all out before `end`.
            OSError: The connection is gone.
        """
        self._write(_parts(frame), end)

    def post(self, frame: bytes) -> bool:
        """Send a message behind those that wait, from any thread; doesn't block.

        Returns:
            Whether some are left, since the other end doesn't read: `flush` must be called then.

        Raises:
            OSError: The connection is gone.
        """
        with self._lock:
            self._queue.append(frame)
            self._queued += len(frame)
            if self._is_sending:
                return False
            self._is_sending = True
        try:
            self._drain(0.0)
        except TimeoutError:
            return True
        return False

    def flush(self) -> None:
        """Send all that is left; blocks while the other end doesn't read.

        Raises:
            OSError: The connection is gone.
        """
        self._drain(math.inf)

    def answer(self, frame: bytes) -> None:
        """Send an answer; where another thread is sending one, leave it to that.

        So one thread alone is held up by an asker who doesn't read.

        Raises:
            OSError: The connection is gone, or it is now: too much waits for its reader.
        """
        if self._queued > _MOST_WAITING:
            self.end()
        if self.post(frame):
            self.flush()

    def _drain(self, end: float) -> None:
        try:
            while self._parts or self._next():
                self._write(self._parts, end)
        except TimeoutError:
            raise
        except BaseException:
            self.end()  # interrupted: a part of a message may be lost
            with self._lock:
                self._queue.clear()
                self._parts, self._queued, self._is_sending = [], 0, False
            raise

    def _next(self) -> bool:
        with self._lock:
            if not self._queue:
                self._is_sending = False
                return False
            frame = self._queue.popleft()
            self._queued -= len(frame)
            self._parts = _parts(frame)
            return True

    def _write(self, parts: list[memoryview], end: float) -> None:
        """Send all parts; what is out is taken off the list."""
        while parts:
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_for_room(end)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def read(self) -> list[bytes] | None:
        """All messages that are there now; None at the end of the connection."""
        messages: list[bytes] = []
        for _ in range(0, _AT_A_TIME, _CHUNK):
            try:
                data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
                messages += self._split(data)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                return messages or None
            if len(data) < _CHUNK:
                break
        return messages

    def receive(self, end: float) -> Frames | None:
        """Wait for one message; None at the end of the connection.

        Args:
            end: When to give up, in monotonic seconds; infinity for never.

        Raises:
            TimeoutError: It didn't come before `end`.
        """
        try:
            if not self._ready and not self._spin.look(self._look):
                slept = time.perf_counter()
                while not self._ready:
                    self._wait_until(end)
                    with contextlib.suppress(BlockingIOError):  # the kernel's timeout
                        self._take(self._socket.recv(_CHUNK))
                self._spin.slept(time.perf_counter() - slept)
        except TimeoutError:
            raise
        except OSError:
            return None
        return self._ready.popleft(), []

    def _look(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._take(self._socket.recv(_CHUNK, socket.MSG_DONTWAIT))
        return bool(self._ready)

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._ready.extend(self._split(data))

    def end(self) -> None:
        """End it: who waits for something from it hears so, in this process and in the other."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and let go of it."""
        self.end()
        self._socket.close()

    def _wait_for_room(self, end: float) -> None:
        left = end - time.monotonic()
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        if left <= 0 or not poll.poll(None if left == math.inf else left * 1000):
            raise TimeoutError

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        # The kernel's own timeout: a wait is one system call. Setting it is another, so only where
        # the old one won't do.
        timeout = 0.0 if left == math.inf else left
        if self._timeout is None or (timeout != self._timeout and not self._fits(timeout)):
            timeout *= 0.9 if timeout > 1 else 1  # so that it will do for the next call too
            self._timeout = timeout
            value = _TIME.pack(int(timeout), max(1, int(timeout % 1 * 1e6)) if timeout else 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def _fits(self, timeout: float) -> bool:
        """Whether the timeout that is set ends a wait no later, and not much earlier."""
        return bool(self._timeout) and 0.5 * timeout < (self._timeout or 0.0) <= timeout

    def _split(self, data: bytes) -> list[bytes]:
        if not self._buffer and len(data) > _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length == len(data) - _LENGTH.size:
                return [data[_LENGTH.size :]]
        buffer = self._buffer
        buffer += data
        messages, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            stop = start + _LENGTH.size + length
            if length > FRAME:
                raise ConnectionAbortedError(f"a message of {length} bytes was announced")
            if stop > len(buffer):
                break
            messages.append(bytes(memoryview(buffer)[start + _LENGTH.size : stop]))
            start = stop
        del buffer[:start]
        return messages


def _parts(frame: bytes) -> list[memoryview]:
    return [memoryview(_LENGTH.pack(len(frame))), memoryview(frame)]


def is_readable(descriptor: int, milliseconds: int = 0) -> bool:
    """Whether a descriptor can be read now, or in so many milliseconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))
