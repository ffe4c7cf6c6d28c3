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
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import CallTimeout, PeerLost, PhalanxError, UsageError
from phalanx.rpc.call_log import CallLog
from phalanx.rpc.codec import MessageCodec, TensorsUnavailable
from phalanx.rpc.event_loop import Reactor
from phalanx.rpc.functions import CallFuture
from phalanx.rpc.local_connection import HANDSHAKE_TIMEOUT, LocalConnection, connect
from phalanx.rpc.message import Frames, Kind, Malformed, Message, TensorDescriptor, parse
from phalanx.rpc.peer import Peer, Peers, PendingFuture
from phalanx.rpc.pickling import AutogradHook
from phalanx.rpc.reference_counting import (
    OwnedValues,
    RefCountDelta,
    ReleaseNotifier,
    clear_frames,
)
from phalanx.rpc.shared_memory import CopyTimeout, DeferredCopies, ShmSender
from phalanx.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from phalanx.rpc.remote_connection import RemoteConnection, RemoteContext, RemoteDealer

_LOG = logging.getLogger("phalanx.rpc")
_LEAVE_SECONDS = 1.0
_LOST_SECONDS = 10.0
"""Seconds after which no thread waits for a lost worker any more."""
_CALLS = frozenset((Kind.CALL, Kind.REMOTE, Kind.FETCH))
UNSET = -1.0
"""The timeout that stands for the one given to `init_rpc`."""


