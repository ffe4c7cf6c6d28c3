"""The progress thread: the only thread of this process that calls MPI, for all transports.

A single thread is correct regardless of a library's locks and thread support. It cannot both block
in MPI and be notified of new work, so it polls with growing pauses.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from phalanx.transports.interface import TransportError
from phalanx.transports.mpi.messages import (
    Communicator,
    Kind,
    Message,
    load_library,
    timeout_message,
)
from phalanx.transports.shutdown_hooks import register_shutdown_hook

_MIN_PAUSE, _MAX_PAUSE, _IDLE_PAUSE = 2e-5, 1e-3, 2e-2
"""Seconds between two polls of MPI: after activity, the longest, the longest without transports."""
_START_MARGIN = 1.0
_DRAIN_SECONDS = 3.0
"""Seconds that pending MPI requests may take at the end of the process."""
_EXCEPTION_SECONDS, _FAILURE_SECONDS = 3.0, 30.0
"""Seconds to wait there for all other processes: after an exception, and after a failed group."""
_BROADCAST = 0
"""The transport name of messages of `MpiProgressThread.broadcast`."""


class MpiClient(Protocol):
    """A transport as the progress thread sees it; all methods are called in the MPI thread."""

    def handle_message(self, message: Message, source: int) -> None:
        """Handle a message from a process."""

    def advance_shutdown(self) -> bool:
        """Continue the shutdown of the transport, and return whether it is complete."""

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""


class MpiProgressThread:
    """The progress thread of this process; created by `get_progress_thread`.

    Attributes:
        communicator: The sends and receives through MPI; only for the MPI thread.
        stop_reason: The reason why MPI is no longer called; empty while it is called. A transport
            sets it in the MPI thread to end all calls.
        has_failures: Whether a group has failed, so that other processes may never end in order.
    """

    communicator: Communicator

    def __init__(self, timeout: float) -> None:
        self._mpi: Any = load_library()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._broadcasts: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._clients: dict[int, MpiClient] = {}
        self._unclaimed: dict[int, list[tuple[Message, int]]] = {}
        self._shutting_down: list[MpiClient] = []
        self._shutdown_count = 0
        self._finalize_limit: float | None = None
        self._is_finalized = False
        self.stop_reason = ""
        self.has_failures = False
        self._pid = os.getpid()
        self._start(timeout)
        register_shutdown_hook(self.finalize)

    # For any thread.

    @property
    def rank(self) -> int:
        """The rank of this process among all that `mpirun` has started."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The number of processes that `mpirun` has started."""
        return self.communicator.size

    def submit(self, call: Callable[[], None]) -> None:
        """Call a function in the MPI thread, after all functions submitted before."""
        self._calls.put(call)

    def broadcast(self, data: bytes | None, timeout: float) -> bytes:
        """Broadcast bytes from rank 0, and return them. All processes must call this.

        Args:
            data: At most `MAX_EAGER_BYTES` bytes on rank 0; None on the other ranks.
            timeout: The longest time to wait for the bytes, in seconds.

        Raises:
            TransportError: The bytes did not arrive in time.
        """
        if data is not None:
            message = Message(_BROADCAST, Kind.EAGER, 0, payload=data)
            for rank in range(1, self.size):
                self.submit(partial(self.communicator.send_message, rank, message))
            return data
        try:
            return self._broadcasts.get(timeout=timeout)
        except queue.Empty:
            raise TransportError(0, f"no data from rank 0 within {timeout:g} s") from None

    def finalize(self) -> None:
        """Finalize MPI at the end of this process, once all other processes finalize it too.

        MPI cannot be finalized without them. If a group has failed or an exception ends this
        process, they may be dead, so the wait has a timeout. If MPI is not finalized by then, a
        process that ends by an exception aborts all processes; any other leaves MPI initialized.
        """
        if self._is_finalized or os.getpid() != self._pid:
            return
        raised = hasattr(sys, "last_value")
        limit = (
            _EXCEPTION_SECONDS if raised else _FAILURE_SECONDS if self.has_failures else math.inf
        )
        if not self.stop_reason:
            self.submit(partial(setattr, self, "_finalize_limit", limit))
            self._thread.join()
        if raised and not self._is_finalized:
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(1)

    # For the MPI thread.

    def register(self, name: int, client: MpiClient) -> None:
        """Deliver a transport's messages to it, including those that have already arrived."""
        self._clients[name] = client
        for message, source in self._unclaimed.pop(name, ()):
            client.handle_message(message, source)

    def begin_shutdown(self, client: MpiClient) -> None:
        """Start the shutdown of a transport; its messages are still delivered afterwards."""
        self._shutdown_count += 1
        self._shutting_down.append(client)

    # The MPI thread.

    def _start(self, timeout: float) -> None:
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(started, time.monotonic() + timeout),
            name="phalanx-mpi",
            daemon=True,
        )
        self._thread.start()
        try:
            error = started.get(timeout=timeout + _START_MARGIN)
        except queue.Empty:  # the initialization of MPI itself waits for all processes
            raise TransportError(-1, timeout_message()) from None
        if error is not None:
            raise error

    def _run(self, started: queue.SimpleQueue[Exception | None], deadline: float) -> None:
        try:
            self.communicator = Communicator(self._mpi, deadline)
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            started.put(error)
            return
        started.put(None)
        reason = "MPI has ended in this process"
        try:
            self._poll()
            reason = self.stop_reason or reason
        except self._mpi.Exception as error:
            reason = f"MPI has failed: {error}"
        finally:
            self.stop_reason = reason
            self.has_failures = True
            for client in list(self._clients.values()):
                client.fail(reason)

    def _poll(self) -> None:
        pause = _MIN_PAUSE
        while self._finalize_limit is None and not self.stop_reason:
            busy = self._make_progress()
            busy |= self._run_calls(0 if busy else pause)
            in_use = (
                len(self._clients) > self._shutdown_count or self.communicator.has_pending_requests
            )
            pause = _MIN_PAUSE if busy else min(2 * pause, _MAX_PAUSE if in_use else _IDLE_PAUSE)
        if not self.stop_reason:
            self._finalize(self._finalize_limit or 0.0)

    def _run_calls(self, timeout: float) -> bool:
        """Run the submitted functions; return whether there were any within `timeout` seconds."""
        busy = False
        try:
            self._calls.get(timeout=timeout)()
            busy = True
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return busy

    def _make_progress(self) -> bool:
        """Make progress in MPI, and return whether there was any since the last call."""
        messages = self.communicator.poll_messages()
        for message, source in messages:
            self._dispatch(message, source)
        busy = self.communicator.complete_requests() or bool(messages)
        self._shutting_down = [each for each in self._shutting_down if not each.advance_shutdown()]
        return busy

    def _dispatch(self, message: Message, source: int) -> None:
        if message.transport == _BROADCAST:
            self._broadcasts.put(message.payload)
        elif (client := self._clients.get(message.transport)) is not None:
            client.handle_message(message, source)
        else:
            self._unclaimed.setdefault(message.transport, []).append((message, source))

    def _finalize(self, limit: float) -> None:
        """Finalize MPI once it has no pending requests."""
        end = time.monotonic() + _DRAIN_SECONDS
        while (
            self._shutting_down or self.communicator.has_pending_requests
        ) and not self.stop_reason:
            if time.monotonic() > end:
                return
            self._make_progress()
            time.sleep(_MIN_PAUSE)
        if not self.stop_reason:
            self._is_finalized = self.communicator.finalize(
                time.monotonic() + limit, self._make_progress
            )


_lock = threading.Lock()
_progress_thread: MpiProgressThread | None = None


def get_progress_thread(timeout: float) -> MpiProgressThread:
    """Return the progress thread of this process; the first call initializes MPI.

    The first call blocks until all processes that `mpirun` has started have made theirs.

    Args:
        timeout: The longest time to wait for the other processes, in seconds.

    Raises:
        UsageError: There is no MPI library, it is not the launcher's, or it is initialized without
            support for several threads.
        TransportError: A process has not made its first call in time, or MPI has failed.
    """
    global _progress_thread  # noqa: PLW0603 - there is one per process
    with _lock:
        if _progress_thread is None:
            _progress_thread = MpiProgressThread(timeout)
        if _progress_thread.stop_reason:
            raise TransportError(-1, _progress_thread.stop_reason)
        return _progress_thread
