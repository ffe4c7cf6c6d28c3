"""Forwarding of the ranks' output and exits to the process that started them.

One `OutputForwarder` watches the pipes and the pidfds of all ranks with one selector.
`phalanx.launch` steps it in the caller's thread, so that a notebook shows the output in the cell;
`phalanx run` steps it in a thread beside the elastic agent.
"""

import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.system.notebook import OutputReader

_FLUSH_SECONDS = 0.2
"""Seconds after which an unfinished line (a prompt, a row of dots) is shown."""


@dataclass(frozen=True)
class Exit:
    """The exit of a rank.

    Attributes:
        time: The monotonic time in seconds at which the exit was seen.
        code: The exit code as in `subprocess`; None if unknown.
    """

    time: float
    code: int | None


class Sink:
    """A text stream of this process to which several ranks write, line by line."""

    def __init__(self, name: str) -> None:
        """Use the current `sys.stdout` or `sys.stderr`, which may be a notebook's or redirected."""
        self._stream: Any = getattr(sys, name)
        self._line_owner: object = None
        """The owner of the unfinished line at the cursor; None if there is none."""

    def write(self, owner: object, prefix: bytes, text: bytes) -> None:
        """Write lines of `owner`, of which the last may be unfinished; block as the stream does.

        Raises:
            OSError: The stream is closed.
        """
        lines = text.splitlines(keepends=True)
        pieces = [prefix + line for line in lines]
        if self._line_owner is owner:
            pieces[0] = lines[0]
        elif self._line_owner is not None:
            pieces.insert(0, b"\n")
        self._line_owner = None if text.endswith((b"\n", b"\r")) else owner
        self._write_bytes(b"".join(pieces))

    def _write_bytes(self, data: bytes) -> None:
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
    sink: Sink | OutputReader | None
    prefix: bytes
    tail: deque[bytes] | None
    replaced: re.Pattern[bytes] | None
    pending: bytes = b""
    pending_since: float = field(default_factory=time.monotonic)


class OutputForwarder:
    """A forwarder of the output of ranks that also records their exits; thread-safe.

    Attributes:
        on_exit: A function called with each rank that has exited and its `Exit`, in the thread
            that calls `step`.
    """

    def __init__(self) -> None:
        self.on_exit: Callable[[int, Exit], None] | None = None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._streams: dict[int, _Stream] = {}
        self._pidfds: dict[int, int] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._exits: dict[int, Exit] = {}

    def add_stream(
        self,
        rank: int,
        fd: int,
        sink: Sink | OutputReader | None,
        prefix: str,
        *,
        keep: bool,
        replaced: str = "",
    ) -> None:
        """Forward the lines from the read end of a pipe, which this object takes over and closes.

        Args:
            rank: The rank that writes to the pipe.
            fd: The read end of the pipe.
            sink: The stream, or the reader of outputs, that gets the lines; None to drop them.
            prefix: The text at the beginning of every line.
            keep: True to keep the last lines for `tail`.
            replaced: A text that is removed from the beginning of lines, since `prefix` says the
                same.
        """
        with self._lock:
            os.set_blocking(fd, False)
            tail = self._tails.setdefault(rank, deque(maxlen=400)) if keep else None
            pattern = re.compile(b"^" + re.escape(replaced.encode()), re.MULTILINE)
            own = prefix.encode()
            self._streams[fd] = _Stream(rank, fd, sink, own, tail, pattern if replaced else None)
            self._selector.register(fd, selectors.EVENT_READ)

    def add_process(self, rank: int, pid: int) -> None:
        """Record the exit of a child of this process, without reaping it: its starter does."""
        with self._lock:
            fd = os.pidfd_open(pid)
            self._pidfds[fd] = rank
            self._selector.register(fd, selectors.EVENT_READ)

    def exits(self) -> dict[int, Exit]:
        """Return the exits so far, by rank; the output of these ranks has been forwarded."""
        with self._lock:
            return dict(self._exits)

    def tail(self, rank: int) -> str:
        """Return the last lines that `rank` wrote to the streams added with `keep`."""
        with self._lock:
            return b"".join(self._tails.get(rank, ())).decode(errors="replace")

    def step(self, timeout: float) -> None:
        """Forward available output and record exits; wait up to `timeout` seconds for an event."""
        events = self._selector.select(timeout)
        with self._lock:
            for key, _ in events:
                if key.fd in self._streams:
                    self._read(self._streams[key.fd])
            for key, _ in events:
                if key.fd in self._pidfds:
                    self._record_exit(key.fd)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.pending and now - stream.pending_since > _FLUSH_SECONDS:
                    self._emit(stream, len(stream.pending))

    def wait_for_exits(self, timeout: float) -> None:
        """Step until all ranks have exited, or for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._pidfds and time.monotonic() < deadline:
            self.step(0.01)

    def forget(self, rank: int) -> None:
        """Forward the output left in the pipes of a rank that has exited, then forget the rank."""
        with self._lock:
            for stream in [each for each in self._streams.values() if each.rank == rank]:
                self._drain(stream)
                self._close_stream(stream)
            self._tails.pop(rank, None)
            self._exits.pop(rank, None)

    def reset(self) -> None:
        """Forward the output left in the pipes, then forget all ranks."""
        with self._lock:
            for stream in list(self._streams.values()):
                self._drain(stream)
                self._close_stream(stream)
            for fd in list(self._pidfds):
                self._close_pidfd(fd)
            self._tails.clear()
            self._exits.clear()

    def close(self) -> None:
        """Forward the output left in the pipes and close them."""
        self.reset()
        self._selector.close()

    def _record_exit(self, fd: int) -> None:
        rank = self._pidfds[fd]
        try:
            info = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if info is None:
                return
            code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        except ChildProcessError:  # its starter has already reaped it
            code = None
        self._close_pidfd(fd)
        for stream in list(self._streams.values()):
            if stream.rank == rank:
                self._drain(stream)
        self._exits[rank] = end = Exit(time.monotonic(), code)
        if self.on_exit is not None:
            self.on_exit(rank, end)

    def _close_pidfd(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._pidfds[fd]
        os.close(fd)

    def _drain(self, stream: _Stream) -> None:
        # Bounded, because a grandchild may keep the pipe open and write forever.
        for _ in range(1024):
            if stream.fd not in self._streams or not self._read(stream):
                return

    def _read(self, stream: _Stream) -> bool:
        """Read and forward one block; return False if there is none now."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close_stream(stream)
            return False
        if not stream.pending:
            stream.pending_since = time.monotonic()
        stream.pending += data
        self._emit(stream, max(stream.pending.rfind(b"\n"), stream.pending.rfind(b"\r")) + 1)
        return True

    def _emit(self, stream: _Stream, size: int) -> None:
        text, stream.pending = stream.pending[:size], stream.pending[size:]
        stream.pending_since = time.monotonic()
        if not text:
            return
        if stream.replaced is not None:
            text = stream.replaced.sub(b"", text)
        if stream.tail is not None:
            stream.tail.extend(text.splitlines(keepends=True))
        if stream.sink is None:
            return
        try:
            stream.sink.write(stream, stream.prefix, text)
        except OSError:
            # The reader is gone (`phalanx run ... | head`): closing the pipe gives the rank the
            # usual broken pipe at its next write.
            stream.pending = b""
            self._close_stream(stream)

    def _close_stream(self, stream: _Stream) -> None:
        self._emit(stream, len(stream.pending))
        if stream.fd in self._streams:
            self._selector.unregister(stream.fd)
            del self._streams[stream.fd]
            os.close(stream.fd)
