"""Connections to workers on the same host: authenticated Unix domain sockets.

No thread stands between the calling thread and the executing one: each message wakes one thread.
ZeroMQ would have to wake threads of its own in between, three times per direction, which is half of
the time of a short call. So ZeroMQ is not used on a host. Data that does not leave the kernel is
not encrypted either. But before a byte of a message is read, both ends prove that they know the
job's key, and check that they belong to the same user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.key import derive
from phalanx.rpc.event_loop import Reactor, SpinPolicy
from phalanx.rpc.message import MAX_FRAME_SIZE, Frames
from phalanx.system.authentication import AuthenticationError, Handshake

_LENGTH = struct.Struct("<Q")
_TIME = struct.Struct("ll")
_CHUNK = 32 * 2**10
_MAX_READ = 2 * 2**20
"""The maximum number of bytes to read before other work gets its turn."""
_MAX_UNREAD = MAX_FRAME_SIZE
"""The maximum number of bytes of unread answers before the connection is ended."""
_SPIN_SECONDS = 1e-3
"""Seconds that a caller spins for its answer before it sleeps."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds to wait for a proof; longer only if the peer may not have started yet."""
_PROTOCOL = b"PhRPC/2\n"
_CREDENTIALS = struct.Struct("3i")
_MAX_HANDSHAKES = 64
_MIN_HANDSHAKE_TIMEOUT = 1e-3
_RETRY_SECONDS = 0.01
"""Seconds to wait if this process, or the peer, is out of descriptors or memory."""
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_LOG = logging.getLogger("phalanx.rpc")


