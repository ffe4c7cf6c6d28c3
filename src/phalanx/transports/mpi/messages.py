"""Messages and data through MPI; only for the thread that calls it."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.transports.interface import TransportError
from phalanx.transports.mpi import library
from phalanx.transports.mpi.protocol import MOST_BYTES, Message

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Wire"]

_TALK = 0
"""MPI tag of messages; data have tags above it."""
_PIECE = 2**28
"""Most bytes of one MPI request: older libraries count in 32 bits."""
_PAUSE = 0.001


class _Movement(NamedTuple):
    """An MPI request; `done` is called with whether it was carried out or cancelled."""

    request: Any
    done: Callable[[bool], None]
    rank: int
    tag: int
    receives: bool = False


class _Pieces:
    """A callback for several pieces, which calls `done` once after the last.

    Args:
        count: The number of pieces.
        done: Called with whether all pieces were carried out.
    """

    def __init__(self, count: int, done: Callable[[bool], None]) -> None:
        self._left, self._done = count, done
        self._carried = True

    def __call__(self, carried: bool) -> None:
        self._left -= 1
        self._carried &= carried
        if not self._left:
            self._done(self._carried)


class Wire:
    """The sends and receives of this process to all others that `mpirun` has started.

    Blocks until all processes have created theirs.

    Attributes:
        rank: The rank of this process among all.
        size: The number of processes.
        name: The name of this set of processes, random and the same on all of them.

    Args:
        mpi: The module `mpi4py.MPI`.
        deadline: The deadline for the other processes, in seconds on the monotonic clock.

    Raises:
        TransportError: Not all processes came before the deadline.
    """

    def __init__(self, mpi: Any, deadline: float) -> None:
        self._mpi = mpi
        self._ours = not mpi.Is_initialized()
        library.begin(mpi)
        everybody = mpi.COMM_WORLD
        self.rank, self.size = int(everybody.Get_rank()), int(everybody.Get_size())
        # Messages of a script in COMM_WORLD must not match those sent here.
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
        """True if MPI has pending requests."""
        return bool(self._movements)

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to a process."""
        request = self._talk.Isend([message.pack(), self._mpi.BYTE], rank, _TALK)
        self._movements.append(_Movement(request, _nothing, rank, _TALK))

    def send(self, rank: int, data: memoryview, tag: int, done: Callable[[bool], None]) -> None:
        """Send requested bytes under the tag of their request; call `done` at the end."""
        self._move(self._talk.Isend, rank, data, tag, done)

    def receive(self, rank: int, data: memoryview, done: Callable[[bool], None]) -> int:
        """Post a receive of bytes, and return the tag under which to request them."""
        tag = _TALK + 1 + self._received % self._most_tags
        self._received += 1
        self._move(self._talk.Irecv, rank, data, tag, done, receives=True)
        return tag

    def cancel(self, rank: int, tag: int) -> None:
        """Cancel a receive whose bytes will not come; its `done` is called."""
        for movement in self._movements:
            if movement.receives and (movement.rank, movement.tag) == (rank, tag):
                movement.request.Cancel()

    def heard(self) -> list[tuple[Message, int]]:
        """Return the messages that have arrived, each with the rank of its process."""
        messages: list[tuple[Message, int]] = []
        status = self._mpi.Status()
        # Probe instead of a receive from any source that is posted in advance: with that, jobs on
        # two hosts sometimes missed a message for ever (MPICH 5.0.2).
        while self._hearing or self._hear():
            if not self._hearing.Test(status):
                break
            self._hearing = None
            size = status.Get_count(self._mpi.BYTE)
            messages.append((Message.parse(memoryview(self._buffer)[:size]), status.Get_source()))
        return messages

    def _hear(self) -> bool:
        """Begin to receive the next message; return whether there is one."""
        found = self._talk.Improbe(self._mpi.ANY_SOURCE, _TALK)
        if found is not None:
            self._hearing = found.Irecv([self._buffer, self._mpi.BYTE])
        return found is not None

    def complete(self) -> bool:
        """Call `done` of all requests that have ended; return whether there was any."""
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
        """Finalize MPI, if it was initialized here; return False if the deadline has passed.

        MPI's finalization waits for all processes without a limit, so this waits for them before.

        Args:
            deadline: The deadline for the other processes to reach their end, in seconds on the
                monotonic clock.
            look: Called repeatedly during the wait.
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
                raise TransportError(-1, late(self.size))
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
    """Return the error message for processes that have not come in time."""
    return (
        f"not all {f'{size} ' if size else ''}processes that mpirun has started came in time: the "
        "first group must have them all"
    )


def _nothing(carried: bool) -> None:
    """Do nothing: no caller waits for a message."""
