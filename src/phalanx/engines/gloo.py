"""Gloo, as it comes with PyTorch: TCP between any two ranks.

Gloo has no way to look whether something has ended, and a wait of it that times out closes all of
the process's connections. So threads wait, as long as it takes, for those who wait with a limit;
and such a time-out is how an engine is aborted: peers find their connections closed. Connections
are made with what is first posted to a peer, in a thread too: that peer may never answer.

A connection that is closed while something unread has come to it drops what it has not yet sent. So
who leaves says so to each peer on the connection itself, behind all that it has sent, and closes
when the peer has answered.
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
from phalanx.engines.ending import inside_a_library
from phalanx.engines.interface import Engine, EngineError, Transfer
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["GlooEngine"]

_gloo: Any = ProcessGroupGloo  # whose stub is not all of it
# Nobody waits so long: limits are those of the waits for a transfer.
_FOR_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_ABORT_TAG = 2**31 - 1
_PARTING_TAG = 2**31 - 3
_LEAVES, _GOES = 1, 2
_PARTING_SECONDS = 2.0
_HERE = "here/{}"
"""Set in the store by a rank whose address can be read there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks for a peer that isn't here yet."""
_ABORTED = "this rank has closed its connections"


class _Waiters:
    """Threads that wait inside of Gloo: as many as wait at once."""

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
        """End them, when all waits have: one that comes back to an interpreter that ends aborts."""
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
        self._error: EngineError | None = None
        self._call: Callable[[], None] | None = None

    def begin(self, work: Any) -> None:
        """Gloo has taken it."""
        with self._lock:
            self._work = work
            wanted = self._wanted
        if wanted:
            self._waiters.start(self._wait)

    def fail(self, error: EngineError) -> None:
        """Gloo will not do it, or not to its end."""
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
        """Have a thread wait for it, once it has begun."""
        with self._lock:
            start = not self._wanted and self._work is not None
            self._wanted = True
        if start:
            self._waiters.start(self._wait)

    def _wait(self) -> None:
        with self._lock:
            work = self._work
        if work is None:  # it has failed meanwhile
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._end(EngineError(self.peer, _reason(error)))
        else:
            self._end(None)

    def _end(self, error: EngineError | None) -> None:
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
    """What is to be posted to one peer, in order: Gloo connects with the first, which may block."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connected = self.connecting = False
        self.waiting: deque[tuple[Callable[[], Any], _GlooTransfer]] = deque()
        self.lost = ""
        """Why there will be no connection."""
        self.settled = threading.Event()
        """There is one, or there won't be."""
        self.may_go = threading.Event()
        """The peer has all that was sent to it, or is gone."""


