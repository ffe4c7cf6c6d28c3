"""The threads of a group, for operations that the user does not wait for at once.

They start when first needed. They are daemons: the interpreter joins other threads before `atexit`,
which could hang a script that did not leave the group. `stop` ends them in order.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from phalanx import _native

if TYPE_CHECKING:
    from phalanx.hierarchical.messages import RemoteMessage


_DEFERRAL_SECONDS = 0.01
"""The time for which a call stays deferred, in seconds."""
_WATCH_SECONDS = 1.0
"""The time after the last deferred call for which the thread expects more of them, in seconds."""


class CollectiveThread:
    """A queue of asynchronous collectives, and the thread that runs them in the order of calls.

    The thread that runs queued calls, until there are none, is the *runner*. It is the group's own
    thread, unless calls were only deferred: then it is the one that calls `run_deferred`. If none
    does so soon, the group's thread takes over, since something may wait for a deferred call in a
    way that is not seen here. For that it wakes at intervals while calls are being deferred.

    Args:
        name: The name of the thread.
        state: The state of the membership, in which `pending` is the number of calls that were
            queued and have not ended.
    """

    def __init__(self, name: str, state: _native.OperationState) -> None:
        self._name = name
        # The membership holds this object. Callers and queued operations keep it alive.
        self._state: Callable[[], Any] = weakref.ref(state)
        self._lock = threading.Lock()  # of all below
        self._calls: deque[Callable[[], None]] = deque()
        self._queued_count = 0
        self._begun_count = 0
        self._deferred_count = 0
        self._deferred_at = self._last_deferred_at = 0.0  # of the first and last of these
        self._is_watched = False
        self._runner: threading.Thread | None = None
        self._wake_ups: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise.

        If this is called by the runner, in a callback of a future, the call and all calls queued
        before have ended on return. A callback may thus wait for its own operations.
        """
        with self._lock:
            number = self._queue(call)
            if self._runner is None:
                self._deferred_count = 0
                self._wake()
        if self._runner is threading.current_thread():
            self._run_up_to(number)

    def defer(self, call: Callable[[], None]) -> bool:
        """Queue a call for `run_deferred`, without waking the thread if it is watching.

        Returns False, and does nothing, if calls are queued that do not wait for it.
        """
        with self._lock:
            if self._runner is not None or len(self._calls) != self._deferred_count:
                return False
            self._last_deferred_at = time.monotonic()
            if not self._deferred_count:
                self._deferred_at = self._last_deferred_at
            self._deferred_count += 1
            self._queue(call)
            if not self._is_watched:
                self._is_watched = True
                self._wake()
            return True

    def run_deferred(self) -> None:
        """Run the deferred calls in this thread, unless the group's thread has begun to."""
        if self._deferred_count:
            self._run_all()

    def hand_over(self) -> None:
        """Have the group's thread run the deferred calls."""
        if self._deferred_count:
            with self._lock:
                if self._deferred_count:
                    self._deferred_count = 0
                    self._wake()

    def is_current(self) -> bool:
        """Return whether the current thread is the group's own."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Block until all calls queued before have ended, each within its own deadline."""
        if self._state().pending:
            drained = threading.Event()
            self.submit(drained.set)
            drained.wait()

    def stop(self, seconds: float) -> bool:
        """End the thread after the queued calls; return whether it ended within `seconds`."""
        self.hand_over()
        with self._lock:
            thread = self._thread
            self._wake_ups.put(False)
        return _join(thread, seconds)

    def _queue(self, call: Callable[[], None]) -> int:
        self._state().pending += 1
        self._calls.append(call)
        self._queued_count += 1
        return self._queued_count

    def _wake(self) -> None:
        self._wake_ups.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        timeout: float | None = None
        while True:
            with contextlib.suppress(Empty):
                if not self._wake_ups.get(timeout=timeout):
                    return
            with self._lock:
                now = time.monotonic()
                is_due = not self._deferred_count or now - self._deferred_at >= _DEFERRAL_SECONDS
                self._is_watched = now - self._last_deferred_at < _WATCH_SECONDS
                timeout = _DEFERRAL_SECONDS if self._is_watched else None
            if is_due:
                self._run_all()

    def _run_all(self) -> None:
        with self._lock:
            if self._runner is not None:
                return
            self._runner = threading.current_thread()
            self._deferred_count = 0
        try:
            while self._run_next():
                pass
        finally:
            if self._runner is threading.current_thread():  # Ctrl-C has interrupted it
                with self._lock:
                    self._runner = None
                    if self._calls:
                        self._wake()

    def _run_up_to(self, number: int) -> None:
        while self._begun_count < number:
            self._run_next()

    def _run_next(self) -> bool:
        """Run the next call, as the runner; return False, and no longer be it, if there is none."""
        with self._lock:
            if not self._calls:
                self._runner = None
                return False
            call = self._calls.popleft()
            self._begun_count += 1
        state = self._state()  # a call may release the last other reference to the membership
        try:
            call()
        finally:
            # Otherwise a finished operation would keep its tensors until the next call.
            del call
            with self._lock:
                state.pending -= 1
        return True


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
