"""This worker: its connections, its calls, and the handling of answers and of lost workers.

`agent` returns the agent of this process, from `init_rpc` to `shutdown`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc.call_log import CallLog
from phalanx.rpc.codec.message import Frames, Kind, Malformed, Message, TensorDescriptor, parse
from phalanx.rpc.codec.pickling import set_autograd_hook
from phalanx.rpc.event_loop.reactor import Reactor
from phalanx.rpc.futures import CallFuture, PendingFuture
from phalanx.rpc.message_codec import MessageCodec, TensorsUnavailable
from phalanx.rpc.peer import Peer, notify_loss_listeners
from phalanx.rpc.reference_counting import (
    OwnedValues,
    RefCountDelta,
    ReleaseNotifier,
    RRefId,
    UserRRef,
)
from phalanx.rpc.server import RpcServer, clear_frames, get_root_worker, set_root_worker
from phalanx.rpc.shared_memory import CopyTimeout, DeferredCopies, ShmSender
from phalanx.rpc.transport.auth import HANDSHAKE_TIMEOUT, connect
from phalanx.rpc.transport.local import LocalConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.transport.remote import RemoteConnection, RemoteContext, RemoteDealer
    from phalanx.rpc.workers import WorkerInfo

__all__ = ["UNSET", "Agent", "PendingCall", "agent", "agent_or_none", "seconds", "set_agent"]

_LOG = logging.getLogger("phalanx.rpc")
_LEAVE_SECONDS = 1.0
_CALLS = frozenset((Kind.CALL, Kind.REMOTE, Kind.FETCH))
UNSET = -1.0
"""The timeout that stands for the one given to `init_rpc`."""
_agents: list[Agent] = []
_has_left = [False]
_parents: list[Agent] = []
"""Agents of processes that this one was forked from; nothing of theirs may be closed here."""


class Agent:
    """The RPC agent of a process, from `init_rpc` to `shutdown`.

    Args:
        info: The name and id of this worker.
        timeout: The default timeout of a call, in seconds; 0 means no limit.
        shm_sender: The shared memory from which tensors are sent.
        key: The key of the job.
        address: The address at which this worker listens for workers on its host.
    """

    def __init__(
        self, info: WorkerInfo, timeout: float, shm_sender: ShmSender, key: bytes, address: str
    ) -> None:
        self.info, self.id, self.timeout = info, info.id, timeout
        self.shm_sender, self._key = shm_sender, key
        self.peers: list[Peer] = []
        self.by_name: dict[str, Peer] = {}
        self.owned_values = OwnedValues()
        self.on_arrival: Callable[..., None] | None = None
        """On worker 0: called when a worker arrives (`WorkerBarrier.arrive`)."""
        self.on_lost: Callable[[str], None] | None = None
        """On worker 0: called with the reason when another worker is lost."""
        self.is_closed = False
        self.handshake_timeout = HANDSHAKE_TIMEOUT
        """Seconds that a worker on this host may take to answer a new connection."""
        self.activity = 0
        """The number of calls made and executed."""
        self._remote: RemoteContext | None = None
        self.call_log = CallLog()
        self._calls, self._local_ids = itertools.count(1), itertools.count()
        self._activity_lock = threading.Lock()
        self._reactor = Reactor(self._on_deadline, self._is_pending, self._on_wake)
        self.promote_follower = self._reactor.threads.promote_follower
        self._notifier = ReleaseNotifier(self._reactor.wake, self.send_ref_count, self._free_blocks)
        self.codec = MessageCodec(shm_sender, self._notifier.queue_unmapped, self._discard_unread)
        self._server = RpcServer(self, key, address, self._reactor)

    # ---- startup and shutdown ----

    def listen(self, host: str) -> str:
        """Listen for workers on other hosts too, before `start`; return the full address."""
        from phalanx.rpc.transport.remote import RemoteContext

        self._remote = RemoteContext(self._key, host)
        return self._remote.router.address

    def start(self, peers: list[Peer]) -> None:
        """Start to execute the requests of other workers."""
        self.peers, self.by_name = peers, {peer.info.name: peer for peer in peers}
        self._server.open(None if self._remote is None else self._remote.router)
        for peer in peers:
            if peer.is_local:
                self._reactor.watch(peer.pidfd, partial(self._on_death, peer))
            else:
                self._connect(peer)  # when it ends, the worker is lost
        self._reactor.start()
        self.call_log.start(self.info, peers)

    def close(self, graceful: bool) -> None:
        """Leave RPC: pending calls fail, and sent messages have two seconds to go out."""
        if not graceful:
            for peer in self.peers:
                if not peer.loss_reason and peer.id != self.id:
                    with contextlib.suppress(PhalanxError):  # it notices this process's end
                        leave = self.codec.encode_plain(Kind.LEAVE, self.id)
                        self._send(peer, leave, time.monotonic() + _LEAVE_SECONDS)
        self.is_closed = True
        self.call_log.close()
        self._reactor.stop()
        for peer in self.peers:
            self._fail_pending(peer, PhalanxError("this worker has left RPC"))
            peer.close()
        self.owned_values.clear()
        self._server.close()
        if self._remote is not None:
            self._remote.close()
        self._reactor.close()
        self.shm_sender.close()

    # ---- calls ----

    def peer(self, to: object) -> Peer:
        """Return the worker with that name or id.

        Raises:
            UsageError: There is no such worker.
        """
        to = getattr(to, "id", to)
        if isinstance(to, str) and to in self.by_name:
            return self.by_name[to]
        if isinstance(to, int) and 0 <= to < len(self.peers):
            return self.peers[to]
        names = ", ".join(repr(name) for name in self.by_name)
        raise UsageError(f"could not find destination {to!r}: the workers are {names}")

    def root_worker(self) -> int:
        """Return the id of the worker on whose behalf this thread works."""
        root = get_root_worker()
        return self.id if root is None else root

    def next_local_id(self) -> int:
        """Return a new number for the id of a value."""
        return next(self._local_ids)

    def call(self, peer: Peer, kind: Kind, body: object, description: str, timeout: float) -> Any:
        """Make a call and wait for its answer in this thread.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: There is no answer after `timeout` seconds.
        """
        return self.begin(peer, kind, body, description, timeout).wait()

    def begin(
        self, peer: Peer, kind: Kind, body: object, description: str, timeout: float
    ) -> PendingCall:
        """Make a call whose answer this thread will wait for.

        Cheaper than `call_async`, since no other thread handles the answer. Several may be pending.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: The worker does not read the message within `timeout` seconds.
        """
        peer.check()
        end = time.monotonic() + (timeout or math.inf)
        call, root = next(self._calls), self.root_worker()
        try:
            connection = peer.take_connection(self._key, self._remote, end, self.handshake_timeout)
        except OSError:
            raise self.loss_error(peer, description) from None
        except PhalanxError as error:
            raise peer.connection_error(description, error) from None
        try:
            copies = DeferredCopies()
            frames = self.codec.encode(
                kind, peer, self.id, root, call, body, description, copies=copies
            )
        except BaseException:
            peer.return_connection(connection)
            raise
        self.count_activity(kind)
        try:
            with copies:
                connection.send(*frames, end)
        except BaseException as error:
            connection.close()  # part of the message may have been sent
            if isinstance(error, TimeoutError):
                raise CallTimeout(
                    f"{description} took longer than {timeout:g} s: {peer} does not read: "
                    "is it stopped?"
                ) from None
            if isinstance(error, OSError):
                raise self.loss_error(peer, description) from None
            raise
        if kind in _CALLS:
            self.call_log.outgoing[call] = peer.id, description, time.monotonic()
        return PendingCall(self, peer, connection, call, description, timeout, body)

    def loss_error(self, peer: Peer, description: str) -> PhalanxError:
        """Return the error for a call that will never be answered."""
        if self.is_closed:
            return PhalanxError(f"this worker left RPC while it waited for {description}")
        reason = peer.mark_lost(peer.find_loss_reason())
        return PeerLost(f"{reason} while this worker waited for {description}")

    def call_async(
        self, peer: Peer, kind: Kind, body: object, description: str, timeout: float, extra: int = 0
    ) -> CallFuture:
        """Make a call and return its future, which gets all errors except those of packing."""
        now = time.monotonic()
        end = now + (timeout or math.inf)
        future = CallFuture()
        try:
            peer.check()
            self._connect(peer, end)
        except OSError:  # sending detects it
            pass
        except PhalanxError as error:
            future.is_sent = False
            future.set_exception(
                error if peer.loss_reason else peer.connection_error(description, error)
            )
            return future
        call, root = next(self._calls), self.root_worker()
        copies = DeferredCopies()
        frames = self.codec.encode(
            kind, peer, self.id, root, call, body, description, extra, copies
        )
        self.count_activity(kind)
        peer.pending[call] = PendingFuture(
            future, root, description, body, torch.is_grad_enabled(), end, now
        )
        if timeout:
            self._reactor.add_deadline(end, peer.id, call)
        with copies:
            self._send(peer, frames, end)
        if peer.loss_reason:
            self._fail_pending(peer, PeerLost(peer.loss_reason))
        return future

    @property
    def outstanding(self) -> int:
        """The number of calls that have no answer yet or are being executed."""
        return sum(len(peer.pending) for peer in self.peers) + self._reactor.threads.active_count

    def count_activity(self, kind: Kind) -> None:
        """Count a call that is made or executed; other kinds of messages are not counted."""
        if kind in _CALLS:
            with self._activity_lock:
                self.activity += 1

    # ---- references ----

    def send_ref_count(self, owner: int, delta: RefCountDelta) -> None:
        """Report new or ended references to the owner of a value."""
        if owner == self.id:
            self.owned_values.apply(delta)
        elif not self.peers[owner].loss_reason:
            self._send(self.peers[owner], self.codec.encode_plain(Kind.REF_COUNT, self.id, delta))

    def make_user_rref(self, rref_id: RRefId, owner: int, is_counted: bool = True) -> UserRRef:
        """Return a reference to a value; its end is reported to the owner if `is_counted`."""
        number = rref_id.local_id if owner == self.id else self.next_local_id()
        ended = self._notifier.queue_release if is_counted else lambda _owner, _delta: None
        return UserRRef(rref_id, owner, RRefId(self.id, number), ended)

    def _on_wake(self) -> Callable[[], None] | None:
        return self._notifier.take_work()

    def _free_blocks(self, owner: int, blocks: list[tuple[int, int]]) -> None:
        self._send(self.peers[owner], self.codec.encode_plain(Kind.FREE_BLOCKS, self.id, blocks))

    # ---- connections, messages and answers ----

    def _connect(self, peer: Peer, end: float = math.inf) -> LocalConnection | RemoteDealer:
        with peer.lock:
            if peer.async_connection is None:
                if self._remote is None or peer.is_local:
                    peer.async_connection = connection = connect(self._key, peer.address, end)
                    self._reactor.watch(connection.fd, partial(self._read, peer, connection))
                else:
                    from phalanx.rpc.transport.remote import RemoteDealer

                    peer.async_connection = dealer = RemoteDealer(self._remote, peer.address)
                    ended = partial(self._on_disconnect, peer, dealer)
                    self._reactor.watch(dealer.monitor_fd, ended)
                    self._reactor.watch(dealer.fd, partial(self._drain, peer, dealer))
            return peer.async_connection

    def _send(self, peer: Peer, frames: Frames, end: float = math.inf) -> None:
        """Send a message; a broken connection marks the peer as lost and raises nothing.

        Never blocks on a peer that does not read. `end` limits the time to connect.
        """
        try:
            connection = self._connect(peer, end)
            if isinstance(connection, LocalConnection):
                if connection.post(frames[0]):
                    self._reactor.submit(partial(self._flush, peer, connection))
                return
            answers = connection.send(*frames)
        except OSError:
            self.mark_lost(peer, peer.find_loss_reason())
            return
        if answers:
            self._reactor.submit(*(partial(self._on_answer, peer, each) for each in answers))

    def _flush(self, peer: Peer, connection: LocalConnection) -> None:
        try:
            connection.flush()
        except OSError:
            if not self.is_closed:
                self.mark_lost(peer, peer.find_loss_reason())

    def _read(self, peer: Peer, connection: LocalConnection) -> None:
        messages = connection.read()
        if messages is None:
            self._reactor.unwatch(connection.fd)
            self._reactor.submit(lambda: self.mark_lost(peer, peer.find_loss_reason()))
        else:
            self._reactor.submit(*(partial(self._on_answer, peer, (each, [])) for each in messages))

    def _drain(self, peer: Peer, dealer: RemoteDealer) -> None:
        self._reactor.submit(*(partial(self._on_answer, peer, each) for each in dealer.receive()))

    def _on_answer(self, peer: Peer, frames: Frames) -> None:
        message = self.parse(frames)
        if message is None:
            return
        pending = peer.pending.pop(message.call, None)
        if pending is None:
            self.drop(message, peer)
            return
        with set_root_worker(pending.root), torch.set_grad_enabled(pending.grad):
            try:
                value = self._decode_answer(message, peer, pending)
            except BaseException as error:  # noqa: BLE001 - the future raises it
                pending.future.set_exception(clear_frames(error))
            else:
                pending.future.set_result(value)

    def _decode_answer(self, message: Message, peer: Peer, pending: PendingFuture) -> Any:
        try:
            tensors = self.read_tensors(message, peer, pending.description, pending.end)
        except CopyTimeout:
            raise pending.timeout_error() from None
        return self.codec.deserialize(message, peer, tensors)

    def read_tensors(
        self, message: Message, peer: Peer, description: str, end: float
    ) -> list[torch.Tensor]:
        """Return the tensors of an answer; see `MessageCodec.read_tensors`.

        Raises:
            PeerLost: The sender died before the tensors were read.
        """
        try:
            return self.codec.read_tensors(message, peer, end)
        except TensorsUnavailable:
            if peer.is_dying():
                raise self.loss_error(peer, description) from None
            raise

    def _discard_unread(self, peer: Peer, descriptors: list[TensorDescriptor]) -> None:
        """End the leases of a late answer's tensors, once they are written."""
        self._reactor.submit(partial(self.codec.discard_tensors, peer, descriptors))

    def parse(self, frames: Frames) -> Message | None:
        """Return the parsed message; log a malformed one and return None."""
        try:
            return parse(*frames, len(self.peers))
        except Malformed as error:
            self._server.log_malformed(error)
            return None

    def drop(self, message: Message, peer: Peer) -> None:
        """Release the tensors of an answer that nobody waits for any more."""
        if message.descriptors:  # taking its tensors may block
            self._reactor.submit(partial(self._drop, message, peer))
        else:
            self._drop(message, peer)

    def _drop(self, message: Message, peer: Peer) -> None:
        try:
            self.codec.decode(message, peer)
        except BaseException:  # noqa: BLE001 - nobody waits for the answer
            _LOG.debug("a late answer", exc_info=True)

    def _is_pending(self, peer: int, call: int) -> bool:
        return call in self.peers[peer].pending

    def _on_deadline(self, peer: int, call: int) -> None:
        if (pending := self.peers[peer].pending.pop(call, None)) is not None:
            self._reactor.submit(partial(pending.future.set_exception, pending.timeout_error()))

    # ---- loss of workers ----

    def _on_death(self, peer: Peer) -> None:
        self._reactor.unwatch(peer.pidfd)
        # The peer may have announced that it leaves: messages that are readable now come first.
        handle_loss = partial(self.mark_lost, peer, f"{peer} died")
        self._reactor.submit(partial(self._reactor.submit, handle_loss))

    def _on_disconnect(self, peer: Peer, dealer: RemoteDealer) -> None:
        if dealer.has_event():
            self._reactor.submit(lambda: self.mark_lost(peer, peer.find_loss_reason()))

    def mark_lost(self, peer: Peer, reason: str) -> None:
        """Mark a worker as lost, so that pending and later calls fail with the reason."""
        reason = peer.mark_lost(reason)
        self._reactor.submit(partial(self._handle_loss, peer, reason))

    def _handle_loss(self, peer: Peer, reason: str) -> None:
        self._fail_pending(peer, PeerLost(reason))
        self.shm_sender.forget(peer.id)
        self.codec.forget(peer.id)
        self.owned_values.forget(peer.id)
        if self.on_lost is not None:
            self.on_lost(reason)
        notify_loss_listeners(peer.id, reason)

    def _fail_pending(self, peer: Peer, error: PhalanxError) -> None:
        while peer.pending:
            try:
                _, pending = peer.pending.popitem()
            except KeyError:
                return
            text = f"{error} while this worker waited for {pending.description}"
            pending.future.set_exception(type(error)(text))


