"""The results of operations: a `torch.distributed.Work` for each way of running one.

The futures of works preserve exceptions, unlike PyTorch's own, which cannot be failed from Python:
`set_exception` stores the exception as the value, which C++ takes for the result. DDP's reducer
looks for a tensor in it, and crashes. `then` converts any exception of its callback to a
RuntimeError.

A long wait of the main thread for an operation of a group's thread is recorded in the flight
recorder and checked for deadlocks across groups (see `deadlock_detector`). The core checks the
waits of blocking collectives itself, at the same intervals.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed import Work
from torch.futures import Future

from phalanx import _native
from phalanx.backend import deadlock_detector, known_failures, membership
from phalanx.backend.threads import CollectiveThread, MessageThread
from phalanx.errors import PhalanxError

Tensors = list[torch.Tensor]
T = TypeVar("T")

_SHORT_SECONDS = 0.3
"""The length of a wait, in seconds, before it is recorded in the flight recorder."""
_FIRST_CHECK_SECONDS = 1.0
_CONFIRMATION_SECONDS = 0.5


def timeout_seconds(timeout: timedelta | None, default: float) -> float:
    """Return an optional timeout in seconds; PyTorch passes zero or less if it is unset."""
    if timeout is None or timeout.days < 0:
        return default
    return timeout.total_seconds() or default


class FinishedWork(Work):
    """An operation that ended before its call returned.

    Args:
        outputs: The tensors that the operation has written.
        peer: The other rank of a message; -1 for a collective.
    """

    def __init__(self, outputs: Tensors, peer: int = -1) -> None:
        super().__init__()
        self._outputs = outputs
        self._peer = peer

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - PyTorch's signature
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def result(self) -> Tensors:
        return self._outputs

    def get_future(self) -> Future[Tensors]:
        future = WorkFuture()
        future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        """Return the rank in the group that sent the message."""
        return self._peer

    _source_rank = source_rank


class CompositeWork(Work):
    """Several operations combined into one work."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all have ended; raise the error of the first that failed."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Tensors]:
        """Return a future of all output tensors."""
        futures = [work.get_future() for work in self._works]
        combined = WorkFuture(lambda: _wait_for_all(futures))

        def on_done(_all: object) -> None:
            try:
                outputs = [tensor for future in futures for tensor in future.value()]
            except Exception as error:  # noqa: BLE001 - raised again by its wait
                combined.fail(error)
            else:
                combined.set_result(outputs)

        torch.futures.collect_all(futures).add_done_callback(on_done)
        return combined


def _wait_for_all(futures: list[Future[Tensors]]) -> None:
    for future in futures:
        with contextlib.suppress(Exception):  # the combined future raises it
            future.wait()


class PendingWork(Work):
    """The base class of works that end later, with a result or an error, and a future.

    A subclass calls `_complete` exactly once, in the first thread that sees the end.
    """

    _done_event: threading.Event | None = None
    """An event set at the end, in a subclass whose `wait` blocks in Python."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self.error: BaseException | None = None
        """The error with which the operation has ended, which nobody has seen thereby."""
        self._outputs = outputs
        self._is_done = False
        self._lock = threading.Lock()
        self._future: WorkFuture | None = None

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self.error is None

    def exception(self) -> BaseException | None:
        return None if self.error is None else known_failures.seen(self.error)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[Tensors]:
        """Return a future of the list of output tensors; callbacks run in the group's thread."""
        with self._lock:
            if self._future is None:
                self._future = WorkFuture(self._wait_until_done)
                if self._is_done:
                    self._resolve(self._future)
            return self._future

    def _wait_until_done(self) -> None:
        """Block before a future's own wait; does nothing unless overridden."""

    def _complete(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = error
            self._is_done = True
            if self._done_event is not None:
                self._done_event.set()
            future = self._future
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: WorkFuture) -> None:
        if self.error is None:
            future.set_result(self._outputs)
        else:
            future.fail(self.error)


