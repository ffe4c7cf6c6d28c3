"""The ranks' output and deaths, brought to the process that started them.

One `Relay` watches the pipes and the pidfds of all ranks with one selector. `phalanx.launch` steps
it in the caller's own thread, so that a notebook shows the output in the cell; `phalanx run` steps
it in a thread beside the elastic agent.
"""

import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Exit", "Relay", "Sink"]

_PATIENCE = 0.2
"""Seconds after which a line without an end (a prompt, a row of dots) is shown as it is."""


@dataclass(frozen=True)
class Exit:
    """A rank's death: monotonic seconds, and its code as in `subprocess` (None: not known)."""

    time: float
    code: int | None


class Sink:
    """A text stream of this process that several ranks write to, line by line."""

    def __init__(self, name: str) -> None:
        """Take `sys.stdout` or `sys.stderr` as it is now: a notebook's, or a redirected one."""
        self._stream: Any = getattr(sys, name)
        self._open: object = None
        """Who wrote the unfinished line that the cursor stands on."""

    def write(self, owner: object, prefix: bytes, text: bytes) -> None:
        """Write lines of `owner`, the last perhaps unfinished; blocks as the stream does.

        Raises:
            OSError: the stream is gone.
        """
        lines = text.splitlines(keepends=True)
        pieces = [prefix + line for line in lines]
        if self._open is owner:
            pieces[0] = lines[0]
        elif self._open is not None:
            pieces.insert(0, b"\n")
        self._open = None if text.endswith((b"\n", b"\r")) else owner
        self._put(b"".join(pieces))

    def _put(self, data: bytes) -> None:
        if self._stream is None:
            return
        if hasattr(self._stream, "buffer"):
            self._stream.flush()
            self._stream.buffer.write(data)
        else:
            self._stream.write(data.decode(errors="replace"))
        self._stream.flush()


@dataclass
class _Stream:
    rank: int
    fd: int
    sink: Sink | None
    prefix: bytes
    tail: deque[bytes] | None
    pending: bytes = b""
    since: float = field(default_factory=time.monotonic)


class Relay:
    """Forwards the output of ranks and notes their deaths; any thread may call any method.

    Attributes:
        on_exit: called with each rank that has died, in the thread that steps.
    """

    def __init__(self) -> None:
        self.on_exit: Callable[[int, Exit], None] | None = None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._streams: dict[int, _Stream] = {}
        self._watched: dict[int, int] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._exits: dict[int, Exit] = {}

    def add_stream(self, rank: int, fd: int, sink: Sink | None, prefix: str, *, keep: bool) -> None:
        """Forward a pipe's read end, which the relay closes in the end.

        Args:
            rank: whose output it is.
            fd: the read end.
            sink: where lines go; None to drop them.
            prefix: what every line begins with.
            keep: remember the last lines for `tail`.
        """
        with self._lock:
            os.set_blocking(fd, False)
            tail = self._tails.setdefault(rank, deque(maxlen=400)) if keep else None
            self._streams[fd] = _Stream(rank, fd, sink, prefix.encode(), tail)
            self._selector.register(fd, selectors.EVENT_READ)

    def add_process(self, rank: int, pid: int) -> None:
        """Note the death of a child of this process. It isn't reaped: whoever started it does."""
        with self._lock:
            fd = os.pidfd_open(pid)
            self._watched[fd] = rank
            self._selector.register(fd, selectors.EVENT_READ)

    def exits(self) -> dict[int, Exit]:
        """The ranks that have died so far; all that they wrote has been forwarded."""
        with self._lock:
            return dict(self._exits)

    def tail(self, rank: int) -> str:
        """The last lines that `rank` wrote to the streams with `keep`."""
        with self._lock:
            return b"".join(self._tails.get(rank, ())).decode(errors="replace")

    def step(self, timeout: float) -> None:
        """Forward what there is; wait for it up to `timeout` seconds."""
        events = self._selector.select(timeout)
        with self._lock:
            for key, _ in events:
                if key.fd in self._streams:
                    self._read(self._streams[key.fd])
            for key, _ in events:
                if key.fd in self._watched:
                    self._bury(key.fd)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.pending and now - stream.since > _PATIENCE:
                    self._emit(stream, len(stream.pending))

    def settle(self, timeout: float) -> None:
        """Go on until all ranks have died, or for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._watched and time.monotonic() < deadline:
            self.step(0.01)

    def reset(self) -> None:
        """Forward what is left in the pipes, then forget all ranks."""
        with self._lock:
            for stream in list(self._streams.values()):
                self._drain(stream)
                self._end(stream)
            for fd in list(self._watched):
                self._unwatch(fd)
            self._tails.clear()
            self._exits.clear()

    def close(self) -> None:
        """Forward what is left in the pipes and close them."""
        self.reset()
        self._selector.close()

    def _bury(self, fd: int) -> None:
        rank = self._watched[fd]
        try:
            info = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if info is None:
                return
            code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        except ChildProcessError:  # its starter was faster and has reaped it
            code = None
        self._unwatch(fd)
        for stream in list(self._streams.values()):
            if stream.rank == rank:
                self._drain(stream)
        self._exits[rank] = end = Exit(time.monotonic(), code)
        if self.on_exit is not None:
            self.on_exit(rank, end)

    def _unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._watched[fd]
        os.close(fd)

    def _drain(self, stream: _Stream) -> None:
        # Bounded, since a grandchild may hold the pipe open and write for ever.
        for _ in range(1024):
            if stream.fd not in self._streams or not self._read(stream):
                return

    def _read(self, stream: _Stream) -> bool:
        """Forward one portion; False if there is nothing now."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            return False
        if not stream.pending:
            stream.since = time.monotonic()
        stream.pending += data
        self._emit(stream, max(stream.pending.rfind(b"\n"), stream.pending.rfind(b"\r")) + 1)
        return True

    def _emit(self, stream: _Stream, size: int) -> None:
        text, stream.pending = stream.pending[:size], stream.pending[size:]
        stream.since = time.monotonic()
        if not text:
            return
        if stream.tail is not None:
            stream.tail.extend(text.splitlines(keepends=True))
        if stream.sink is None:
            return
        try:
            stream.sink.write(stream, stream.prefix, text)
        except OSError:
            # Nobody reads any more (`phalanx run ... | head`): let the rank know it the usual
            # way, by a broken pipe at its next write.
            stream.pending = b""
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        self._emit(stream, len(stream.pending))
        if stream.fd in self._streams:
            self._selector.unregister(stream.fd)
            del self._streams[stream.fd]
            os.close(stream.fd)
