"""What is said and carried through MPI. For the one thread that calls it."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.engines.interface import EngineError
from phalanx.engines.mpi import library
from phalanx.engines.mpi.protocol import MOST_BYTES, Message

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Wire"]

_TALK = 0
"""MPI's tag of messages; data have tags above it."""
_PIECE = 2**28
"""Bytes that MPI moves at once: older libraries count in 32 bits."""
_PAUSE = 0.001


class _Movement(NamedTuple):
    """A request of MPI; whether it was carried out is told to `done`."""

    request: Any
    done: Callable[[bool], None]
    rank: int
    tag: int
    receives: bool = False


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


class Wire:
    """This process among all that `mpirun` has started.

    Blocks until all of them have come.

    Attributes:
        rank: Of this process among all.
        size: How many processes there are.
        name: The same for all of them, and for no others.

    Args:
        mpi: The module `mpi4py.MPI`.
        deadline: Until when the others must have come, in monotonic seconds.
    """

    def __init__(self, mpi: Any, deadline: float) -> None:
        self._mpi = mpi
        self._ours = not mpi.Is_initialized()
        library.begin(mpi)
        everybody = mpi.COMM_WORLD
        self.rank, self.size = int(everybody.Get_rank()), int(everybody.Get_size())
        # What a script sends in the world of all must not meet what is sent here.
        self._talk, request = everybody.Idup()
        self._wait(request, deadline)
        name = bytearray(secrets.token_bytes(8))
        self._wait(self._talk.Ibcast([name, mpi.BYTE], 0), deadline)
        self.name = name.hex()
        self._most_tags = int(self._talk.Get_attr(mpi.TAG_UB)) - _TALK
        self._received = 0
        self._movements: list[_Movement] = []
        self._buffer = bytearray(MOST_BYTES)
        self._hearing: Any = None

    @property
    def busy(self) -> bool:
        """Whether MPI has anything in its hands."""
        return bool(self._movements)

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
        self._move(self._talk.Irecv, rank, data, tag, done, receives=True)
        return tag

    def cancel(self, rank: int, tag: int) -> None:
        """Give up to receive what doesn't come: `done` is told."""
        for movement in self._movements:
            if movement.receives and (movement.rank, movement.tag) == (rank, tag):
                movement.request.Cancel()

    def heard(self) -> list[tuple[Message, int]]:
        """The messages that have come, each with the process that it is from."""
        messages: list[tuple[Message, int]] = []
        status = self._mpi.Status()
        # Looked for, not waited for: with a receive from anybody that was posted before, jobs on
        # two hosts now and then missed a message for ever (MPICH 5.0.2).
        while self._hearing or self._hear():
            if not self._hearing.Test(status):
                break
            self._hearing = None
            size = status.Get_count(self._mpi.BYTE)
            messages.append((Message.parse(memoryview(self._buffer)[:size]), status.Get_source()))
        return messages

    def _hear(self) -> bool:
        """Take the next message, if there is one."""
        found = self._talk.Improbe(self._mpi.ANY_SOURCE, _TALK)
        if found is not None:
            self._hearing = found.Irecv([self._buffer, self._mpi.BYTE])
        return found is not None

    def complete(self) -> bool:
        """Tell what has become of movements; whether any has ended."""
        if not self._movements:
            return False
        statuses: list[Any] = []
        requests = [movement.request for movement in self._movements]
        ended = self._mpi.Request.Testsome(requests, statuses)
        if not ended:
            return False
        carried = {
            number: not status.Is_cancelled()
            for number, status in zip(ended, statuses, strict=True)
        }
        movements, self._movements = self._movements, []
        self._movements += [each for number, each in enumerate(movements) if number not in carried]
        for number in sorted(carried):
            movements[number].done(carried[number])
        return True

    def end(self, deadline: float, look: Callable[[], object]) -> bool:
        """End MPI, if it was begun here; whether it has ended well.

        MPI's own way to end waits for all processes, for ever, so they are waited for before.

        Args:
            deadline: Until when the others must be at their end, in monotonic seconds.
            look: Called again and again meanwhile.
        """
        if self._ours:
            barrier = self._talk.Ibarrier()
            while not barrier.Test():
                if time.monotonic() > deadline:
                    return False
                look()
                time.sleep(_PAUSE)
        if self._ours:
            self._mpi.Finalize()
        return True

    def _wait(self, request: Any, deadline: float) -> None:
        while not request.Test():
            if time.monotonic() > deadline:
                raise EngineError(-1, late(self.size))
            time.sleep(_PAUSE)

    def _move(
        self,
        how: Callable[..., Any],
        rank: int,
        data: memoryview,
        tag: int,
        done: Callable[[bool], None],
        *,
        receives: bool = False,
    ) -> None:
        pieces = [data[start : start + _PIECE] for start in range(0, data.nbytes, _PIECE)]
        one_done = _Pieces(len(pieces), done)
        for piece in pieces:
            request = how([piece, self._mpi.BYTE], rank, tag)
            self._movements.append(_Movement(request, one_done, rank, tag, receives))


def late(size: int = 0) -> str:
    """What to say when not all processes have come."""
    return (
        f"not all {f'{size} ' if size else ''}processes that mpirun has started came in time: the "
        "first group must have them all"
    )


def _nothing(carried: bool) -> None:
    """Nobody waits for it."""
