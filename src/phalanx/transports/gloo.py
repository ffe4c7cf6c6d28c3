"""The transport of PyTorch's Gloo: TCP between any two ranks.

Gloo cannot test whether a transfer has ended, and a wait that times out closes all connections of
the process. So threads wait without a limit on behalf of callers that wait with one. To abort an
transport, such a time-out is caused deliberately; peers then find their connections closed. A
connection is made with the first post to a peer. This happens in a thread too, since the peer may
never answer.

A time-out while a connection is being made lets Gloo end the process as soon as the connection is
made (`ex_ == nullptr`, in a thread of Gloo, torch 2.13). So two ranks begin to connect only after
each has declared in the store that it wants the other. That keeps connecting short, and an abort
waits for its end. Meanwhile, `liveness` shows whether the peer still exists.

A connection that is closed while it holds unread data drops its unsent data. So a rank that leaves
tells each peer on the connection itself, behind all sent data, and closes after the peer's answer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistError, ProcessGroupGloo

from phalanx import env_hosts
from phalanx.errors import UsageError
from phalanx.system.polling import attempts
from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.liveness import Liveness, Probe
from phalanx.transports.shutdown_hooks import inside_a_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["GlooTransport"]

_gloo: Any = ProcessGroupGloo  # its type stub is incomplete
# Never reached: limits are those of the waits for a transfer.
_FOR_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_ABORT_TAG = 2**31 - 1
_PARTING_TAG = 2**31 - 3
_LEAVES, _GOES = 1, 2
_PARTING_SECONDS = 2.0
_CONNECTING_SECONDS = 0.5
"""Seconds within which a connection that both ranks want is made, unless one stopped or died."""
_WANTS = "{}/wants/{}"
"""Key set in the store by a rank that has a transfer to post to a peer."""
_ALIVE = "{}/alive"
"""Key with the `Liveness.at` of a rank; empty once the rank has left."""
_LONGEST_PAUSE = 0.1
"""Most seconds between two checks whether a peer wants this rank."""
_ABORTED = "this rank has closed its connections"


class _Waiters:
    """A pool of threads that wait inside Gloo, one for each concurrent wait."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def start(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="phalanx-gloo", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)

    def stop(self, seconds: float) -> None:
        """End the threads after their waits; block for up to `seconds`.

        A thread that returns from Gloo to an ending interpreter would abort the process.
        """
        with self._lock:
            threads = list(self._threads)
            for _ in threads:
                self._calls.put(None)
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with inside_a_library():
                call()
            del call
            with self._lock:
                self._idle += 1