class GlooEngine(Engine):
    """One rank's end: see `open_engine` for the arguments."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        _check_advertised()
        options = _gloo._Options()
        options._timeout = _FOR_EVER
        options._threads = 1
        try:
            device = _gloo.create_device(hostname=address, lazy_init=True)
            options._devices = [device]
            self._group: Any = _gloo(store, rank, size, options)
        except RuntimeError as error:
            raise EngineError(-1, f"Gloo can't listen on {address}: {_reason(error)}") from None
        self._store = store
        store.set(_HERE.format(rank), "")
        self._waiters = _Waiters()
        self._posts = [_Posts() for _ in range(size)]
        self._said: list[object] = []  # which Gloo reads yet
        self._aborted = False

    def send(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("send", data, peer, tag)

    def recv(self, data: memoryview, peer: int, tag: int) -> Transfer:
        return self._post("recv", data, peer, tag)

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        # One time-out closes all connections; one that is closed already times nothing out.
        for peer in [peer for peer, posts in enumerate(self._posts) if posts.connected]:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_AT_ONCE)
        for posts in self._posts:
            with posts.lock:
                waiting = list(posts.waiting)
                posts.waiting.clear()
            for _, transfer in waiting:
                transfer.fail(EngineError(-1, _ABORTED))

    def close(self) -> None:
        if not self._aborted:
            self._part()
        self.abort()  # else a receive that nobody answers would hold the connections
        self._waiters.stop(_PARTING_SECONDS)
        self._group = None

    def _post(self, name: str, data: memoryview, peer: int, tag: int) -> Transfer:
        group = self._group
        if self._aborted or group is None:
            raise EngineError(peer, _ABORTED)
        how = getattr(group, name)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        transfer, posts = _GlooTransfer(peer, self._waiters), self._posts[peer]
        with posts.lock:
            if posts.lost:
                raise EngineError(peer, posts.lost)
            if posts.connected:
                self._begin(partial(how, [tensor], peer, tag), transfer)
            else:
                posts.waiting.append((partial(how, [tensor], peer, tag), transfer))
                if not posts.connecting:
                    posts.connecting = True
                    self._waiters.start(lambda: self._connect(posts, peer))
        return transfer

    def _connect(self, posts: _Posts, peer: int) -> None:
        """Post what waits for a connection, which the first of it makes."""
        # Gloo would wait for the peer in the store, and let nobody else use either meanwhile.
        try:
            self._await(peer)
        except (DistError, RuntimeError) as error:
            self._lose(posts, f"the store can't say where it is: {_reason(error)}")
            return
        while True:
            with posts.lock:
                if not posts.waiting:
                    new = not posts.connected
                    posts.connected, posts.connecting = True, False
                    posts.settled.set()
                    if new:
                        self._waiters.start(lambda: self._answer(posts, peer))
                    return
                post, transfer = posts.waiting[0]
            self._begin(post, transfer)
            with posts.lock:
                if posts.waiting:  # else it was aborted meanwhile
                    posts.waiting.popleft()

    def _await(self, peer: int) -> None:
        pause = _FIRST_PAUSE
        while not self._aborted and not self._store.check([_HERE.format(peer)]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @staticmethod
    def _lose(posts: _Posts, reason: str) -> None:
        with posts.lock:
            posts.lost = reason
            posts.settled.set()
            waiting = list(posts.waiting)
            posts.waiting.clear()
        for _, transfer in waiting:
            transfer.fail(EngineError(transfer.peer, reason))

    def _part(self) -> None:
        """Let all peers have what was sent to them.

        Those too to which a connection is just being made: Gloo ends the process of a peer that is
        in the middle of that when this one closes (`ex_ == nullptr`, from a thread of its own).
        """
        end = time.monotonic() + _PARTING_SECONDS
        for posts in self._posts:
            if posts.connecting:
                posts.settled.wait(max(0.0, end - time.monotonic()))
        connected = [(peer, posts) for peer, posts in enumerate(self._posts) if posts.connected]
        for peer, _ in connected:
            self._say(peer, _LEAVES)
        for _, posts in connected:
            posts.may_go.wait(max(0.0, end - time.monotonic()))

    def _answer(self, posts: _Posts, peer: int) -> None:
        """Answer a peer that leaves, and hear its answer, as long as the connection is there."""
        try:
            while not self._aborted:
                word = torch.zeros(1, dtype=torch.uint8)
                self._group.recv([word], peer, _PARTING_TAG).wait()
                if word.item() == _LEAVES:
                    self._say(peer, _GOES)
                else:
                    posts.may_go.set()
        except (AttributeError, RuntimeError):  # it is closed, at one end or the other
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
            transfer.fail(EngineError(transfer.peer, _reason(error)))


def _check_advertised() -> None:
    """Gloo tells peers the address on which it listens, and by these decides who connects."""
    try:
        host, _ = env_hosts.advertised()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if host:
        raise UsageError(
            "PHALANX_ADVERTISE_ADDR is set, but gloo is for hosts that reach each other at their "
            "own addresses: use the engine relay (PHALANX_ENGINE=relay), or unset it"
        )


def _reason(error: Exception) -> str:
    """Gloo's words, without where in its source they stand."""
    text = str(error).partition("\n")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
