"""Send and recv of a group that spans hosts.

The native group moves messages between ranks of one host. A message to another host takes two
transfers: an envelope, which describes the message, and the data. The receiver posts the receive
of the data only after the envelope has arrived and its size and dtype are those of the recv.
Otherwise, some transports would respond to a wrong size by closing the connection or by ending the
process.

Every sender announces its messages to this rank in order, with envelopes. From the first recv on
that may match a sender, one receive for its next envelope is always posted. An envelope goes to
the oldest matching recv, which then receives the data. If there is no matching recv yet, the
envelope is kept and the data stay with the sender. A recv from any source is posted in memory too.
When an envelope matches such a recv, it is withdrawn from memory, unless a message of this host
has arrived first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from phalanx import _native
from phalanx.hierarchical.execution import (
    CHECK_INTERVAL,
    ELEMENT_SIZES,
    ENVELOPES_TAG,
    ConnectionLost,
    bytes_at,
    data_tag,
    drain,
)
from phalanx.hierarchical.failure import FailurePropagator, GroupFailure
from phalanx.hierarchical.fingerprint import Fingerprint, Header, current_site
from phalanx.hierarchical.links import Links
from phalanx.topology import Layout
from phalanx.transports import Transfer, Transport, TransportError

_numbers = itertools.count(-1, -1)  # native messages have positive ids
_T = TypeVar("_T")

_POLL_INTERVAL = 0.0005
"""Seconds between two checks for a local message, while a remote one may arrive too."""


class PointToPointGroup:
    """The point-to-point half of a group that spans hosts.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        propagator: Reports failures and breaks the group.
        transport: The transport that carries bytes between hosts.
        links: The links between the hosts, which count the bytes.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        propagator: FailurePropagator,
        transport: Transport,
        links: Links,
    ) -> None:
        self._native = native
        self._layout = layout
        self._propagator = propagator
        self._transport = transport
        self._links = links
        self._send_lock = threading.Lock()
        self._matcher = MessageMatcher(native, layout, transport, propagator.handle_connection_lost)
        self._sent_counts = [0] * layout.size
        native.expect_remote(True)

    @property
    def outstanding(self) -> int:
        return self._native.outstanding

    @property
    def unexpected_peak(self) -> int:
        return self._native.unexpected_peak

    def send(
        self, data: int, count: int, dtype: int, destination: int, tag: int, timeout: float
    ) -> GroupFailure | None:
        self._matcher.sends_to_self |= destination == self._layout.rank
        local = self._local_rank(destination)
        if local is not None:
            status = self._native.send(data, count, dtype, local, tag, timeout)
            return self._to_failure(status, timeout)
        return self.wait(self.isend(data, count, dtype, destination, tag), timeout)

    def recv(
        self, data: int, count: int, dtype: int, source: int, tag: int, timeout: float
    ) -> int | GroupFailure:
        local = self._local_rank(source)
        if local is None:
            message = self.irecv(data, count, dtype, source, tag)
            failure = self.wait(message, timeout)
            return message.peer if failure is None else failure
        status = self._native.recv(data, count, dtype, local, tag, timeout)
        if isinstance(status, int):
            return self._layout.ranks[status]
        return self._propagator.report_status(status, timeout)

    def isend(
        self, data: int, count: int, dtype: int, destination: int, tag: int
    ) -> LocalMessage | RemoteMessage:
        self._matcher.sends_to_self |= destination == self._layout.rank
        local = self._local_rank(destination)
        if local is not None:
            return LocalMessage(self._native.isend(data, count, dtype, local, tag), self)
        header = _make_header("send", count, dtype, destination, tag)
        message = RemoteMessage(self, header, destination)
        message.record_begin()
        try:
            with self._send_lock:  # envelopes must arrive in the order of the sends
                number = self._sent_counts[destination]
                self._sent_counts[destination] += 1
                envelope = memoryview(replace(header, number=number).pack())
                message.transfers.append(self._transport.send(envelope, destination, ENVELOPES_TAG))
                if size := count * ELEMENT_SIZES[dtype]:
                    tag = data_tag(number)
                    payload = self._transport.send(bytes_at(data, size), destination, tag)
                    message.transfers.append(payload)
        except TransportError as error:
            self._fail(message, ConnectionLost(destination, error))
        return message

    def irecv(
        self, data: int, count: int, dtype: int, source: int, tag: int
    ) -> LocalMessage | RemoteMessage:
        local = self._local_rank(source)
        if local is not None:
            return LocalMessage(self._native.irecv(data, count, dtype, local, tag), self)
        message = RemoteMessage(self, _make_header("recv", count, dtype, source, tag), source)
        if source >= 0:
            message.record_begin()
        try:
            self._matcher.post(message, data, ELEMENT_SIZES[dtype] * count)
        except TransportError as error:
            self._fail(message, ConnectionLost(source, error))
        return message

    def wait(self, message: LocalMessage | RemoteMessage, timeout: float) -> GroupFailure | None:
        if isinstance(message, LocalMessage):
            return self._to_failure(self._native.wait(message.native, timeout), timeout)
        deadline = time.monotonic() + timeout
        message.record_wait()
        check = self._propagator.create_failure_check()
        try:
            while not message.done and not message.advance(CHECK_INTERVAL):
                check()
                if (broken := self.failure()) is not None:
                    message.complete(broken)
                elif time.monotonic() >= deadline:
                    operation = self._propagator.format_operation(message.header)
                    message.complete(
                        self._propagator.report_timeout(message.peer, operation, timeout)
                    )
        except ConnectionLost as error:
            self._fail(message, error)
        except BaseException:  # Ctrl-C: nothing keeps the message's tensor alive from now on
            operation = self._propagator.format_operation(message.header)
            text = f"rank {self._layout.rank} was interrupted in {operation}"
            message.complete(
                self._propagator.report(GroupFailure("interrupted", text, self._layout.rank))
            )
            raise
        finally:
            if message.status is not None:
                message.drain()
        return message.status

    def test(self, message: LocalMessage | RemoteMessage) -> bool:
        if isinstance(message, LocalMessage):
            return self._native.test(message.native)
        try:
            return message.done or message.advance(0)
        except ConnectionLost as error:
            self._fail(message, error)
            message.drain()
            return True

    def watch(self, message: LocalMessage, timeout: float) -> None:
        self._native.watch(message.native, timeout)

    def serve(self) -> list[_native.Message]:
        return self._native.serve()

    def stop(self) -> None:
        self._native.stop()

    def failure(self) -> GroupFailure | None:
        raise NotImplementedError

    def _local_rank(self, rank: int) -> int | None:
        return self._layout.ranks.index(rank) if rank in self._layout.ranks else None

    def _to_failure(self, status: _native.Status | None, timeout: float) -> GroupFailure | None:
        """Return the failure of the whole group for a native status; None for None."""
        return None if status is None else self._propagator.report_status(status, timeout)

    def count_bytes(self, message: RemoteMessage) -> None:
        """Count the bytes of a completed message."""
        described = message.header.fingerprint
        size = described.count * ELEMENT_SIZES[described.dtype]
        sent, received = (size, 0) if described.kind == "send" else (0, size)
        self._links.count(message.peer, sent, received, message.begun_at)

    def _fail(self, message: RemoteMessage, error: ConnectionLost) -> None:
        operation = self._propagator.format_operation(message.header)
        message.complete(
            self.failure() or self._propagator.report_connection_lost(error, operation)
        )


