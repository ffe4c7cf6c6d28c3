"""The one thread of this process that calls MPI, and the engines that it serves.

One thread is right whatever a library locks, and for however many threads it was built. It can't
sleep in MPI and hear of new work as well: it looks again and again, with growing pauses.
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

from phalanx.engines.ending import at_the_end
from phalanx.engines.interface import EngineError
from phalanx.engines.mpi import library
from phalanx.engines.mpi.protocol import Kind, Message
from phalanx.engines.mpi.wire import Wire, late

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Member", "World", "the_world"]

_SHORTEST, _LONGEST, _IDLE = 2e-5, 1e-3, 2e-2
"""Seconds between two looks at MPI: after something has happened; at most; without an engine."""
_MARGIN = 1.0
_SETTLING_SECONDS = 3.0
"""How long what MPI has in its hands may take at the end of the process."""
_RAISED_SECONDS, _TROUBLED_SECONDS = 3.0, 30.0
"""How long it is then waited for all others: after an exception; where a group has failed."""
_OWN = 0
"""The engine to which belongs what `World.share` tells."""


class Member(Protocol):
    """What an engine is to the world; all is called in the thread of MPI."""

    def take(self, message: Message, source: int) -> None:
        """Take a message from a process."""

    def settle(self) -> bool:
        """Go on with ending; whether it has ended."""

    def fail(self, reason: str) -> None:
        """Nothing can be carried any more."""


class World:
    """This process among all that `mpirun` has started; made by `the_world`.

    Attributes:
        wire: What is said and carried; for the thread of MPI.
        stopped: Why no call of MPI is made any more; empty while they are.
        troubled: Whether a group has failed, so that others may never come to their end.
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
        """Of this process among all."""
        return self.wire.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.wire.size

    def do(self, call: Callable[[], None]) -> None:
        """Have something called in the thread of MPI, after what was given before."""
        self._calls.put(call)

    def share(self, text: bytes | None, seconds: float) -> bytes:
        """What rank 0 tells all; it gives the text, the others None. All must call it.

        The text may have `MOST_TEXT` bytes.

        Raises:
            EngineError: It hasn't come within so many seconds.
        """
        if text is not None:
            message = Message(_OWN, Kind.TEXT, 0, text=text)
            for rank in range(1, self.size):
                self.do(partial(self.wire.tell, rank, message))
            return text
        try:
            return self._shared.get(timeout=seconds)
        except queue.Empty:
            raise EngineError(0, f"nothing came from rank 0 within {seconds:g} s") from None

    def finish(self) -> None:
        """End MPI at the end of this process, when all others are at theirs.

        It can't be ended without them. In a process in which something has failed they may be dead,
        and are waited for with a limit. One that ends by an exception has `mpirun` end them all, if
        they don't by themselves; any other leaves MPI as it is.
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

    def join(self, engine: int, member: Member) -> None:
        """Give an engine its messages from now on, and those that have come before."""
        self._members[engine] = member
        for message, source in self._early.pop(engine, ()):
            member.take(message, source)

    def end(self, member: Member) -> None:
        """Have an engine end; it gets its messages until the end of the process."""
        self._ended += 1
        self._ending.append(member)

    def stop(self, reason: str) -> None:
        """Make no call of MPI any more: it holds memory that isn't its own for longer."""
        self.stopped = reason

    # How it runs.

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
            raise EngineError(-1, late()) from None  # MPI itself waits for them
        if error is not None:
            raise error

    def _run(self, begun: queue.SimpleQueue[Exception | None], deadline: float) -> None:
        try:
            self.wire = Wire(self._mpi, deadline)
        except Exception as error:  # noqa: BLE001 - who waits for this thread raises it
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
        """Do what was asked for, or wait for something to do."""
        busy = False
        try:
            self._calls.get(timeout=seconds)()
            busy = True
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return busy

    def _look(self) -> bool:
        """Whether MPI has carried anything since the last look."""
        messages = self.wire.heard()
        for message, source in messages:
            self._give(message, source)
        busy = self.wire.complete() or bool(messages)
        self._ending = [each for each in self._ending if not each.settle()]
        return busy

    def _give(self, message: Message, source: int) -> None:
        if message.engine == _OWN:
            self._shared.put(message.text)
        elif (member := self._members.get(message.engine)) is not None:
            member.take(message, source)
        else:
            self._early.setdefault(message.engine, []).append((message, source))

    def _finish(self, limit: float) -> None:
        self._limit = limit

    def _leave(self, limit: float) -> None:
        """End MPI, once nothing is in its hands."""
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
    """This process among those that `mpirun` has started; the first call begins MPI.

    The first call blocks until all of them have made theirs.

    Args:
        seconds: How long it waits for them.

    Raises:
        UsageError: There is no MPI library, or it is another one than the launcher's.
        EngineError: Somebody hasn't come in time; MPI has failed.
    """
    global _world  # noqa: PLW0603 - there is one per process
    with _lock:
        if _world is None:
            _world = World(seconds)
        if _world.stopped:
            raise EngineError(-1, _world.stopped)
        return _world