class Agent:
    """The RPC agent of a process, from `init_rpc` to `shutdown`.

    Args:
        info: The name and id of this worker.
        timeout: The default timeout of a call, in seconds; 0 means no limit.
        shm_sender: The shared memory from which tensors are sent.
        key: The key of the job.
        autograd_hook: The hook that tensors pass through.
    """

    def __init__(
        self,
        info: WorkerInfo,
        timeout: float,
        shm_sender: ShmSender,
        key: bytes,
        autograd_hook: AutogradHook,
    ) -> None:
        self.info, self.id, self.timeout = info, info.id, timeout
        self.shm_sender, self._key, self.autograd_hook = shm_sender, key, autograd_hook
        self.peers = Peers()
        self.owned_values = OwnedValues()
        self.loss_listeners: list[Callable[[int, str], None]] = []
        """Functions to call, in an RPC thread, with the id of each lost worker and the reason."""
        self.on_arrival: Callable[..., None] | None = None
        """On worker 0: called when a worker arrives (`WorkerBarrier.arrive`)."""
        self.store: Any = None
        """A store that all workers share, with entries of this group only."""
        self.publish_leave: Callable[[], None] | None = None
        """In a group without a fixed size: publishes that this worker has left."""
        self.on_close: list[Callable[[], None]] = []
        """Functions that `close` calls once nothing is executed any more."""
        self.is_closed = False
        self.handshake_timeout = HANDSHAKE_TIMEOUT
        """Seconds that a worker on this host may take to answer a new connection."""
        self.activity = 0
        """The number of calls made and executed."""
        self.remote: RemoteContext | None = None
        """The sockets for workers on other hosts, if there are any."""
        self.call_log = CallLog()
        self._calls = itertools.count(1)
        self.local_ids = itertools.count()
        """New numbers for the ids of values."""
        self._activity_lock = threading.Lock()
        self._has_dropped = False
        self.reactor = Reactor(self._on_deadline, self._take_deferred)
        self.promote_follower = self.reactor.threads.promote_follower
        self.notifier = ReleaseNotifier(self.reactor.wake)
        self.codec = MessageCodec(
            self.id, shm_sender, autograd_hook, self._return_unmapped, self._discard_unread
        )

    # ---- startup and shutdown ----

    def listen(self, host: str) -> str:
        """Listen for workers on other hosts too, before `start`; return the full address."""
        from phalanx.rpc.remote_connection import RemoteContext

        self.remote = RemoteContext(self._key, host)
        return self.remote.router.address

    def start(self, peers: list[Peer]) -> None:
        """Start to execute the requests of other workers."""
        for peer in peers:
            self.add_peer(peer)
        self.reactor.threads.start()
        self.call_log.start(self.info, self.peers)

    def add_peer(self, peer: Peer) -> None:
        """Add a worker and watch for its loss."""
        for old in self.peers:
            if old.lost_at < time.monotonic() - _LOST_SECONDS:
                self._release(old)
        self.peers.add(peer)
        if peer.loss_reason:
            return
        if peer.is_local:
            self.reactor.watch(peer.pidfd, partial(self._on_death, peer))
        else:
            self._connect(peer)  # when it ends, the worker is lost

    def _release(self, peer: Peer) -> None:
        """Close the descriptors of a worker that was lost so long ago that no thread polls them."""
        connection = peer.async_connection
        descriptors = [peer.pidfd, *(() if connection is None else connection.descriptors)]
        for descriptor in descriptors:
            self.reactor.unwatch(descriptor)
        peer.close()

    def close(self, graceful: bool) -> None:
        """Leave RPC: pending calls fail, and sent messages have two seconds to go out."""
        if not graceful:
            for peer in self.peers:
                if not peer.loss_reason and peer.id != self.id:
                    with contextlib.suppress(PhalanxError):  # it notices this process's end
                        leave = self.codec.encode_plain(Kind.LEAVE)
                        self._send(peer, leave, time.monotonic() + _LEAVE_SECONDS)
        self.is_closed = True
        self.call_log.close()
        self.reactor.stop()
        for peer in self.peers:
            self._fail_pending(peer, PhalanxError("this worker has left RPC"))
            peer.close()
        self.owned_values.clear()
        for close in self.on_close:
            close()
        if self.remote is not None:
            self.remote.close()
        self.reactor.close()
        self.shm_sender.close()
        self.autograd_hook.close()

    # ---- calls ----

    def peer(self, to: object) -> Peer:
        """Return the worker with that name or id.

        Raises:
            UsageError: There is no such worker.
        """
        to = getattr(to, "id", to)
        if isinstance(to, str | int) and (peer := self.peers.find(to)) is not None:
            return peer
        names = ", ".join(repr(peer.info.name) for peer in self.peers)
        raise UsageError(f"could not find destination {to!r}: the workers are {names}")

    def begin(
        self, peer: Peer, kind: Kind, body: object, description: str, timeout: float
    ) -> PendingCall:
        """Make a call whose answer this thread will wait for.

        Cheaper than `call_async`, since no other thread handles the answer. Several may be pending.

        Raises:
            PeerLost: The worker is dead or has left.
            CallTimeout: The worker does not read the message within `timeout` seconds.
        """
        peer.check(description)
        end = time.monotonic() + (timeout or math.inf)
        call = next(self._calls)
        try:
            connection = peer.take_connection(self._key, self.remote, end, self.handshake_timeout)
        except OSError:
            raise self.loss_error(peer, description) from None
        except PhalanxError as error:
            raise peer.connection_error(description, error) from None
        try:
            copies = DeferredCopies()
            frames = self.codec.encode(kind, peer, call, body, description, copies=copies)
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
                    "is it stopped?",
                    ranks=[peer.id],
                    operation=description,
                    seconds=timeout,
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
        return PeerLost(
            f"{reason} while this worker waited for {description}",
            ranks=[peer.id],
            operation=description,
        )

    def call_async(
        self, peer: Peer, kind: Kind, body: object, description: str, timeout: float, extra: int = 0
    ) -> CallFuture:
        """Make a call and return its future, which gets all errors except those of packing."""
        now = time.monotonic()
        end = now + (timeout or math.inf)
        future = CallFuture()
        try:
            peer.check(description)
            self._connect(peer, end)
        except OSError:  # sending detects it
            pass
        except PhalanxError as error:
            future.is_sent = False
            future.set_exception(
                error if peer.loss_reason else peer.connection_error(description, error)
            )
            return future
        call = next(self._calls)
        copies = DeferredCopies()
        frames = self.codec.encode(kind, peer, call, body, description, extra, copies)
        self.count_activity(kind)
        peer.pending[call] = PendingFuture(
            future, description, body, torch.is_grad_enabled(), end, now, peer.id
        )
        if timeout:
            self.reactor.add_deadline(end, call, peer.pending)
        with copies:
            self._send(peer, frames, end)
        if peer.loss_reason:
            self._fail_pending(peer, PeerLost(peer.loss_reason, ranks=[peer.id]))
        return future

    @property
    def outstanding(self) -> int:
        """The number of calls that have no answer yet or are being executed."""
        return sum(len(peer.pending) for peer in self.peers) + self.reactor.threads.active_count

    def count_activity(self, kind: Kind) -> None:
        """Count a call that is made or executed; other kinds of messages are not counted."""
        if kind in _CALLS:
            with self._activity_lock:
                self.activity += 1

    # ---- references and blocks of other workers ----

    def send_ref_count(self, owner: int, delta: RefCountDelta) -> None:
        """Report new or ended references to the owner of a value."""
        if owner == self.id:
            self.owned_values.apply(delta)
        elif not self.peers[owner].loss_reason:
            self._send(self.peers[owner], self.codec.encode_plain(Kind.REF_COUNT, delta))

    def _take_deferred(self) -> Callable[[], None] | None:
        return self.notifier.take_work()

    def _return_unmapped(self, peer: Peer, descriptors: list[TensorDescriptor]) -> None:
        """Return blocks that this worker could not map to their owner, later."""
        blocks = [(descriptor.segment, descriptor.block) for descriptor in descriptors]
        message = self.codec.encode_plain(Kind.FREE_BLOCKS, blocks)
        self.notifier.queue(peer.id, partial(self._send, peer, message))

    def _discard_unread(self, peer: Peer, descriptors: list[TensorDescriptor]) -> None:
        """End the leases of a late answer's tensors, once they are written."""
        self.reactor.submit(partial(self.codec.discard_tensors, peer, descriptors))

    # ---- connections, messages and answers ----

    def _connect(self, peer: Peer, end: float = math.inf) -> LocalConnection | RemoteDealer:
        with peer.lock:
            if peer.async_connection is None:
                if self.remote is None or peer.is_local:
                    peer.async_connection = connection = connect(self._key, peer.address, end)
                    self.reactor.watch(connection.fd, partial(self._read, peer, connection))
                else:
                    from phalanx.rpc.remote_connection import RemoteDealer

                    peer.async_connection = dealer = RemoteDealer(self.remote, peer.address)
                    ended = partial(self._on_disconnect, peer, dealer)
                    self.reactor.watch(dealer.monitor_fd, ended)
                    self.reactor.watch(dealer.fd, partial(self._drain, peer, dealer))
            return peer.async_connection

    def _send(self, peer: Peer, frames: Frames, end: float = math.inf) -> None:
        """Send a message; a broken connection marks the peer as lost and raises nothing.

        Never blocks on a peer that does not read. `end` limits the time to connect.
        """
        try:
            connection = self._connect(peer, end)
            if isinstance(connection, LocalConnection):
                if connection.post(frames[0]):
                    self.reactor.submit(partial(self._flush, peer, connection))
                return
            answers = connection.send(*frames)
        except OSError:
            self.mark_lost(peer)
            return
        if answers:
            self._submit_answers(peer, answers)

    def _flush(self, peer: Peer, connection: LocalConnection) -> None:
        try:
            connection.flush()
        except OSError:
            if not self.is_closed:
                self.mark_lost(peer)

    def _read(self, peer: Peer, connection: LocalConnection) -> None:
        messages = connection.read()
        if messages is None:
            self.reactor.unwatch(connection.fd)
            self.reactor.submit(partial(self.mark_lost, peer))
        else:
            self._submit_answers(peer, [(each, []) for each in messages])

    def _drain(self, peer: Peer, dealer: RemoteDealer) -> None:
        self._submit_answers(peer, dealer.receive())

    def _submit_answers(self, peer: Peer, answers: list[Frames]) -> None:
        self.reactor.submit(*(partial(self._on_answer, peer, each) for each in answers))

    def _on_answer(self, peer: Peer, frames: Frames) -> None:
        message = self.parse(frames)
        if message is None:
            return
        pending = peer.pending.pop(message.call, None)
        if pending is None:
            self.drop(message, peer)
            return
        with torch.set_grad_enabled(pending.grad):
            try:
                value = self.decode_answer(message, peer, pending)
            except BaseException as error:  # noqa: BLE001 - the future raises it
                pending.future.set_exception(clear_frames(error))
            else:
                pending.future.set_result(value)

    def decode_answer(
        self, message: Message, peer: Peer, pending: PendingCall | PendingFuture
    ) -> Any:
        """Return the result in an answer; see `MessageCodec.decode`.

        Raises:
            PeerLost: The sender died before its tensors were read.
            CallTimeout: A tensor was not written in time.
        """
        try:
            return self.codec.decode(message, peer, pending.end)
        except CopyTimeout:
            raise pending.timeout_error() from None
        except TensorsUnavailable as error:
            if error.__cause__ is None and peer.is_ending():  # the callee has not raised it
                raise self.loss_error(peer, pending.description) from None
            raise

    def parse(self, frames: Frames) -> Message | None:
        """Return the parsed message; log a malformed one and return None."""
        try:
            return parse(*frames, self.peers)
        except Malformed as error:
            self.log_malformed(error)
            return None

    def log_malformed(self, error: Malformed) -> None:
        """Log a malformed message; only the first one is logged."""
        if not self._has_dropped:
            self._has_dropped = True
            _LOG.warning(
                "worker %r dropped a malformed message: %s; further ones are not logged",
                self.info.name,
                error,
            )

    def drop(self, message: Message, peer: Peer) -> None:
        """Release the tensors of an answer that nobody waits for any more."""
        if message.descriptors:  # taking its tensors may block
            self.reactor.submit(partial(self._drop, message, peer))
        else:
            self._drop(message, peer)

    def _drop(self, message: Message, peer: Peer) -> None:
        try:
            self.codec.decode(message, peer)
        except BaseException:  # noqa: BLE001 - nobody waits for the answer
            _LOG.debug("a late answer", exc_info=True)

    def _on_deadline(self, pending: PendingFuture) -> None:
        self.reactor.submit(partial(pending.future.set_exception, pending.timeout_error()))

    # ---- loss of workers ----

    def _on_death(self, peer: Peer) -> None:
        self.reactor.unwatch(peer.pidfd)
        # The peer may have announced that it leaves: connections that are readable come first.
        handle_loss = partial(self.mark_lost, peer, f"{peer} died")
        self.reactor.submit(partial(self.reactor.submit, handle_loss))

    def _on_disconnect(self, peer: Peer, dealer: RemoteDealer) -> None:
        if dealer.has_event():
            self.reactor.submit(partial(self.mark_lost, peer))

    def mark_lost(self, peer: Peer, reason: str = "") -> None:
        """Mark a worker as lost, so that pending and later calls fail with the reason.

        Args:
            peer: The worker.
            reason: The reason; empty to find it, which may block for a moment.
        """
        reason = peer.mark_lost(reason or peer.find_loss_reason())
        self.reactor.submit(partial(self._handle_loss, peer, reason))

    def _handle_loss(self, peer: Peer, reason: str) -> None:
        self._fail_pending(peer, PeerLost(reason, ranks=[peer.id]))
        if peer.has_died:  # a worker that has left may still use tensors that it received
            self.shm_sender.forget(peer.id)
        self.codec.forget(peer.id)
        self.owned_values.forget(peer.id)
        for listener in self.loss_listeners:
            listener(peer.id, reason)
        self.autograd_hook.forget(peer.id)

    def _fail_pending(self, peer: Peer, error: PhalanxError) -> None:
        while peer.pending:
            try:
                _, pending = peer.pending.popitem()
            except KeyError:
                return
            text = f"{error} while this worker waited for {pending.description}"
            pending.future.set_exception(error.replace(text, operation=pending.description))


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
        self._own, self._peer, self._call, self.description = own, peer, call, description
        self._keepalive = keepalive
        self._timeout, self.end = timeout, time.monotonic() + (timeout or math.inf)
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
            raise self.timeout_error() from None
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
            raise self._own.loss_error(self._peer, self.description)
        return self._own.decode_answer(message, self._peer, self)

    def timeout_error(self) -> CallTimeout:
        """Return the error for a call that has no answer in time."""
        return CallTimeout(
            f"{self.description} took longer than {self._timeout:g} s",
            ranks=[self._peer.id],
            operation=self.description,
            seconds=self._timeout,
        )

    def _receive_answer(self) -> Message | None:
        connection = self._connection
        while connection is not None and (frames := connection.receive(self.end)) is not None:
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


class _Process:
    """The agents of this process."""

    agent: Agent | None = None
    has_left = False
    parents: tuple[Agent, ...] = ()
    """Agents of processes that this one was forked from; nothing of theirs may be closed here."""


def agent() -> Agent:
    """Return the agent of this process.

    Raises:
        UsageError: There is no agent.
    """
    if (own := _Process.agent) is not None:
        return own
    if _Process.parents:
        raise UsageError(
            f"this process was forked by worker {_Process.parents[-1].info.name!r} and is not a "
            "worker itself; make the calls in that worker"
        )
    raise UsageError(
        "RPC has not been initialized again since this process left it by shutdown()"
        if _Process.has_left
        else "RPC has not been initialized in this process. Current RPC agent is not set! Did "
        "you initialize the RPC framework by calling phalanx.rpc.init_rpc(name)?"
    )


def agent_or_none() -> Agent | None:
    """Return the agent of this process, or None if there is none."""
    return _Process.agent


def set_agent(new: Agent | None) -> None:
    """Set the agent of this process; None removes it."""
    _Process.agent, _Process.has_left = new, new is None


def _forked() -> None:
    if _Process.agent is not None:
        _Process.parents += (_Process.agent,)
        _Process.agent = None


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