class LocalMessage:
    """A native message whose ranks are those of the whole group."""

    def __init__(self, native: _native.Message, group: PointToPointGroup) -> None:
        self.native = native
        self.id = native.id
        self._group = group

    @property
    def done(self) -> bool:
        return self.native.done

    @property
    def status(self) -> GroupFailure | None:
        return self._group._to_failure(self.native.status, 0.0)

    def give_up(self) -> bool:
        """Withdraw this recv; return whether that succeeded, as no message had come."""
        return self._group._native.withdraw(self.native, -1)

    @property
    def peer(self) -> int:
        local = self.native.peer
        return self._group._layout.ranks[local] if local >= 0 else local


class RemoteMessage:
    """A message to or from another host.

    Args:
        group: The group of the message.
        header: The description of the message on this rank.
        peer: The destination or source rank; -1 for a recv from any source.
    """

    def __init__(self, group: PointToPointGroup, header: Header, peer: int) -> None:
        self.id = next(_numbers)
        self.peer = peer
        self.done = False
        self.status: GroupFailure | None = None
        self.header = header
        self.begun_at = time.monotonic_ns()
        self.transfers: list[Transfer] = []
        """The transfers that must complete, in this order."""
        self._group = group
        self._record: _native.Message | None = None
        self._lock = threading.Lock()
        self._completion_lock = threading.Lock()

    def record_begin(self) -> None:
        """Record the message in the flight recorder.

        Not for a recv that is also posted in memory: the native group records it.
        """
        fingerprint = self.header.fingerprint
        self._record = self._group._native.begin_remote(
            fingerprint.kind,
            fingerprint.count,
            fingerprint.dtype,
            self.peer,
            fingerprint.sequence,
        )

    def record_wait(self) -> None:
        """Record that a caller waits for the message."""
        if self._record is not None:
            self._group._native.begin_remote_wait(self._record)

    def advance(self, timeout: float) -> bool:
        """Wait for the message and return whether it is done.

        Args:
            timeout: The longest time to wait, in seconds.

        Raises:
            ConnectionLost: The connection to the peer is closed.
        """
        end = time.monotonic() + timeout
        with self._lock:
            try:
                while not self.done and self.transfers:
                    if not self.transfers[0].wait(max(0.0, end - time.monotonic())):
                        return False
                    self.transfers.pop(0)
            except TransportError as error:
                raise ConnectionLost(self.peer, error) from None
            self.complete(None)
        return True

    def check_header(self, theirs: Header) -> None:
        """Fail this recv and break the group if the sender's header does not match it."""
        own, announced = self.header.fingerprint, theirs.fingerprint
        if (own.count, own.dtype) != (announced.count, announced.dtype):
            self.complete(self._group._propagator.report_mismatch(self.header, self.peer, theirs))

    def watch(self, timeout: float, report: Callable[[], None]) -> None:
        """Call `report` in a new thread when the message is done.

        Args:
            timeout: The seconds after which the message fails.
            report: The function to call.
        """

        def wait() -> None:
            self._group.wait(self, timeout)
            report()

        threading.Thread(target=wait, name="phalanx-message", daemon=True).start()

    def give_up(self) -> bool:
        """Return whether no message has come for this recv."""
        with self._lock:
            return bool(self.transfers) and all(map(_is_idle, self.transfers))

    def drain(self) -> None:
        """Wait, after a failure, until no transfer uses the tensor, for some seconds at most."""
        with self._lock:
            drain(each for each in self.transfers if not _is_idle(each))
            self.transfers.clear()

    def complete(self, status: GroupFailure | None) -> None:
        """Complete the message; calls after the first do nothing.

        Args:
            status: The failure, or None on success.
        """
        with self._completion_lock:
            if self.done:
                return
            self.status = status
            self.done = True
        if status is None:
            self._group.count_bytes(self)
        if self._record is not None:
            outcome = "ok" if status is None else status.code
            self._group._native.end_remote(self._record, outcome, self.peer)


