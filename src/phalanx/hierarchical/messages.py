"""Send and recv of a group that spans hosts.

The native group moves messages between ranks of one host. A message to another host takes two
transfers: an envelope, which describes the message, and the data. The receiver posts the receive
of the data only after the envelope has arrived and its size and dtype are those of the recv.
Otherwise, some transports would respond to a wrong size by closing the connection or by ending the
process. `matching` matches messages with recvs.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx import _native
from phalanx.hierarchical import tags
from phalanx.hierarchical.element_sizes import ELEMENT_SIZES
from phalanx.hierarchical.fingerprint import Fingerprint, Header
from phalanx.hierarchical.group_failure import GroupFailure
from phalanx.hierarchical.matching import MessageMatcher, PostedReceive
from phalanx.hierarchical.transfers import ConnectionLost, DeadlineExceeded, bytes_at, drain
from phalanx.transports import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.hierarchical.failure_propagation import FailurePropagator
    from phalanx.topology import Layout
    from phalanx.transports import Transfer, Transport


__all__ = ["LocalMessage", "PointToPointGroup", "RemoteMessage"]

_CHECK_INTERVAL = 0.02
"""Seconds between two checks whether the group is broken, during a wait."""
_numbers = itertools.count(-1, -1)  # native messages have positive ids


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
        return self._group.to_failure(self.native.status)

    @property
    def peer(self) -> int:
        return self._group.to_global_rank(self.native.peer)


class RemoteMessage:
    """A message to or from another host.

    Args:
        group: The group of the message.
        header: The description of the message on this rank.
        peer: The destination or source rank; -1 for a recv from any source.
        transfers: The transfers that must complete, in this order. More may be appended later.
    """

    def __init__(
        self,
        group: PointToPointGroup,
        header: Header,
        peer: int,
        transfers: list[Transfer],
    ) -> None:
        self.id = next(_numbers)
        self.peer = peer
        self.done = False
        self.status: GroupFailure | None = None
        self.header = header
        self.transfers = transfers
        self._group = group
        self._record: _native.Message | None = None
        self._lock = threading.Lock()
        self._completion_lock = threading.Lock()

    def record_begin(self) -> None:
        """Record the message in the flight recorder.

        Not for a recv that is also posted in memory: the native group records it.
        """
        fingerprint = self.header.fingerprint
        self._record = self._group.native.begin_remote(
            fingerprint.kind,
            fingerprint.count,
            fingerprint.dtype,
            self.peer,
            fingerprint.sequence,
        )

    def record_wait(self) -> None:
        """Record that a caller waits for the message."""
        if self._record is not None:
            self._group.native.begin_remote_wait(self._record)

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
        self._group.check_message(self, theirs)

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
        if self._record is not None:
            outcome = "ok" if status is None else status.code
            self._group.native.end_remote(self._record, outcome, self.peer)


class PointToPointGroup:
    """The point-to-point half of a group that spans hosts.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        propagator: Reports failures and breaks the group.
        transport: The transport that carries bytes between hosts.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        propagator: FailurePropagator,
        transport: Transport,
    ) -> None:
        self._native = native
        self._layout = layout
        self._propagator = propagator
        self._transport = transport
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
            return self.to_failure(
                self._native.send(data, count, dtype, local, tag, timeout), timeout
            )
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
        message = RemoteMessage(self, header, destination, [])
        message.record_begin()
        try:
            with self._send_lock:  # envelopes must arrive in the order of the sends
                number = self._sent_counts[destination]
                self._sent_counts[destination] += 1
                envelope = memoryview(replace(header, number=number).pack())
                message.transfers.append(
                    self._transport.send(envelope, destination, tags.ENVELOPES)
                )
                if size := count * ELEMENT_SIZES[dtype]:
                    tag = tags.data_tag(number)
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
        message = RemoteMessage(self, _make_header("recv", count, dtype, source, tag), source, [])
        if source >= 0:
            message.record_begin()
        try:
            self._matcher.post(message, data, ELEMENT_SIZES[dtype] * count)
        except TransportError as error:
            self._fail(message, ConnectionLost(source, error))
        return message

    def wait(self, message: LocalMessage | RemoteMessage, timeout: float) -> GroupFailure | None:
        if isinstance(message, LocalMessage):
            return self.to_failure(self._native.wait(message.native, timeout), timeout)
        deadline = time.monotonic() + timeout
        message.record_wait()
        check = self._propagator.create_failure_check()
        try:
            while not message.done and not message.advance(_CHECK_INTERVAL):
                check()
                if (broken := self.failure()) is not None:
                    message.complete(broken)
                elif time.monotonic() >= deadline:
                    error = DeadlineExceeded(message.peer)
                    message.complete(
                        self._propagator.report_timeout(
                            error, self._format_operation(message), timeout
                        )
                    )
        except ConnectionLost as error:
            self._fail(message, error)
        except BaseException:  # Ctrl-C: nothing keeps the message's tensor alive from now on
            text = f"rank {self._layout.rank} was interrupted in {self._format_operation(message)}"
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

    # For the messages, and for the subclass with the collectives.

    @property
    def native(self) -> _native.Group:
        """The native group of this host."""
        return self._native

    def failure(self) -> GroupFailure | None:
        raise NotImplementedError

    def to_failure(
        self, status: _native.Status | None, timeout: float = 0.0
    ) -> GroupFailure | None:
        """Return the failure of the whole group for a native status; None for None."""
        return None if status is None else self._propagator.report_status(status, timeout)

    def to_global_rank(self, local: int) -> int:
        """Return the rank in the group of a local rank; -1 (any source) stays -1."""
        return self._layout.ranks[local] if local >= 0 else local

    def check_message(self, message: RemoteMessage, theirs: Header) -> None:
        """Break the group if an announced message does not match its recv."""
        own, announced = message.header.fingerprint, theirs.fingerprint
        if (own.count, own.dtype) != (announced.count, announced.dtype):
            message.complete(self._propagator.report_mismatch(message.header, message.peer, theirs))

    def _local_rank(self, rank: int) -> int | None:
        return self._layout.ranks.index(rank) if rank in self._layout.ranks else None

    def _fail(self, message: RemoteMessage, error: ConnectionLost) -> None:
        if (broken := self.failure()) is not None:
            message.complete(broken)
        else:
            message.complete(
                self._propagator.report_connection_lost(error, self._format_operation(message))
            )

    def _format_operation(self, message: RemoteMessage) -> str:
        return self._propagator.format_operation(message.header)


def _is_idle(transfer: Transfer) -> bool:
    return isinstance(transfer, PostedReceive) and transfer.is_idle


def _make_header(kind: str, count: int, dtype: int, peer: int, tag: int) -> Header:
    site = _native.call_site_text(_native.call_site())
    return Header(Fingerprint(kind, tag, count, dtype, 0, peer), site)
