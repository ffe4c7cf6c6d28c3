"""All processes that `mpirun` has started, and the one thread of this process that calls MPI.

One thread is right whatever a library locks, and for however many threads it was built. It can't
sleep in MPI and hear of new work as well: it looks again and again, with growing pauses.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from phalanx.engines.ending import at_the_end
from phalanx.engines.interface import EngineError
from phalanx.engines.mpi import library
from phalanx.engines.mpi.protocol import MOST_BYTES, Kind, Message

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Member", "World", "the_world"]

_TALK = 0
"""MPI's tag of messages; data have tags above it."""
_PIECE = 2**28
"""Bytes that MPI moves at once: older libraries count in 32 bits."""
_SHORTEST, _LONGEST, _IDLE = 2e-5, 1e-3, 2e-2
"""Seconds between two looks at MPI: after something has happened; at most; without an engine."""
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


class _Movement(NamedTuple):
    """A request of MPI; whether it was carried out is told to `done`."""

    request: Any
    done: Callable[[bool], None]
    rank: int
    tag: int


class _Pieces:
    """What tells of several pieces at once."""

    def __init__(self, count: int, done: Callable[[bool], None]) -> None:
        self._left, self._done = count, done
        self._carried = True

    def __call__(self, carried: bool) -> None:
        self._left -= 1
        self._carried &= carried
        if not self._left:
            self._done(self._carried)


