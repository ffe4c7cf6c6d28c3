"""This worker: its sockets, its threads, and what it does with each message that comes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc import seam
from phalanx.rpc.arena import Copies
from phalanx.rpc.asked import Asked
from phalanx.rpc.door import PATIENCE, connect
from phalanx.rpc.executing import execute, without_frames
from phalanx.rpc.freight import Freight, Unreadable
from phalanx.rpc.mapped import Late
from phalanx.rpc.near import Stream
from phalanx.rpc.peer import Peer, Pending
from phalanx.rpc.reactor import Reactor
from phalanx.rpc.reception import Reception
from phalanx.rpc.telling import Telling
from phalanx.rpc.values import Change, Hold, Name, Values
from phalanx.rpc.wire import Kind, Malformed, Message, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.arena import Arena
    from phalanx.rpc.far import Far, Outbox
    from phalanx.rpc.freight import Frames
    from phalanx.rpc.wire import Row
    from phalanx.rpc.workers import WorkerInfo

__all__ = ["Agent"]

_LOG = logging.getLogger("phalanx.rpc")

_LEAVE_SECONDS = 1.0
_CALLS = frozenset((Kind.CALL, Kind.REMOTE, Kind.FETCH))


class Agent:
    """One per process, from `init_rpc` to `shutdown`.

    Args:
        info: This worker.
        timeout: Seconds that a call may take, unless it says otherwise; 0: any.
        arena: What it sends tensors from.
        key: The job's.
        address: Where it listens for workers of this host.
    """

    def __init__(
        self, info: WorkerInfo, timeout: float, arena: Arena, key: bytes, address: str
    ) -> None:
        self.info, self.id, self.timeout = info, info.id, timeout
        self.arena, self._key = arena, key
        self.peers: list[Peer] = []
        self.by_name: dict[str, Peer] = {}
        self.values = Values()
        self.arrivals: Callable[..., None] | None = None
        """What worker 0 does when one arrives: `Gathering.arrived`."""
        self.on_lost: Callable[[str], None] | None = None
        """What worker 0 does when another one is lost."""
        self.over = False
        self.patience = PATIENCE
        """Seconds that a worker of this host may take to answer who connects."""
        self.activity = 0
        """How many calls were made and executed."""
        self._far: Far | None = None
        self._calls, self._numbers = itertools.count(1), itertools.count()
        self._activity_lock = threading.Lock()
        self._reactor = Reactor(self._expired, self._is_pending, self._woken)
        self.hand_over = self._reactor.crew.hand_over
        self._telling = Telling(self._reactor.wake, self.count, self._give_back)
        self.freight = Freight(arena, self._telling.unmapped, self._unread)
        self._reception = Reception(info.name, key, address, self._reactor, self._execute)

    # ---- beginning and end ----

    def listen(self, host: str) -> str:
        """Listen for workers of other hosts too, before the start; returns the whole address."""
        from phalanx.rpc.far import Far

        self._far = Far(self._key, host)
        return self._far.inbox.address

    def start(self, peers: list[Peer]) -> None:
        """Begin to execute what others ask for."""
        self.peers, self.by_name = peers, {peer.info.name: peer for peer in peers}
        self._reception.open(len(peers), None if self._far is None else self._far.inbox)
        for peer in peers:
            if peer.is_near:
                self._reactor.watch(peer.process, partial(self._died, peer))
            else:
                self._outbox(peer)  # its end is how the worker's is noticed
        self._reactor.start()

    def close(self, graceful: bool) -> None:
        """Leave: pending calls fail, and what was sent goes out if it can within two seconds."""
        if not graceful:
            for peer in self.peers:
                if not peer.lost and peer.id != self.id:
                    with contextlib.suppress(PhalanxError):  # it hears nothing, and sees this end
                        leave = self.freight.plain(Kind.LEAVE, self.id)
                        self._post(peer, leave, time.monotonic() + _LEAVE_SECONDS)
        self.over = True
        self._reactor.stop()
        for peer in self.peers:
            self._fail(peer, PhalanxError("this worker has left RPC"))
            peer.close()
        self.values.clear()
        self._reception.close()
        if self._far is not None:
            self._far.close()
        self._reactor.close()
        self.arena.close()

    # ---- calls ----

    def peer(self, to: object) -> Peer:
        """The worker of that name or id.

        Raises:
            UsageError: There is none.
        """
        to = getattr(to, "id", to)
        if isinstance(to, str) and to in self.by_name:
            return self.by_name[to]
        if isinstance(to, int) and 0 <= to < len(self.peers):
            return self.peers[to]
        names = ", ".join(repr(name) for name in self.by_name)
        raise UsageError(f"no worker is called {to!r}: expected one of {names}")

    def root(self) -> int:
        """On whose behalf this thread works."""
        root = seam.behalf.root
        return self.id if root is None else root

    def number(self) -> int:
        """A new one, for the name of a value."""
        return next(self._numbers)

    def ask(self, peer: Peer, kind: Kind, what: object, said: str, timeout: float) -> Any:
        """Make a call and wait for its answer, in this thread alone.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: The answer isn't there after `timeout` seconds.
        """
        return self.begin(peer, kind, what, said, timeout).wait()

    def begin(self, peer: Peer, kind: Kind, what: object, said: str, timeout: float) -> Asked:
        """Make a call whose answer this thread will wait for.

        Cheaper than `post`: no other thread hears of the answer. Several may be under way.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: It doesn't read for so long.
        """
        peer.check()
        end = time.monotonic() + (timeout or math.inf)
        call, root = next(self._calls), self.root()
        try:
            line = peer.line(self._key, self._far, end, self.patience)
        except OSError:
            raise self.how_lost(peer, said) from None
        except PhalanxError as error:
            raise _not_connected(said, peer, error) from None
        try:
            later = Copies(self.arena)
            frames = self.freight.load(kind, peer, self.id, root, call, what, said, later=later)
        except BaseException:
            peer.give_back(line)
            raise
        self._active(kind)
        try:
            with later:
                line.send(*frames, end)
        except BaseException as error:
            line.close()  # a part of the message may be out
            if isinstance(error, TimeoutError):
                raise CallTimeout(
                    f"{said} took longer than {timeout:g} s: {peer} doesn't read: is it stopped?"
                ) from None
            if isinstance(error, OSError):
                raise self.how_lost(peer, said) from None
            raise
        return Asked(self, peer, line, call, said, timeout, what)

    def how_lost(self, peer: Peer, said: str) -> PhalanxError:
        """The error for a call whose answer will never come."""
        if self.over:
            return PhalanxError(f"this worker has left RPC, while it waited for {said}")
        return PeerLost(f"{peer.lose(peer.how_lost())}, while this worker waited for {said}")

    def post(
        self,
        peer: Peer,
        kind: Kind,
        what: object,
        said: str,
        timeout: float,
        extra: int = 0,
    ) -> torch.futures.Future[Any]:
        """Make a call, and return at once what its answer will be in."""
        peer.check()
        end = time.monotonic() + (timeout or math.inf)
        try:
            self._outbox(peer, end)
        except OSError:  # sending finds out
            pass
        except PhalanxError as error:
            raise _not_connected(said, peer, error) from None
        call, root = next(self._calls), self.root()
        later = Copies(self.arena)
        frames = self.freight.load(kind, peer, self.id, root, call, what, said, extra, later)
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._active(kind)
        peer.pending[call] = Pending(future, root, said, what, torch.is_grad_enabled(), end)
        if timeout:
            self._reactor.expect(end, peer.id, call)
        with later:
            self._post(peer, frames, end)
        if peer.lost:
            self._fail(peer, PeerLost(peer.lost))
        return future

    @property
    def outstanding(self) -> int:
        """How many calls have no answer yet, or are being executed."""
        return sum(len(peer.pending) for peer in self.peers) + self._reactor.crew.at_work

    def _active(self, kind: Kind) -> None:
        if kind in _CALLS:
            with self._activity_lock:
                self.activity += 1

    # ---- references ----

    def count(self, owner: int, change: Change) -> None:
        """Tell the owner of a value of references that came or went."""
        if owner == self.id:
            self.values.count(change)
        elif not self.peers[owner].lost:
            self._post(self.peers[owner], self.freight.plain(Kind.COUNT, self.id, change))

    def hold(self, name: Name, owner: int) -> Hold:
        """A reference of this worker to a value, which its owner has counted, or hears of."""
        return Hold(name, owner, self.id, self._telling.ended)

    def _woken(self) -> Callable[[], None] | None:
        return self._telling.work()

    def _give_back(self, owner: int, blocks: list[tuple[int, int]]) -> None:
        self._post(self.peers[owner], self.freight.plain(Kind.RETURN, self.id, blocks))

    # ---- what comes in ----

    def _execute(self, message: Message, answer: Callable[[Frames], None]) -> None:
        self._active(message.kind)
        with seam.on_behalf_of(message.root):
            peer = self.peers[message.source]
            execute(self, self.freight, message, peer, answer)

    # ---- what goes out ----

    def _outbox(self, peer: Peer, end: float = math.inf) -> Stream | Outbox:
        with peer.lock:
            if peer.outbox is None:
                if self._far is None or peer.is_near:
                    peer.outbox = stream = connect(self._key, peer.address, end)
                    self._reactor.watch(stream.descriptor, partial(self._read, peer, stream))
                else:
                    from phalanx.rpc.far import Outbox

                    peer.outbox = box = Outbox(self._far, peer.address)
                    ended = partial(self._disconnected, peer, box)
                    self._reactor.watch(box.monitor_descriptor, ended)
                    self._reactor.watch(box.descriptor, partial(self._drain, peer, box))
            return peer.outbox

    def _post(self, peer: Peer, frames: Frames, end: float = math.inf) -> None:
        """Send; if that can't be done any more, who is lost is noticed elsewhere.

        It doesn't wait for who doesn't read; `end` is when to give up connecting.
        """
        try:
            box = self._outbox(peer, end)
            if isinstance(box, Stream):
                if box.post(frames[0]):
                    self._reactor.do(partial(self._flush, peer, box))
                return
            answers = box.send(*frames)
        except OSError:
            self.lose(peer, peer.how_lost())
            return
        if answers:
            self._reactor.do(*(partial(self._answered, peer, each) for each in answers))

    def _flush(self, peer: Peer, stream: Stream) -> None:
        try:
            stream.flush()
        except OSError:
            if not self.over:
                self.lose(peer, peer.how_lost())

    def _read(self, peer: Peer, stream: Stream) -> None:
        messages = stream.read()
        if messages is None:
            self._reactor.unwatch(stream.descriptor)
            self._reactor.do(lambda: self.lose(peer, peer.how_lost()))
        else:
            self._reactor.do(*(partial(self._answered, peer, (each, [])) for each in messages))

    def _drain(self, peer: Peer, box: Outbox) -> None:
        self._reactor.do(*(partial(self._answered, peer, each) for each in box.receive()))

    def _answered(self, peer: Peer, frames: Frames) -> None:
        message = self.parsed(frames)
        if message is None:
            return
        pending = peer.pending.pop(message.call, None)
        if pending is None:
            self.drop(message, peer)
            return
        with seam.on_behalf_of(pending.root), torch.set_grad_enabled(pending.grad):
            try:
                value = self._unloaded(message, peer, pending)
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
                pending.future.set_exception(without_frames(error))
            else:
                pending.future.set_result(value)

    def _unloaded(self, message: Message, peer: Peer, pending: Pending) -> Any:
        try:
            tensors = self.taken(message, peer, pending.what, pending.end)
        except Late:
            raise _expired(pending) from None
        return self.freight.unpack(message, peer, tensors)

    def taken(self, message: Message, peer: Peer, said: str, end: float) -> list[torch.Tensor]:
        """The tensors of an answer, as `Freight.take` says.

        Raises:
            PeerLost: Who sent them has died before they were read.
        """
        try:
            return self.freight.take(message, peer, end)
        except Unreadable:
            if peer.died_now():
                raise self.how_lost(peer, said) from None
            raise

    def _unread(self, peer: Peer, rows: list[Row]) -> None:
        """Let go of what an answer that came too late holds, once it is written."""
        self._reactor.do(partial(self.freight.let_go, peer, rows))

    def parsed(self, frames: Frames) -> Message | None:
        """A message; None, once it is logged, if it is none."""
        try:
            return parse(*frames, len(self.peers))
        except Malformed as error:
            self._reception.strange(error)
            return None

    def drop(self, message: Message, peer: Peer) -> None:
        """Nobody waits for this answer any more: let go of what it holds."""
        if message.rows:  # which may be waited for
            self._reactor.do(partial(self._drop, message, peer))
        else:
            self._drop(message, peer)

    def _drop(self, message: Message, peer: Peer) -> None:
        try:
            self.freight.unload(message, peer)
        except BaseException:  # noqa: BLE001 - nobody wants to know
            _LOG.debug("an answer that came too late", exc_info=True)

    def _is_pending(self, peer: int, call: int) -> bool:
        return call in self.peers[peer].pending

    def _expired(self, peer: int, call: int) -> None:
        if (pending := self.peers[peer].pending.pop(call, None)) is not None:
            self._reactor.do(partial(pending.future.set_exception, _expired(pending)))

    # ---- death ----

    def _died(self, peer: Peer) -> None:
        self._reactor.unwatch(peer.process)
        # That it leaves it may have said before: what can be read now is work that comes before.
        mourn = partial(self.lose, peer, f"{peer} has died")
        self._reactor.do(partial(self._reactor.do, mourn))

    def _disconnected(self, peer: Peer, box: Outbox) -> None:
        if box.mishap():
            self._reactor.do(lambda: self.lose(peer, peer.how_lost()))

    def lose(self, peer: Peer, words: str) -> None:
        """A worker is lost: pending and later calls say so."""
        words = peer.lose(words)
        self._reactor.do(partial(self._mourn, peer, words))

    def _mourn(self, peer: Peer, words: str) -> None:
        self._fail(peer, PeerLost(words))
        self.arena.forget(peer.id)
        self.freight.forget(peer.id)
        self.values.forget(peer.id)
        if self.on_lost is not None:
            self.on_lost(words)
        seam.lost(peer.id, words)

    def _fail(self, peer: Peer, error: PhalanxError) -> None:
        while peer.pending:
            try:
                _, pending = peer.pending.popitem()
            except KeyError:
                return
            words = f"{error}, while this worker waited for {pending.what}"
            pending.future.set_exception(type(error)(words))


def _expired(pending: Pending) -> CallTimeout:
    return CallTimeout(f"{pending.what} took longer than its timeout")


def _not_connected(said: str, peer: Peer, error: PhalanxError) -> PhalanxError:
    return type(error)(f"{said}: {peer} can't be connected to: {error}")
