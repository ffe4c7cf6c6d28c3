"""The background threads of a group.

Both start when first needed. They are daemons: the interpreter joins other threads before `atexit`,
which could hang a script that did not leave the group. `stop` ends them in an orderly way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from phalanx import _native

if TYPE_CHECKING:
    from phalanx.hierarchical.messages import RemoteMessage


class CollectiveThread:
    """A thread that runs asynchronous collectives one by one, in the order of their calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.pending = 0
        """The number of calls that were submitted and have not ended."""
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise.

        If this is called in the thread itself, where callbacks of futures run, the call and all
        calls queued before have ended on return. A callback may thus wait for its own operations.
        """
        with self._lock:
            self.pending += 1
            self._queue.put(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if threading.current_thread() is self._thread:
            self._run_up_to(call)

    def drain(self) -> None:
        """Block until all calls queued before have ended, each within its own deadline."""
        if self._thread is not None and self.pending:
            drained = threading.Event()
            self.submit(drained.set)
            drained.wait()

    def stop(self, seconds: float) -> bool:
        """End the thread after the queued calls; return whether it ended within `seconds`."""
        with self._lock:
            thread = self._thread
            self._queue.put(None)
        return _join(thread, seconds)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._execute(call)
            # Otherwise a finished operation would keep its tensors until the next call.
            del call

    def _run_up_to(self, last: Callable[[], None]) -> None:
        call, stopped = None, False
        while call is not last:
            call = self._queue.get()
            if call is None:
                stopped = True
            else:
                self._execute(call)
        if stopped:
            self._queue.put(None)

    def _execute(self, call: Callable[[], None]) -> None:
        call()
        with self._lock:
            self.pending -= 1


class MessageThread:
    """A thread that moves messages without a waiting caller, and reports watched messages."""

    def __init__(self, name: str, group: _native.Group) -> None:
        self._name = name
        self._group = group
        self._lock = threading.Lock()
        self._watchers: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it has been started."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def watch(
        self, message: _native.Message | RemoteMessage, timeout: float, report: Callable[[], None]
    ) -> None:
        """Call `report` in the thread when the message is done, within `timeout` seconds."""
        if hasattr(message, "watch"):  # a message to or from another host
            message.watch(timeout, report)
            return
        with self._lock:
            self._watchers[message.id] = report
        self._group.watch(message, timeout)
        self.start()

    def stop(self, seconds: float) -> bool:
        """End the thread; return whether it ended within `seconds`."""
        self._group.stop()
        with self._lock:
            thread = self._thread
        return _join(thread, seconds)

    def _run(self) -> None:
        while done := self._group.serve():
            for message in done:
                with self._lock:
                    report = self._watchers.pop(message.id)
                report()


def _join(thread: threading.Thread | None, seconds: float) -> bool:
    """Wait for a thread other than the current one; return whether it ended within `seconds`."""
    if thread is None or thread is threading.current_thread():
        return True
    thread.join(seconds)
    return not thread.is_alive()