class CollectiveWork(PendingWork):
    """A collective that runs in the group's thread, or has been deferred.

    Args:
        run: Runs the operation to its end in that thread, or raises.
        outputs: The tensors that the operation writes.
        group: The group.
        wait_error: Returns the error of a wait that timed out before the operation ended. Its
            arguments are the timeout in seconds, and whether the operation has begun.
        thread: The group's thread.
    """

    def __init__(
        self,
        run: Callable[[], None],
        outputs: Tensors,
        group: _native.Group,
        wait_error: Callable[[float, bool], PhalanxError],
        thread: CollectiveThread,
    ) -> None:
        super().__init__(outputs)
        self._group = group
        self._thread = thread
        self._done_event: threading.Event = threading.Event()
        self._run: Callable[[], None] | None = run
        self._wait_error: Callable[[float, bool], PhalanxError] | None = wait_error

    def is_completed(self) -> bool:
        """Return whether the operation has ended; it does so without a wait."""
        if not self._is_done:
            self._thread.hand_over()
        return self._is_done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def execute(self) -> None:
        """Run the operation in the current thread, that of the group or of the caller."""
        run, self._run = self._run, None
        error: BaseException | None = None
        try:
            assert run is not None
            run()
        except BaseException as caught:  # noqa: BLE001 - raised again by the user's wait
            error = caught
        del run
        self._wait_error = None  # frees the tensors that it references
        if error is not None:
            known_failures.unseen(error)
        self._complete(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; raise its error if it failed.

        The operation's own deadline ends it and breaks the group. As on Gloo, `timeout` only ends
        this wait, with a `CollectiveTimeout` that names the missing ranks; the operation continues.
        """
        self._thread.hand_over()
        wait_error, seconds = self._wait_error, timeout_seconds(timeout, 0.0)
        try:
            if not self._done_event.wait(seconds or _SHORT_SECONDS):
                if seconds and wait_error is not None:
                    raise wait_error(seconds, self._run is None)
                self._wait_long()
        except KeyboardInterrupt:
            known_failures.mark_known()
            raise
        if self.error is not None:
            membership.propagate_deadlock(self._group)
            raise known_failures.seen(self.error)
        return True

    def _wait_until_done(self) -> None:
        self._thread.hand_over()
        if not self._done_event.wait(_SHORT_SECONDS):
            self._wait_long()
        if self.error is not None:
            membership.propagate_deadlock(self._group)

    def _wait_long(self) -> None:
        """Block until the operation has ended, after a wait of `_SHORT_SECONDS`."""
        if threading.current_thread() is not threading.main_thread():
            self._done_event.wait()
            return
        waited, next_check = _SHORT_SECONDS, _FIRST_CHECK_SECONDS
        begin = time.monotonic() - waited
        try:
            self._record_wait()
            while not self._done_event.wait(next_check - waited):
                self._record_wait()
                is_suspected = membership.detect_deadlocks()
                waited = time.monotonic() - begin
                next_check = waited + _CONFIRMATION_SECONDS if is_suspected else 2 * waited
        finally:
            _native.set_main_thread_wait(0)

    def _record_wait(self) -> None:
        """Record the operation that the main thread waits for, if nothing else can end that wait.

        Operations of other groups, in progress or queued, could end it: a future's callback may
        call anything.
        """
        number = 0
        # Another thread may leave the group in the meantime.
        with contextlib.suppress(ValueError):
            number = deadlock_detector.running_collective(self._group)
        # Checked after `running_collective`: if the operation has not ended yet, the number read
        # above is that of this operation or an earlier one.
        is_over = self._done_event.is_set() or membership.has_collectives_elsewhere(self._group)
        _native.set_main_thread_wait(0 if is_over else number)


class MessageWork(PendingWork):
    """A send or recv that is in progress.

    Args:
        message: The core's handle of the message.
        group: The group, which moves the message.
        on_done: Called once when the message is done, with the status and the timeout of the wait
            in seconds. Copies back a staged tensor, or returns the error.
        outputs: A list of the tensor.
        thread: The thread that watches the message if a future is requested.
        timeout: The default timeout of a wait and the timeout of a future, in seconds.
        is_send: Whether it is a send.
    """

    def __init__(
        self,
        message: _native.Message,
        group: _native.Group,
        on_done: Callable[[_native.Status | None, float], BaseException | None],
        outputs: Tensors,
        thread: MessageThread,
        timeout: float,
        *,
        is_send: bool,
    ) -> None:
        super().__init__(outputs)
        self.is_send = is_send
        self._message = message
        self._group = group
        self._on_done: Callable[[_native.Status | None, float], BaseException | None] | None = (
            on_done
        )
        self._thread = thread
        self._timeout = timeout
        self._done_lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is transferred; raise its error if it failed.

        If the deadline passes, the group's or that of `timeout`, the group is broken: the buffer
        may be partly written, and the channel is in the middle of a message.
        """
        if not self._is_done:
            self.finish(timeout_seconds(timeout, self._timeout))
        if self.error is not None:
            raise known_failures.seen(self.error)
        return True

    def finish(self, seconds: float) -> None:
        """Block until the message has ended, for at most some seconds, after which it fails."""
        try:
            status = self._group.wait(self._message, seconds)
        except ValueError:  # another thread has left the group, and so ended the message
            status = self._message.status
        self._finish(status, seconds)

    def is_completed(self) -> bool:
        """Return whether the message has ended; makes progress, so polling in a loop completes."""
        if not self._is_done and (self._message.done or self._test()):
            self._finish(self._message.status)
        return self._is_done

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def get_future(self) -> Future[Tensors]:
        future = super().get_future()
        if not self._is_done:
            self._thread.watch(
                self._message, self._timeout, lambda: self._finish(self._message.status)
            )
        return future

    def source_rank(self) -> int:
        """Return the rank in the group that sent the message."""
        return self._message.peer

    _source_rank = source_rank

    def give_up(self, error: BaseException) -> bool:
        """End a receive with `error`, unless its message has come; return whether it has ended."""
        message: Any = self._message
        with self._done_lock:
            if self._on_done is None:
                return True
            if isinstance(message, _native.Message):
                is_given_up = self._group.withdraw(message, -1)
            else:  # of a group that spans hosts
                is_given_up = message.give_up()
            if is_given_up:
                self._on_done = None
                self._complete(error)
            return is_given_up

    def abandon(self, error: BaseException) -> None:
        """End the work with `error`, unless it has ended; the message no longer makes progress."""
        with self._done_lock:
            on_done, self._on_done = self._on_done, None
            if on_done is not None:
                self._complete(error)

    def _test(self) -> bool:
        try:
            return self._group.test(self._message)
        except ValueError:  # another thread has left the group, and so ended the message
            return self._message.done

    def _finish(self, status: _native.Status | None, seconds: float | None = None) -> None:
        with self._done_lock:
            on_done, self._on_done = self._on_done, None
            if on_done is not None:
                error = on_done(status, self._timeout if seconds is None else seconds)
                # A receive that ends since its source has left is missed by nobody.
                if error is not None and (self.is_send or (status and status.code != "left")):
                    known_failures.unseen(error)
                self._complete(error)


class WorkFuture(Future[Any]):
    """A future that fails, with all futures chained to it, with the exception that it is given.

    C++ code gets a RuntimeError with the same message.

    Args:
        wait_until_done: Blocks until the operation of the future has ended. Python code observes
            this wait; PyTorch's own wait in C++ could only be ended by the deadline.
    """

    def __init__(self, wait_until_done: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait_until_done = wait_until_done

    def wait(self) -> Any:
        """Block until the future has ended; return its value or raise its exception."""
        wait_until_done = self._wait_until_done
        if wait_until_done is not None:
            wait_until_done()
        return super().wait()

    def set_result(self, result: Any) -> None:
        """End the future with a value."""
        super().set_result(result)
        self._wait_until_done = None  # it references the work, and so its tensors and this future

    def fail(self, error: BaseException) -> None:
        """End the future with a failure: `wait` and `value` raise a copy of `error`."""
        self._set_unwrap_func(_raise)
        self.set_result(_FailedValue(_copy_exception(error)))

    def then(self, callback: Callable[[Future[Any]], T]) -> Future[T]:
        """Return a future of the result or exception of `callback`, called when this one has ended.

        The argument of `callback` is this future.
        """
        child = WorkFuture(self._wait_until_done)

        def run(_future: object) -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001 - raised again by the child's wait
                _note_origin(error)
                child.fail(error)
            else:
                child.set_result(value)

        self.add_done_callback(run)
        return child


def _note_origin(error: BaseException) -> None:
    """Note where a callback raised an error, whose copies have no traceback."""
    if sys.version_info >= (3, 11):  # older versions have no notes
        frames = "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip()
        error.add_note(f"Raised by a callback of then():\n{frames}")


class _FailedValue:
    """The value of a failed future."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        # C++ pickles a value to find its tensors.
        raise known_failures.seen(self.error)

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def _raise(failed: _FailedValue) -> NoReturn:
    raise _copy_exception(known_failures.seen(failed.error))


def _copy_exception(error: BaseException) -> BaseException:
    """Return a copy of an exception without its traceback; the exception itself if it has no copy.

    The traceback's frames reference the work and the future. Since C++ holds the future's value,
    the garbage collector could not detect and free this reference cycle.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - not constructible from its own arguments
        return error
    return copied if type(copied) is type(error) else error