class PostedReceive(Transfer):
    """A posted recv; its transfer is known once an envelope has announced its message.

    Args:
        matcher: The posted recvs of the group.
        message: The message that the user waits for.
        data: The address of the buffer.
        size: The size of the buffer in bytes.
        number: The position of the recv among all posted recvs.
    """

    def __init__(
        self, matcher: MessageMatcher, message: RemoteMessage, data: int, size: int, number: int
    ) -> None:
        self.message, self.number = message, number
        self._matcher = matcher
        self._data, self._size = data, size
        self._resolved = threading.Event()
        self._claim_lock = threading.Lock()
        self._transfer: Transfer | None = None
        self._error: TransportError | None = None
        self._local: _native.Message | None = None

    def post_locally(self) -> None:
        """Post the recv in this host's native group too."""
        fingerprint = self.message.header.fingerprint
        self._local = self._matcher.native.irecv(
            self._data, fingerprint.count, fingerprint.dtype, -1, fingerprint.sequence
        )

    def claim(self, source: int) -> bool:
        """Match the recv with a message of another host; return whether that succeeded.

        It fails if a message of this host has arrived first.
        """
        with self._claim_lock:
            if self._local is not None:
                if not self._matcher.native.withdraw(self._local, source):
                    return False
                self._local = None
            self.message.peer = source
        return True

    def receive_data(self, header: Header) -> None:
        """Receive the announced data, if they match this recv."""
        self.message.check_header(header)
        if not self.message.done and self._size:
            data, tag = bytes_at(self._data, self._size), data_tag(header.number)
            self._transfer = self._matcher.transport.recv(data, self.message.peer, tag)
        self._resolved.set()

    def fail(self, error: TransportError) -> None:
        """Fail the recv: no message will match it."""
        self._error = error
        self._resolved.set()

    @property
    def is_idle(self) -> bool:
        """True if the transport has no transfer for this recv; after a failure it gets none."""
        return self._transfer is None

    def wait(self, timeout: float) -> bool:
        """Block until the data have arrived, from any host; return whether they have."""
        end = time.monotonic() + timeout
        while not self._resolved.is_set():
            if self._has_local_message():
                self._matcher.remove(self)
                return True
            remaining = max(0.0, end - time.monotonic())
            self._resolved.wait(
                min(remaining, _POLL_INTERVAL) if self._local is not None else remaining
            )
            if not remaining:
                break
        if not self._resolved.is_set():
            return False
        if self._error is not None:
            raise self._error
        return self._transfer is None or self._transfer.wait(max(0.0, end - time.monotonic()))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Raise `NotImplementedError`: callers only wait for messages."""
        raise NotImplementedError

    def _has_local_message(self) -> bool:
        """Return whether a message of this host has arrived."""
        with self._claim_lock:
            local, matcher = self._local, self._matcher
            if local is None or not (local.done or matcher.native.test(local)):
                return False
            if local.status is not None:
                raise TransportError(-1, "the group is broken")
            self.message.peer = matcher.layout.ranks[local.peer]
        return True


class _UnexpectedMessage(NamedTuple):
    """An envelope for which no matching recv is posted yet."""

    number: int
    """The position of the envelope in the order of arrival."""
    source: int
    header: Header


class MessageMatcher:
    """The recvs of a group that messages of other hosts may match.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        transport: The transport that carries bytes between hosts.
        handle_connection_lost: See `FailurePropagator.handle_connection_lost`.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        transport: Transport,
        handle_connection_lost: Callable[[ConnectionLost], bool],
    ) -> None:
        self.native = native
        self.layout = layout
        self.transport = transport
        self._handle_connection_lost = handle_connection_lost
        self._lock = threading.RLock()
        self._sequence = itertools.count()
        self._posted: dict[tuple[int, int], deque[PostedReceive]] = {}
        self._unexpected: dict[tuple[int, int], deque[_UnexpectedMessage]] = {}
        self._senders: set[int] = set()
        self._lost_senders: dict[int, TransportError] = {}
        self._closed = False
        self.sends_to_self = False
        """True once this rank has sent a message to itself, since it may do so again."""
        self._remote_ranks = [rank for rank in range(layout.size) if rank not in layout.ranks]

    def post(self, message: RemoteMessage, data: int, size: int) -> None:
        """Post a recv and add it to the transfers of its message.

        Args:
            message: The message that the user waits for.
            data: The address of the buffer.
            size: The size of the buffer in bytes.
        """
        source, tag = message.peer, message.header.fingerprint.sequence
        with self._lock:
            receive = PostedReceive(self, message, data, size, next(self._sequence))
            message.transfers.append(receive)
            unexpected = self._take_unexpected(source, tag)
            if unexpected is not None:
                receive.claim(unexpected.source)
                if source < 0:
                    message.record_begin()
                receive.receive_data(unexpected.header)
                return
            if source in self._lost_senders:
                receive.fail(self._lost_senders[source])
                return
            if source < 0:  # even if this rank is alone on its host: it may send to itself
                receive.post_locally()
            self._posted.setdefault((source, tag), deque()).append(receive)
            for sender in self._remote_ranks if source < 0 else [source]:
                if sender not in self._senders:
                    self._senders.add(sender)
                    self._post_envelope_receive(sender)
            self._fail_unmatchable()

    def close(self) -> None:
        """Ignore all further envelopes: the native group is about to be closed."""
        with self._lock:
            self._closed = True

    def _post_envelope_receive(self, sender: int) -> None:
        """Post a receive for the next envelope of a rank."""
        data = bytearray(Header.SIZE)
        transfer = self.transport.recv(memoryview(data), sender, ENVELOPES_TAG)
        transfer.add_done_callback(lambda: self._handle_envelope(sender, data, transfer))

    def _handle_envelope(self, sender: int, data: bytearray, transfer: Transfer) -> None:
        try:
            transfer.wait(0)
            with self._lock:
                if not self._closed:
                    self._match_envelope(sender, Header.parse(data))
                    self._post_envelope_receive(sender)
        except TransportError as error:
            has_left = self._handle_connection_lost(ConnectionLost(sender, error))
            with self._lock:
                if not self._closed:
                    self._lost_senders[sender] = error
                    self._fail_unmatchable(everything=not has_left)

    def _match_envelope(self, sender: int, header: Header) -> None:
        """Give an envelope to the oldest matching recv, or keep it if there is none."""
        tag = header.fingerprint.sequence
        while (receive := self._take_posted(sender, tag)) is not None:
            if receive.claim(sender):
                try:
                    receive.receive_data(header)
                except TransportError as error:
                    receive.fail(error)
                    raise
                return
            # A message of this host has matched the recv first.
        unexpected = _UnexpectedMessage(next(self._sequence), sender, header)
        self._unexpected.setdefault((sender, tag), deque()).append(unexpected)

    def _take_posted(self, sender: int, tag: int) -> PostedReceive | None:
        keys = [key for key in ((sender, tag), (-1, tag)) if key in self._posted]
        oldest = min(keys, key=lambda key: self._posted[key][0].number, default=None)
        return None if oldest is None else _pop_first(self._posted, oldest)

    def _take_unexpected(self, source: int, tag: int) -> _UnexpectedMessage | None:
        sources = self._remote_ranks if source < 0 else [source]
        keys = [(each, tag) for each in sources if (each, tag) in self._unexpected]
        oldest = min(keys, key=lambda key: self._unexpected[key][0].number, default=None)
        return None if oldest is None else _pop_first(self._unexpected, oldest)

    def remove(self, receive: PostedReceive) -> None:
        """Remove a recv from any source that a message of this host has matched."""
        key = (-1, receive.message.header.fingerprint.sequence)
        with self._lock:
            queue = self._posted.get(key, deque())
            if receive in queue:
                queue.remove(receive)
            if not queue:
                self._posted.pop(key, None)

    def _fail_unmatchable(self, *, everything: bool = False) -> None:
        """Fail the recvs that no message can match any more."""
        if not self._lost_senders:
            return
        all_lost = len(self._lost_senders) == len(self._remote_ranks)
        if all_lost:
            self.native.expect_remote(False)
        is_alone = all_lost and len(self.layout.ranks) == 1 and not self.sends_to_self
        for source, tag in list(self._posted):
            if everything or source in self._lost_senders or (source < 0 and is_alone):
                error = self._lost_senders.get(source, next(iter(self._lost_senders.values())))
                for receive in self._posted.pop((source, tag)):
                    receive.fail(error)


def _pop_first(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    """Remove and return the first item of a queue; delete the queue if it is then empty."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first


def _is_idle(transfer: Transfer) -> bool:
    return isinstance(transfer, PostedReceive) and transfer.is_idle


def _make_header(kind: str, count: int, dtype: int, peer: int, tag: int) -> Header:
    return Header(Fingerprint(kind, tag, count, dtype, 0, peer), current_site())
