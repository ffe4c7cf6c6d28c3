"""The only thread of this process that calls MPI, and the transports that it serves.

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
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.transports.interface import TransportError
from phalanx.transports.mpi import library
from phalanx.transports.mpi.messages import Wire, late
from phalanx.transports.mpi.protocol import Kind, Message
from phalanx.transports.shutdown_hooks import at_the_end

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Member", "World", "the_world"]

_SHORTEST, _LONGEST, _IDLE = 2e-5, 1e-3, 2e-2
"""Seconds between two polls of MPI: after activity; the longest; the longest without a transport."""
_MARGIN = 1.0
_SETTLING_SECONDS = 3.0
"""Seconds that pending MPI requests may take at the end of the process."""
_RAISED_SECONDS, _TROUBLED_SECONDS = 3.0, 30.0
"""Seconds to wait then for all other processes: after an exception; after a group has failed."""
_OWN = 0
"""The transport name of messages of `World.share`."""


class Member(Protocol):
    """A transport as seen by the world; all methods are called in the thread of MPI."""

    def take(self, message: Message, source: int) -> None:
        """Handle a message from a process."""

    def settle(self) -> bool:
        """Continue to end the transport, and return whether it has ended."""

    def fail(self, reason: str) -> None:
        """Fail all transfers: MPI cannot be used any more."""


class World:
    """This process among all that `mpirun` has started; created by `the_world`.

    Attributes:
        wire: The sends and receives through MPI; only for the thread of MPI.
        stopped: The reason why MPI is not called any more; empty while it is called.
        troubled: Whether a group has failed, so that other processes may never reach their end.
    """

    wire: Wire

    def __init__(self, seconds: float) -> None:
        self._mpi: Any = library.load()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._shared: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._members: dict[int, Member] = {}
        self._early: dict[int, list[tuple[Message, int]]] = {}
        self._ending: list[Member] = []
        self._ended = 0
        self._limit: float | None = None
        self._finished = False
        self.stopped = ""
        self.troubled = False
        self._pid = os.getpid()
        self._begin(seconds)
        at_the_end(self.finish)

    # For any thread.

    @property
    def rank(self) -> int:
        """The rank of this process among all."""
        return self.wire.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.wire.size

    def do(self, call: Callable[[], None]) -> None:
        """Call a function in the thread of MPI, after all functions given before."""
        self._calls.put(call)

    def share(self, text: bytes | None, seconds: float) -> bytes:
        """Broadcast a text from rank 0, and return it. All processes must call this.

        Args:
            text: The text on rank 0, of at most `MOST_TEXT` bytes; None on the others.
            seconds: The longest time to wait for the text, in seconds.

        Raises:
            TransportError: The text has not arrived in time.
        """
        if text is not None:
            message = Message(_OWN, Kind.TEXT, 0, text=text)
            for rank in range(1, self.size):
                self.do(partial(self.wire.tell, rank, message))
            return text
        try:
            return self._shared.get(timeout=seconds)
        except queue.Empty:
            raise TransportError(0, f"nothing came from rank 0 within {seconds:g} s") from None

    def finish(self) -> None:
        """Finalize MPI at the end of this process, once all other processes are at their end.

        MPI cannot be finalized without them. If a group has failed or an exception ends this
        process, they may be dead, so the wait has a limit. If MPI is not finalized by then, a
        process that ends by an exception aborts all processes; any other leaves MPI as it is.
        """
        if self._finished or os.getpid() != self._pid:
            return
        raised = hasattr(sys, "last_value")
        limit = _RAISED_SECONDS if raised else _TROUBLED_SECONDS if self.troubled else math.inf
        if not self.stopped:
            self.do(partial(self._finish, limit))
            self._thread.join()
        if raised and not self._finished:
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(1)

    # For the thread of MPI.

    def join(self, transport: int, member: Member) -> None:
        """Deliver a transport's messages to it from now on, and those that have arrived before."""
        self._members[transport] = member
        for message, source in self._early.pop(transport, ()):
            member.take(message, source)

    def end(self, member: Member) -> None:
        """Begin to end a transport; its messages are still delivered afterwards."""
        self._ended += 1
        self._ending.append(member)

    def stop(self, reason: str) -> None:
        """Stop calling MPI, since it still refers to memory that its owners take back.

        Args:
            reason: The reason, for errors of later calls.
        """
        self.stopped = reason

    # The thread of MPI.

    def _begin(self, seconds: float) -> None:
        begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(begun, time.monotonic() + seconds),
            name="phalanx-mpi",
            daemon=True,
        )
        self._thread.start()
        try:
            error = begun.get(timeout=seconds + _MARGIN)
        except queue.Empty:
            raise TransportError(-1, late()) from None  # initialization itself waits for them
        if error is not None:
            raise error

    def _run(self, begun: queue.SimpleQueue[Exception | None], deadline: float) -> None:
        try:
            self.wire = Wire(self._mpi, deadline)
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            begun.put(error)
            return
        begun.put(None)
        reason = "MPI has ended in this process"
        try:
            self._serve()
            reason = self.stopped or reason
        except self._mpi.Exception as error:
            reason = f"MPI has failed: {error}"
        finally:
            self.stopped = reason
            self.troubled = True
            for member in list(self._members.values()):
                member.fail(reason)

    def _serve(self) -> None:
        pause = _SHORTEST
        while self._limit is None and not self.stopped:
            busy = self._look()
            busy |= self._call(0 if busy else pause)
            used = len(self._members) > self._ended or self.wire.busy
            pause = _SHORTEST if busy else min(2 * pause, _LONGEST if used else _IDLE)
        if not self.stopped:
            self._leave(self._limit or 0.0)

    def _call(self, seconds: float) -> bool:
        """Run the queued functions, and return whether there was any.

        Args:
            seconds: The longest time to wait for the first, in seconds.
        """
        busy = False
        try:
            self._calls.get(timeout=seconds)()
            busy = True
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return busy

    def _look(self) -> bool:
        """Make progress in MPI, and return whether there was any since the last call."""
        messages = self.wire.heard()
        for message, source in messages:
            self._give(message, source)
        busy = self.wire.complete() or bool(messages)
        self._ending = [each for each in self._ending if not each.settle()]
        return busy

    def _give(self, message: Message, source: int) -> None:
        if message.transport == _OWN:
            self._shared.put(message.text)
        elif (member := self._members.get(message.transport)) is not None:
            member.take(message, source)
        else:
            self._early.setdefault(message.transport, []).append((message, source))

    def _finish(self, limit: float) -> None:
        self._limit = limit

    def _leave(self, limit: float) -> None:
        """Finalize MPI once it has no pending requests."""
        end = time.monotonic() + _SETTLING_SECONDS
        while (self._ending or self.wire.busy) and not self.stopped:
            if time.monotonic() > end:
                return
            self._look()
            time.sleep(_SHORTEST)
        if not self.stopped:
            self._finished = self.wire.end(time.monotonic() + limit, self._look)


_lock = threading.Lock()
_world: World | None = None


def the_world(seconds: float) -> World:
    """Return the world of this process; the first call initializes MPI.

    The first call blocks until all processes that `mpirun` has started have made theirs.

    Args:
        seconds: The longest time to wait for the other processes, in seconds.

    Raises:
        UsageError: There is no MPI library, it is not the launcher's, or it is initialized without
            support for several threads.
        TransportError: A process has not made its first call in time, or MPI has failed.
    """
    global _world  # noqa: PLW0603 - there is one per process
    with _lock:
        if _world is None:
            _world = World(seconds)
        if _world.stopped:
            raise TransportError(-1, _world.stopped)
        return _world