class PendingCall:
    """A pending call.

    Args:
        own: The agent of this worker.
        peer: The callee.
        connection: The connection of the call; no other call uses it until the answer arrives.
        call: The number of the call.
        description: A description of the call, for messages.
        timeout: Seconds from now; 0 means no limit.
        keepalive: An object to keep alive until the answer arrives.
    """

    def __init__(
        self,
        own: Agent,
        peer: Peer,
        connection: LocalConnection | RemoteConnection,
        call: int,
        description: str,
        timeout: float,
        keepalive: object,
    ) -> None:
        self._own, self._peer, self._call, self._description = own, peer, call, description
        self._keepalive = keepalive
        self._timeout, self._end = timeout, time.monotonic() + (timeout or math.inf)
        self._connection: LocalConnection | RemoteConnection | None = connection

    def wait(self) -> Any:
        """Wait for the answer and return it.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: There is no answer in time.
            Exception: The exception that the function raised.
        """
        self._own.promote_follower()
        try:
            message = self._receive_answer()
        except TimeoutError:
            raise self._timeout_error() from None
        except OSError:
            message = None
        except BaseException:
            # Interrupted: part of a message may be lost, so the connection cannot be reused.
            connection, self._connection = self._connection, None
            self._own.call_log.outgoing.pop(self._call, None)
            if connection is not None:
                connection.close()
            raise
        finally:
            self._release_connection()
        if message is None:
            raise self._own.loss_error(self._peer, self._description)
        try:
            tensors = self._own.read_tensors(message, self._peer, self._description, self._end)
        except CopyTimeout:
            raise self._timeout_error() from None
        return self._own.codec.deserialize(message, self._peer, tensors)

    def _timeout_error(self) -> CallTimeout:
        return CallTimeout(f"{self._description} took longer than {self._timeout:g} s")

    def _receive_answer(self) -> Message | None:
        connection = self._connection
        while connection is not None and (frames := connection.receive(self._end)) is not None:
            message = self._own.parse(frames)
            if message is not None and message.call == self._call:
                return message
            if message is not None:
                self._own.drop(message, self._peer)
        return None

    def _release_connection(self) -> None:
        # The next user of the connection drops an answer that comes too late.
        connection, self._connection = self._connection, None
        if connection is not None:
            self._own.call_log.outgoing.pop(self._call, None)
            self._peer.return_connection(connection)

    def __del__(self) -> None:
        self._release_connection()