class _GlooTransfer(Transfer):
    def __init__(self, peer: int, waiters: _Waiters) -> None:
        self.peer = peer
        self._waiters = waiters
        self._lock = threading.Lock()
        self._work: Any = None
        self._wanted = False
        self._ended = threading.Event()
        self._error: TransportError | None = None
        self._call: Callable[[], None] | None = None

    def begin(self, work: Any) -> None:
        """Set the work object that Gloo returned for this transfer."""
        with self._lock:
            self._work = work
            wanted = self._wanted
        if wanted:
            self._waiters.start(self._wait)

    def fail(self, error: TransportError) -> None:
        """End the transfer with an error."""
        self._end(error)

    def wait(self, seconds: float) -> bool:
        self._want()
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._call = call
            over = self._ended.is_set()
        if over:
            self._waiters.start(self._tell)
        self._want()

    def _want(self) -> None:
        """Start a thread that waits for the transfer, once it has begun."""
        with self._lock:
            start = not self._wanted and self._work is not None
            self._wanted = True
        if start:
            self._waiters.start(self._wait)

    def _wait(self) -> None:
        with self._lock:
            work = self._work
        if work is None:  # the transfer has failed meanwhile
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._end(TransportError(self.peer, _reason(error)))
        else:
            self._end(None)

    def _end(self, error: TransportError | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error, self._work = error, None
            self._ended.set()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            call, self._call = self._call, None
        if call is not None:
            call()


class _Posts:
    """The connection state of one peer, with the posts that wait for the connection, in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connected = False
        self.wanted = False
        """True once a transfer was posted to the peer."""
        self.entered = False
        """True once Gloo is making the connection or has made it."""
        self.waiting: deque[tuple[Callable[[], Any], _GlooTransfer]] = deque()
        self.lost = ""
        """The reason why there will be no connection; empty if there may be one."""
        self.settled = threading.Event()
        """Set when the connection is made or has failed."""
        self.may_go = threading.Event()
        """Set when the peer has received all sent data, or is gone."""


class GlooTransport(Transport):
    """A rank's end of Gloo; see `open_transport` for the arguments."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        _check_advertised()
        options = _gloo._Options()
        options._timeout = _FOR_EVER
        options._threads = 1
        try:
            device = _gloo.create_device(hostname=address, lazy_init=True)
            options._devices = [device]
            self._group: Any = _gloo(store, rank, size, options)
            self._liveness = Liveness(address)
        except (OSError, RuntimeError) as error:
            raise TransportError(-1, f"Gloo can't listen on {address}: {_reason(error)}") from None
        self._store, self._rank = store, rank
        self._waiters = _Waiters()
        self._posts = [_Posts() for _ in range(size)]
        self._said: list[object] = []  # buffers that Gloo may still read
        self._aborted = False
        store.set(_ALIVE.format(rank), self._liveness.at)

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("send", data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("recv", data, peer, tag)

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._await_connections(time.monotonic() + _CONNECTING_SECONDS)
        # One time-out closes all connections, but a receive on a closed one does not time out.
        for peer in [peer for peer, posts in enumerate(self._posts) if posts.connected]:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_AT_ONCE)
        for posts in self._posts:
            self._fail(posts, -1, _ABORTED)
        self._liveness.close()

    def close(self) -> None:
        if not self._aborted:
            self._part()
            with contextlib.suppress(DistError, RuntimeError):
                self._store.set(_ALIVE.format(self._rank), "")
        self.abort()  # otherwise an unanswered receive would keep the connections open
        self._waiters.stop(_PARTING_SECONDS)
        self._group = None

    def _post(self, name: str, data: memoryview, peer: int, tag: int) -> Transfer:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        transfer, posts = _GlooTransfer(peer, self._waiters), self._posts[peer]
        with posts.lock:
            group = self._group
            if self._aborted or group is None:
                raise TransportError(peer, _ABORTED)
            if posts.lost:
                raise TransportError(peer, posts.lost)
            post = partial(getattr(group, name), [tensor], peer, tag)
            if posts.connected:
                self._begin(post, transfer)
            else:
                posts.waiting.append((post, transfer))
                if not posts.wanted:
                    posts.wanted = True
                    self._waiters.start(lambda: self._connect(posts, peer))
        return transfer

    def _connect(self, posts: _Posts, peer: int) -> None:
        """Connect with a peer when it wants this rank too, and post the waiting transfers.

        Then serve the connection's leave protocol until the connection is closed.
        """
        word = torch.zeros(1, dtype=torch.uint8)
        try:
            if not self._await_peer(peer):
                return
            with posts.lock:
                if self._aborted:
                    return
                posts.entered = True
            parting = self._group.recv([word], peer, _PARTING_TAG)
        except (AttributeError, DistError, RuntimeError) as error:
            with posts.lock:
                posts.lost = _reason(error)
            self._fail(posts, peer, posts.lost)
            posts.settled.set()
            return
        with posts.lock:
            posts.connected = True
            while posts.waiting and not self._aborted:
                self._begin(*posts.waiting.popleft())
            posts.settled.set()
        self._answer(posts, peer, word, parting)

    def _await_peer(self, peer: int) -> bool:
        """Block until the peer wants this rank; return False if the transport is aborted before.

        Raises:
            RuntimeError: The peer has left, or its process has ended.
        """
        self._store.set(_WANTS.format(self._rank, peer), "")
        probe: Probe | None = None
        try:
            for _ in attempts(longest=_LONGEST_PAUSE):
                if self._aborted:
                    break
                if self._store.check([_WANTS.format(peer, self._rank)]):
                    self._alive(peer)
                    return True
                if probe is None and self._store.check([_ALIVE.format(peer)]):
                    probe = Probe(self._alive(peer))
                if probe is not None and (reason := probe.ended()):
                    self._alive(peer)
                    raise RuntimeError(reason)
        finally:
            if probe is not None:
                probe.close()
        return False

    def _alive(self, peer: int) -> str:
        """Return the peer's `Liveness.at`.

        Raises:
            RuntimeError: The peer has left.
        """
        if at := self._store.get(_ALIVE.format(peer)).decode():
            return str(at)
        raise RuntimeError("it has left")

    def _await_connections(self, end: float) -> None:
        """Block until no connection is being made, or until `end` on the monotonic clock."""
        for posts in self._posts:
            with posts.lock:
                entered = posts.entered
            if entered:
                posts.settled.wait(max(0.0, end - time.monotonic()))

    @staticmethod
    def _fail(posts: _Posts, peer: int, reason: str) -> None:
        """Fail the transfers that wait for a connection."""
        with posts.lock:
            waiting = list(posts.waiting)
            posts.waiting.clear()
        for _, transfer in waiting:
            transfer.fail(TransportError(peer, reason))

    def _part(self) -> None:
        """Wait, for 2 s at most, until all peers have received the data sent to them.

        This includes peers that do not want this rank yet.
        """
        end = time.monotonic() + _PARTING_SECONDS
        for posts in self._posts:
            if posts.wanted:
                posts.settled.wait(max(0.0, end - time.monotonic()))
        connected = [(peer, posts) for peer, posts in enumerate(self._posts) if posts.connected]
        for peer, _ in connected:
            self._say(peer, _LEAVES)
        for _, posts in connected:
            posts.may_go.wait(max(0.0, end - time.monotonic()))

    def _answer(self, posts: _Posts, peer: int, word: torch.Tensor, parting: Any) -> None:
        """Answer a leaving peer, and receive its answers, until the connection is closed."""
        try:
            while True:
                parting.wait()
                if word.item() == _LEAVES:
                    self._say(peer, _GOES)
                else:
                    posts.may_go.set()
                parting = self._group.recv([word], peer, _PARTING_TAG)
        except (AttributeError, RuntimeError):  # closed, here or by the peer
            posts.may_go.set()

    def _say(self, peer: int, word: int) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            said = torch.tensor([word], dtype=torch.uint8)
            self._said.append((said, self._group.send([said], peer, _PARTING_TAG)))

    @staticmethod
    def _begin(post: Callable[[], Any], transfer: _GlooTransfer) -> None:
        try:
            transfer.begin(post())
        except RuntimeError as error:
            transfer.fail(TransportError(transfer.peer, _reason(error)))


def _check_advertised() -> None:
    """Check that no advertised address is set.

    Gloo gives its listening address to peers, and decides by these addresses which side connects.

    Raises:
        UsageError: An advertised address is set, or it is malformed.
    """
    try:
        host, _ = env_hosts.advertised_address()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if host:
        raise UsageError(
            "PHALANX_ADVERTISE_ADDR is set, but gloo is for hosts that reach each other at their "
            "own addresses: use the transport relay (PHALANX_TRANSPORT=relay), or unset it"
        )


def _reason(error: Exception) -> str:
    """Return Gloo's error message without its source location."""
    text = str(error).partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