class World:
    """This process among all that `mpirun` has started; made by `the_world`.

    Attributes:
        rank: Of this process among all.
        size: How many processes there are.
        name: The same for all of them, and for no others.
        stopped: Why no call of MPI is made any more; empty while they are.
    """

    def __init__(self, seconds: float) -> None:
        self._mpi: Any = library.load()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._shared: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._members: dict[int, Member] = {}
        self._ending: list[Member] = []
        self._early: dict[int, list[tuple[Message, int]]] = {}
        self._movements: list[_Movement] = []
        self._received = self._ended = 0
        self._over = self._finished = False
        self._limit = 0.0
        self.stopped = ""
        self.troubled = False
        self._begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(time.monotonic() + seconds,), name="phalanx-mpi", daemon=True
        )
        self._thread.start()
        if (error := self._begun.get()) is not None:
            raise error
        self._pid = os.getpid()
        at_the_end(self.finish)

    # For any thread.

    def do(self, call: Callable[[], None]) -> None:
        """Have something called in the thread of MPI, after what was given before."""
        self._calls.put(call)

    def share(self, text: bytes | None, seconds: float) -> bytes:
        """What rank 0 tells all; it gives the text, the others None. All must call it.

        Raises:
            EngineError: It hasn't come within so many seconds.
        """
        if text is not None:
            for rank in range(1, self.size):
                self.do(partial(self.tell, rank, Message(_OWN, Kind.TEXT, 0, text=text)))
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
        limit = _RAISED_SECONDS if raised else _TROUBLED_SECONDS if self.troubled else None
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

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to a process."""
        request = self._talk.Isend([message.pack(), self._mpi.BYTE], rank, _TALK)
        self._movements.append(_Movement(request, _nothing, rank, _TALK))

    def send(self, rank: int, data: memoryview, tag: int, done: Callable[[bool], None]) -> None:
        """Send bytes that were asked for, under the tag with which they were."""
        self._move(self._talk.Isend, rank, data, tag, done)

    def receive(self, rank: int, data: memoryview, done: Callable[[bool], None]) -> int:
        """Receive bytes: under which tag, to be asked for with it."""
        tag = _TALK + 1 + self._received % self._most_tags
        self._received += 1
        self._move(self._talk.Irecv, rank, data, tag, done)
        return tag

    def cancel(self, rank: int, tag: int) -> None:
        """Give up to receive what doesn't come: `done` is told."""
        for movement in self._movements:
            if (movement.rank, movement.tag) == (rank, tag):
                movement.request.Cancel()

    def stop(self, reason: str) -> None:
        """Make no call of MPI any more: it holds memory that isn't its own for longer."""
        self.stopped = reason

    def _move(
        self,
        how: Callable[..., Any],
        rank: int,
        data: memoryview,
        tag: int,
        done: Callable[[bool], None],
    ) -> None:
        pieces = [data[start : start + _PIECE] for start in range(0, data.nbytes, _PIECE)]
        one_done = _Pieces(len(pieces), done)
        for piece in pieces:
            request = how([piece, self._mpi.BYTE], rank, tag)
            self._movements.append(_Movement(request, one_done, rank, tag))

    # How it runs.

    def _run(self, deadline: float) -> None:
        try:
            self._begin(deadline)
        except Exception as error:  # noqa: BLE001 - who waits for this thread raises it
            self._begun.put(error)
            return
        self._begun.put(None)
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

    def _begin(self, deadline: float) -> None:
        self._ours = not self._mpi.Is_initialized()
        library.begin(self._mpi)
        everybody = self._mpi.COMM_WORLD
        self.rank, self.size = everybody.Get_rank(), everybody.Get_size()
        # What others send in the world of all must not meet what is sent here.
        self._talk, request = everybody.Idup()
        self._wait(request, deadline)
        name = bytearray(secrets.token_bytes(8))
        self._wait(self._talk.Ibcast([name, self._mpi.BYTE], 0), deadline)
        self.name = name.hex()
        self._most_tags = int(self._talk.Get_attr(self._mpi.TAG_UB)) - _TALK - 1
        self._buffer = bytearray(MOST_BYTES)
        self._listen()

    def _wait(self, request: Any, deadline: float) -> None:
        while not request.Test():
            if time.monotonic() > deadline:
                raise EngineError(
                    -1,
                    f"not all {self.size} processes that mpirun has started came in time: the "
                    "first group must have them all",
                )
            time.sleep(_LONGEST)

    def _listen(self) -> None:
        self._heard = self._talk.Irecv([self._buffer, self._mpi.BYTE], self._mpi.ANY_SOURCE, _TALK)

    def _serve(self) -> None:
        pause = _SHORTEST
        while not self._over and not self.stopped:
            busy = self._look()
            busy |= self._call(0 if busy else pause)
            used = len(self._members) > self._ended or self._movements
            longest = _LONGEST if used else _IDLE
            pause = _SHORTEST if busy else min(2 * pause, longest)
        if self._over:
            self._leave()

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
        busy = self._hear() | self._complete()
        self._ending = [each for each in self._ending if not each.settle()]
        return busy

    def _hear(self) -> bool:
        """Take the messages that have come."""
        status = self._mpi.Status()
        busy = False
        while self._heard.Test(status):
            busy = True
            size = status.Get_count(self._mpi.BYTE)
            message = Message.parse(memoryview(self._buffer)[:size])
            self._listen()
            self._give(message, status.Get_source())
        return busy

    def _give(self, message: Message, source: int) -> None:
        if message.engine == _OWN:
            self._shared.put(message.text)
        elif (member := self._members.get(message.engine)) is not None:
            member.take(message, source)
        else:
            self._early.setdefault(message.engine, []).append((message, source))

    def _complete(self) -> bool:
        """Tell what has become of the movements that have ended."""
        if not self._movements:
            return False
        requests = [movement.request for movement in self._movements]
        statuses: list[Any] = []
        ended = self._mpi.Request.Testsome(requests, statuses)
        if not ended:
            return False
        gone = dict(zip(ended, statuses, strict=True))
        now = [(self._movements[index], gone[index]) for index in sorted(gone)]
        left = enumerate(self._movements)
        self._movements = [movement for index, movement in left if index not in gone]
        for movement, status in now:
            movement.done(not status.Is_cancelled())
        return True

    def _finish(self, limit: float | None) -> None:
        self._over = True
        self._limit = math.inf if limit is None else limit

    def _leave(self) -> None:
        """End MPI, if it was begun here and nothing is in its hands."""
        end = time.monotonic() + _SETTLING_SECONDS
        while (self._ending or self._movements) and time.monotonic() < end:
            self._look()
            time.sleep(_SHORTEST)
        if self._movements or self.stopped:
            return
        if self._ours:
            if not self._all_leave():
                return
            self._heard.Cancel()
            self._heard.Wait()
            self._mpi.Finalize()
        else:
            self._heard.Cancel()
            self._heard.Wait()
        self._finished = True

    def _all_leave(self) -> bool:
        """Whether all processes are at their end; MPI's own way of asking can't be given up."""
        end = time.monotonic() + self._limit
        barrier = self._talk.Ibarrier()
        pause = _SHORTEST
        while not barrier.Test():
            if time.monotonic() > end:
                return False
            busy = self._look()
            time.sleep(pause)
            pause = _SHORTEST if busy else min(2 * pause, _IDLE)
        return True


def _nothing(carried: bool) -> None:
    """Nobody waits for it."""


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