class LocalConnection:
    """A connection to a worker on the same host that has proved that it knows the key."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.fd = connection.fileno()
        self.descriptors = (self.fd,)
        """The descriptors to watch."""
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()
        self._timeout: float | None = None
        self._spin = SpinPolicy(_SPIN_SECONDS)
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._queued, self._is_sending = 0, False
        self._parts: list[memoryview] = []
        """Unsent parts of the queue's current message, for the thread that set `_is_sending`."""

    def send(
        self,
        frame: bytes,
        out_of_band: Sequence[memoryview] = (),  # noqa: ARG002
        end: float = math.inf,
    ) -> None:
        """Send a message, on a connection that no other thread sends on; block while nobody reads.

        Args:
            frame: The message.
            out_of_band: Empty: on a host no frames follow the message.
            end: The deadline, in monotonic seconds; part of the message may have been sent then.

        Raises:
            TimeoutError: The message was not sent completely before `end`.
            OSError: The connection is gone.
        """
        self._write(_split_frame(frame), end)

    def post(self, frame: bytes) -> bool:
        """Queue a message and send what the peer reads, from any thread; never block.

        Returns:
            Whether this thread must call `flush`, since the peer does not read all of the queue.

        Raises:
            OSError: The connection is gone.
        """
        with self._lock:
            if self._is_sending:
                self._queue.append(frame)
                self._queued += len(frame)
                return False
            self._is_sending = True
            self._parts = _split_frame(frame)
        try:
            self._drain(0.0)
        except TimeoutError:
            return True
        return False

    def flush(self) -> None:
        """Send all queued messages; block while the peer does not read.

        Raises:
            OSError: The connection is gone.
        """
        self._drain(math.inf)

    def send_answer(self, frame: bytes) -> None:
        """Send an answer; if another thread is sending one, leave it to that thread.

        So a caller that does not read blocks one thread at most.

        Raises:
            OSError: The connection is gone, or has just been ended since too much of it is unread.
        """
        if self._queued > _MAX_UNREAD:
            self.shut_down()
        if self.post(frame):
            self.flush()

    def _drain(self, end: float) -> None:
        try:
            while self._parts or self._next():
                self._write(self._parts, end)
        except TimeoutError:
            raise
        except BaseException:
            self.shut_down()  # interrupted: part of a message may be lost
            with self._lock:
                self._queue.clear()
                self._parts, self._queued, self._is_sending = [], 0, False
            raise

    def _next(self) -> bool:
        with self._lock:
            if not self._queue:
                self._is_sending = False
                return False
            frame = self._queue.popleft()
            self._queued -= len(frame)
            self._parts = _split_frame(frame)
            return True

    def _write(self, parts: list[memoryview], end: float) -> None:
        """Send all parts, and remove from the list what has been sent."""
        while parts:
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_until_writable(end)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def read(self) -> list[bytes] | None:
        """Return all available messages, or None at the end of the connection."""
        messages: list[bytes] = []
        for _ in range(0, _MAX_READ, _CHUNK):
            try:
                data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
                messages += self._split(data)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                return messages or None
            if len(data) < _CHUNK:
                break
        return messages

    def receive(self, end: float) -> Frames | None:
        """Wait for one message; return None at the end of the connection.

        Args:
            end: The deadline, in monotonic seconds; infinity for none.

        Raises:
            TimeoutError: There was no message before `end`.
        """
        try:
            if not self._ready and not self._spin.wait(self._poll_once):
                start = time.perf_counter()
                while not self._ready:
                    self._wait_until_readable(end)
                    with contextlib.suppress(BlockingIOError):  # the kernel's timeout expired
                        self._feed(self._socket.recv(_CHUNK))
                self._spin.record_sleep(time.perf_counter() - start)
        except TimeoutError:
            raise
        except OSError:
            return None
        return self._ready.popleft(), []

    def _poll_once(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._feed(self._socket.recv(_CHUNK, socket.MSG_DONTWAIT))
        return bool(self._ready)

    def _feed(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._ready.extend(self._split(data))

    def shut_down(self) -> None:
        """Shut the connection down; threads that wait for it notice, in both processes."""
        with contextlib.suppress(OSError):  # the peer has already done so
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close the socket."""
        self.shut_down()
        self._socket.close()

    def _wait_until_writable(self, end: float) -> None:
        remaining = end - time.monotonic()
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if remaining <= 0 or not poll.poll(None if remaining == math.inf else remaining * 1000):
            raise TimeoutError

    def _wait_until_readable(self, end: float) -> None:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        # With the kernel's own timeout, a wait is one system call. Setting that timeout is another,
        # so it is set only if the old one does not fit.
        timeout = 0.0 if remaining == math.inf else remaining
        # The old one must end the wait no later, and not much earlier.
        if timeout != self._timeout and not 0.5 * timeout < (self._timeout or 0.0) <= timeout:
            timeout *= 0.9 if timeout > 1 else 1  # so that it fits the next call too
            self._timeout = timeout
            value = _TIME.pack(int(timeout), max(1, int(timeout % 1 * 1e6)) if timeout else 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def _split(self, data: bytes) -> list[bytes]:
        if not self._buffer and len(data) > _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length == len(data) - _LENGTH.size:
                return [data[_LENGTH.size :]]
        buffer = self._buffer
        buffer += data
        messages, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            stop = start + _LENGTH.size + length
            if length > MAX_FRAME_SIZE:
                raise ConnectionAbortedError(f"a message of {length} bytes was announced")
            if stop > len(buffer):
                break
            messages.append(bytes(memoryview(buffer)[start + _LENGTH.size : stop]))
            start = stop
        del buffer[:start]
        return messages


def _split_frame(frame: bytes) -> list[memoryview]:
    return [memoryview(_LENGTH.pack(len(frame))), memoryview(frame)]


class Acceptor:
    """A listening socket for workers on this host that rejects unauthenticated connections.

    Args:
        key: The key of the job.
        address: The name to listen at, in the kernel's abstract namespace, which leaves no file.
        reactor: The event loop that reads from unauthenticated connections.
        on_accepted: Called with each connection whose peer has proved that it knows the key.
        on_rejected: Called after a connection is rejected.
    """

    def __init__(
        self,
        key: bytes,
        address: str,
        reactor: Reactor,
        on_accepted: Callable[[LocalConnection], None],
        on_rejected: Callable[[], None],
    ) -> None:
        self._key, self._address, self._reactor = key, address, reactor
        self._on_accepted, self._on_rejected = on_accepted, on_rejected
        self._is_out_of_resources = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address)
        self._socket.listen(1024)
        self._pending: dict[int, tuple[socket.socket, Handshake, float]] = {}
        """Unauthenticated connections, with the times at which they were accepted."""

    def open(self) -> None:
        """Start to accept connections."""
        self._reactor.watch(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept all waiting connections; reject unauthenticated ones in excess or too slow."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._wait_for_resources(error)
                break
            if _peer_user(connection) != os.geteuid():
                connection.close()
                self._on_rejected()
                continue
            connection.setblocking(False)
            fd = connection.fileno()
            handshake = make_handshake(self._key, self._address, is_initiator=False)
            self._pending[fd] = connection, handshake, time.monotonic()
            self._reactor.watch(fd, partial(self._authenticate, fd))
        oldest = time.monotonic() - HANDSHAKE_TIMEOUT
        too_many = len(self._pending) - _MAX_HANDSHAKES
        for number, (fd, (_, _, since)) in enumerate(list(self._pending.items())):
            if number < too_many or since < oldest:
                self._reject(fd)

    def _authenticate(self, fd: int) -> None:
        """Continue the authentication of a connection that is readable."""
        connection, handshake, _ = self._pending[fd]
        try:
            data = connection.recv(handshake.missing)
            if not data:
                raise ConnectionResetError
            if answer := handshake.receive(data):
                connection.send(answer)
        except OSError:  # the peer has given up, as after its timeout
            self._drop(fd)
            return
        except AuthenticationError:
            self._reject(fd)
            return
        if not handshake.missing:
            self._reactor.unwatch(fd)
            del self._pending[fd]
            connection.setblocking(True)
            self._on_accepted(LocalConnection(connection))

    def _reject(self, fd: int) -> None:
        self._drop(fd)
        self._on_rejected()

    def _drop(self, fd: int) -> None:
        self._reactor.unwatch(fd)
        self._pending.pop(fd)[0].close()

    def _wait_for_resources(self, error: OSError) -> None:
        """Pause while peers wait in the kernel; polling would only report them again, at once."""
        if not self._is_out_of_resources:
            self._is_out_of_resources = True
            _LOG.warning(
                "%s: new connections of workers are delayed; raise `ulimit -n`", error.strerror
            )
        time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Close the socket and all unauthenticated connections."""
        for connection, _, _ in self._pending.values():
            connection.close()
        self._pending.clear()
        self._socket.close()


def connect(
    key: bytes, address: str, end: float = math.inf, max_wait: float = HANDSHAKE_TIMEOUT
) -> LocalConnection:
    """Connect to a worker on this host; block until both have proved that they know the key.

    Args:
        key: The key of the job.
        address: The address at which the worker listens.
        end: The deadline, in monotonic seconds.
        max_wait: The maximum number of seconds to wait for the worker, even if `end` is later.

    Raises:
        OSError: Nobody listens at the address.
        CallTimeout: The worker did not answer before `end`.
        PhalanxError: The listener does not know the key, belongs to another user or does not answer
            within `max_wait` seconds, or this process has no room for a connection.
    """
    now = time.monotonic()
    timeout = min(max(_MIN_HANDSHAKE_TIMEOUT, end - now), max_wait)
    try:
        while True:
            try:
                return _connect(key, address, timeout)
            except (ConnectionResetError, BrokenPipeError):
                # The listener makes room by closing unauthenticated connections.
                if time.monotonic() > now + timeout:
                    raise
                time.sleep(_RETRY_SECONDS)
    except TimeoutError:
        kind = CallTimeout if timeout < max_wait else PhalanxError
        text = f"the worker there did not answer within {timeout:.2g} s: is it stopped?"
        raise kind(text) from None
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise PhalanxError(
                f"cannot connect: {error.strerror}; raise `ulimit -n`, or close files"
            ) from None
        raise


def _connect(key: bytes, address: str, timeout: float) -> LocalConnection:
    handshake = make_handshake(key, address, is_initiator=True)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(None if timeout == math.inf else timeout)
        connection.connect("\0" + address)
        if _peer_user(connection) != os.geteuid():
            raise PhalanxError("the process that listens there belongs to another user")
        connection.sendall(handshake.begin())
        while handshake.missing:
            data = connection.recv(handshake.missing)
            if not data:
                raise ConnectionResetError("the connection was closed")
            connection.sendall(handshake.receive(data))
        connection.settimeout(None)
    except AuthenticationError:
        connection.close()
        raise PhalanxError("the process that listens there does not know the job's key") from None
    except BaseException:
        connection.close()
        raise
    return LocalConnection(connection)


def make_handshake(key: bytes, address: str, *, is_initiator: bool) -> Handshake:
    """Return one side of the handshake; a proof for one address is useless at another one."""
    address_key = derive(key, f"rpc on a host: {address}")
    return Handshake(address_key, _PROTOCOL, is_initiator=is_initiator)


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def is_readable(fd: int, milliseconds: int = 0) -> bool:
    """Return whether a descriptor is readable, now or within that many milliseconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))