def agent() -> Agent:
    """Return the agent of this process.

    Raises:
        UsageError: There is no agent.
    """
    if not _agents:
        if _parents:
            raise UsageError(
                f"this process was forked by worker {_parents[-1].info.name!r} and is not a worker "
                "itself; make the calls in that worker"
            )
        raise UsageError(
            "RPC has not been initialized again since this process left it by shutdown()"
            if _has_left[0]
            else "RPC has not been initialized in this process. Current RPC agent is not set! Did "
            "you initialize the RPC framework by calling phalanx.rpc.init_rpc(name)?"
        )
    return _agents[0]


def agent_or_none() -> Agent | None:
    """Return the agent of this process, or None if there is none."""
    return _agents[0] if _agents else None


def set_agent(new: Agent | None) -> None:
    """Set the agent of this process; None removes it."""
    _has_left[0] = new is None
    _agents[:] = [] if new is None else [new]


def _forked() -> None:
    _parents.extend(_agents)
    _agents.clear()
    set_autograd_hook(None)


os.register_at_fork(after_in_child=_forked)


def seconds(timeout: float) -> float:
    """Return the timeout of a call in seconds; 0 means no limit.

    Raises:
        UsageError: The timeout is negative or not a number.
    """
    if timeout == UNSET:
        return agent().timeout
    given: object = timeout
    if not isinstance(given, int | float) or not given >= 0:
        raise UsageError(f"timeout={timeout!r}: expected seconds, or 0 for no limit")
    return float(timeout) if timeout != float("inf") else 0.0
