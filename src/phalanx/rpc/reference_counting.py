"""Reference counting of the values that `RRef`s refer to, and reports of ended references.

The owner of a value counts references by worker, and frees the value when all counts are zero. A
worker that passes on a reference reports that to the owner itself, before it sends the message with
the reference. The owner applies the reports of one worker in their order, in the thread that
receives them. So a reference in transit is counted before its sender can release its own. The
receiver may release the reference before the owner knows that it ever held one: its count is then
below zero for a while, while the sender's is still above. So no worker waits for another one, and
passing a reference costs one message without an answer. (This is weighted reference counting, Bevan
1987, with the counts kept by the owner.)

The call that creates a value may arrive after others that use it: on another connection, or, if a
worker calls itself, after changes in references that the worker applies at once. The count may be
zero meanwhile, and a value that somebody waits for is then kept for its creation.

References of a dead worker no longer count.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, NamedTuple

from phalanx.errors import PhalanxError
from phalanx.rpc.functions import FutureResult

_LOG = logging.getLogger("phalanx.rpc")
_RETRY_SECONDS = 0.5


class RRefId(NamedTuple):
    """The name of a value: the worker that made its first reference, and that worker's number."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class RefCountDelta(NamedTuple):
    """A change in the number of a worker's references to a value; negative if references ended."""

    rref_id: RRefId
    holder: int
    amount: int


class OwnedValue(Future[Any]):
    """A value, or the error of its creation, or neither yet."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.is_created = False
        """True once the call that creates it has arrived."""
        self.is_awaited = False
        """True if somebody may wait for it."""
        self.on_use: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None
        """Called before code of the user gets the value on this worker or calls a method of it.

        The arguments are those of the call: the name of the method ("" if the code gets the value
        itself), and its arguments.
        """
        self._traceback: TracebackType | None = None

    def complete(self, get: Callable[[], Any]) -> None:
        """Set the value to the result of `get`, or its error to the exception that this raises."""
        try:
            value = get()
        except BaseException as error:  # noqa: BLE001 - raised when the value is fetched
            self._traceback = clear_frames(error).__traceback__
            self.set_exception(error)
            return
        if isinstance(value, FutureResult):
            value.future.add_done_callback(lambda future: self.complete(future.value))
        else:
            self.set_result(value)

    def get(self) -> Any:
        """Return the value once it is there; raise the error of its creation."""
        if (error := self.exception()) is not None:
            raise error.with_traceback(self._traceback)  # the trace must not grow each time
        return self.result()


class OwnedValues:
    """All values that this worker owns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[RRefId, OwnedValue] = {}
        self._lost_workers: set[int] = set()

    def __len__(self) -> int:
        return len(self._values)

    def get_or_create(self, rref_id: RRefId) -> OwnedValue:
        """Return a value; a name that is not known yet gets a value that is not ready."""
        with self._lock:
            value = self._get_or_create(rref_id)
            value.is_awaited = True
            return value

    def _get_or_create(self, rref_id: RRefId) -> OwnedValue:
        if (value := self._values.get(rref_id)) is None:
            value = self._values[rref_id] = OwnedValue()
        return value

    def begin(self, rref_id: RRefId, holder: int) -> OwnedValue:
        """Return a value that is to be created, with the first reference of its creator."""
        with self._lock:
            value = self._get_or_create(rref_id)
            value.is_created = True
            if holder not in self._lost_workers:
                self._count(value, RefCountDelta(rref_id, holder, 1))
            return value

    def apply(self, delta: RefCountDelta) -> OwnedValue | None:
        """Apply a change in references.

        Returns:
            The value, if that was the end of its last reference. It is freed with this result,
            which may run the user's code.
        """
        with self._lock:
            if delta.holder in self._lost_workers:
                return None
            value = self._get_or_create(delta.rref_id)
            self._count(value, delta)
            return None if delta.rref_id in self._values else value

    def _count(self, value: OwnedValue, delta: RefCountDelta) -> None:
        count = value.holders.pop(delta.holder, 0) + delta.amount
        if count:
            value.holders[delta.holder] = count
        elif not value.holders and (value.is_created or not value.is_awaited):
            del self._values[delta.rref_id]

    def forget(self, worker: int) -> None:
        """Drop the references of a dead worker."""
        with self._lock:
            self._lost_workers.add(worker)
            unreferenced = [
                rref_id
                for rref_id, value in self._values.items()
                if value.holders.pop(worker, 0) and not value.holders
            ]
            released = [self._values.pop(rref_id) for rref_id in unreferenced]
        del released

    def clear(self) -> None:
        """Drop all values; threads that wait for one that is not ready get an error."""
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
        for value in values:
            with contextlib.suppress(InvalidStateError):  # it is there
                value.set_exception(PhalanxError("this worker has left RPC"))


class ReleaseNotifier:
    """A queue of notifications to other workers, each of which is retried until it can be sent.

    Notifications may be queued anywhere, even in a garbage collection, so they are sent later.

    Args:
        wake: Makes a thread call `take_work`, and the function that it returns, soon.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_paused = False
        """True after a failure, until the next attempt."""

    def queue(self, worker: int, send: Callable[[], None]) -> None:
        """Queue the function that sends a notification to a worker."""
        self._queue.append((worker, send))
        self._wake()

    def take_work(self) -> Callable[[], None] | None:
        """Return a function that sends the queued notifications; None if there are none.

        The function may block: another thread can take over the lead from the thread that runs it.
        """
        return self._send if self._queue and not self._is_paused else None

    def _send(self) -> None:
        while self._queue:
            try:
                worker, send = self._queue.popleft()
            except IndexError:  # another thread was first
                return
            try:
                send()
            except PhalanxError as error:
                _LOG.warning("worker %d could not be notified of releases yet: %s", worker, error)
                self._queue.appendleft((worker, send))
                self._pause()
                return

    def _pause(self) -> None:
        self._is_paused = True
        timer = threading.Timer(_RETRY_SECONDS, self._resume)
        timer.daemon = True
        timer.start()

    def _resume(self) -> None:
        self._is_paused = False
        self._wake()


def clear_frames(error: BaseException) -> BaseException:
    """Return an exception that will be kept, after clearing the frames of its traceback.

    Otherwise it would keep alive the objects that this thread worked on.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    traceback.clear_frames(error.__traceback__)
    return error
