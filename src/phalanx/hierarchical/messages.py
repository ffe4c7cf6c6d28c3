"""Send and recv of a group that spans hosts.

The native group moves messages between ranks of one host. A message to another host takes two
transfers: an envelope, which describes the message, and the data. The receiver posts the receive
of the data only after the envelope has arrived and matches what the recv expects. Otherwise an
transport would answer a wrong size by closing the connection or by ending the process. `inbox`
matches messages with recvs.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx import _native
from phalanx.hierarchical import tags
from phalanx.hierarchical.element_sizes import BYTES
from phalanx.hierarchical.fingerprint import Fingerprint, Header
from phalanx.hierarchical.group_failure import Told
from phalanx.hierarchical.matching import Expected, Inbox
from phalanx.hierarchical.transfers import Gone, Late, bytes_at, settle
from phalanx.transports import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.hierarchical.failure_propagation import Failing
    from phalanx.topology import Layout
    from phalanx.transports import Transfer, Transport

    Answer = Told | None

__all__ = ["HostsMessages", "LocalMessage", "RemoteMessage"]

_SLICE = 0.02
"""Seconds between two checks of a wait whether the group is broken."""
_numbers = itertools.count(-1, -1)  # native messages have positive ids


class LocalMessage:
    """A native message whose ranks are those of the whole group."""

    def __init__(self, native: _native.Message, group: HostsMessages) -> None:
        self.native = native
        self.id = native.id
        self._group = group

    @property
    def done(self) -> bool:
        return self.native.done

    @property
    def status(self) -> Answer:
        return self._group.seen(self.native.status)

    @property
    def peer(self) -> int:
        return self._group.rank_of(self.native.peer)


class RemoteMessage:
    """A message to or from another host.

    Args:
        group: The group of the message.
        own: The header that describes the message on this rank.
        peer: The destination or source rank; -1 for a recv from any source.
        transfers: The transfers that must end, in this order. More may be appended later.
    """

    def __init__(
        self,
        group: HostsMessages,
        own: Header,
        peer: int,
        transfers: list[Transfer],
    ) -> None:
        self.id = next(_numbers)
        self.peer = peer
        self.done = False
        self.status: Answer = None
        self.own = own
        self.transfers = transfers
        self._group = group
        self._record: _native.Message | None = None
        self._lock = threading.Lock()
        self._ending = threading.Lock()

    def begin(self) -> None:
        """Record the message in the flight recorder.

        Not for a recv that is posted in memory too: the native group records that one.
        """
        its = self.own.fingerprint
        self._record = self._group.native.begin_remote(
            its.kind, its.count, its.dtype, self.peer, its.sequence
        )

    def show_wait(self) -> None:
        """Record that a caller waits for the message."""
        if self._record is not None:
            self._group.native.begin_remote_wait(self._record)

    def advance(self, seconds: float) -> bool:
        """Wait for the message and return whether it is done.

        Args:
            seconds: The longest time to wait, in seconds.

        Raises:
            Gone: The connection to the peer is closed.
        """
        end = time.monotonic() + seconds
        with self._lock:
            try:
                while not self.done and self.transfers:
                    if not self.transfers[0].wait(max(0.0, end - time.monotonic())):
                        return False
                    self.transfers.pop(0)
            except TransportError as error:
                raise Gone(self.peer, error) from None
            self.end(None)
        return True

    def match(self, theirs: Header) -> None:
        """End this recv with a mismatch, and break the group, if `theirs` differs from it."""
        self._group.compare(self, theirs)

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

    def settle(self) -> None:
        """Wait, after a failure, until no transfer uses the tensor, for some seconds at most."""
        with self._lock:
            settle(each for each in self.transfers if not _idle(each))
            self.transfers.clear()

    def end(self, status: Answer) -> None:
        """Mark the message as done; calls after the first do nothing.

        Args:
            status: The failure, or None on success.
        """
        with self._ending:
            if self.done:
                return
            self.status = status
            self.done = True
        if self._record is not None:
            outcome = "ok" if status is None else status.code
            self._group.native.end_remote(self._record, outcome, self.peer)


class HostsMessages:
    """The point-to-point half of a group that spans hosts.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        failing: The failure handler, which breaks the group.
        transport: The transport that carries bytes between hosts.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        failing: Failing,
        transport: Transport,
    ) -> None:
        self._native = native
        self._layout = layout
        self._failing = failing
        self._transport = transport
        self._posting = threading.Lock()
        self._inbox = Inbox(native, layout, transport, failing.lost)
        self._sent = [0] * layout.size
        native.expect_remote(True)

    @property
    def outstanding(self) -> int:
        return self._native.outstanding

    @property
    def unexpected_peak(self) -> int:
        return self._native.unexpected_peak

    def send(
        self, data: int, count: int, dtype: int, destination: int, tag: int, timeout: float
    ) -> Answer:
        self._inbox.to_itself |= destination == self._layout.rank
        local = self._local(destination)
        if local is not None:
            return self.seen(self._native.send(data, count, dtype, local, tag, timeout), timeout)
        return self.wait(self.isend(data, count, dtype, destination, tag), timeout)

    def recv(
        self, data: int, count: int, dtype: int, source: int, tag: int, timeout: float
    ) -> int | Told:
        local = self._local(source)
        if local is None:
            message = self.irecv(data, count, dtype, source, tag)
            answer = self.wait(message, timeout)
            return message.peer if answer is None else answer
        status = self._native.recv(data, count, dtype, local, tag, timeout)
        if isinstance(status, int):
            return self._layout.ranks[status]
        return self._failing.seen(status, timeout)

    def isend(
        self, data: int, count: int, dtype: int, destination: int, tag: int
    ) -> LocalMessage | RemoteMessage:
        self._inbox.to_itself |= destination == self._layout.rank
        local = self._local(destination)
        if local is not None:
            return LocalMessage(self._native.isend(data, count, dtype, local, tag), self)
        own = _header("send", count, dtype, destination, tag)
        message = RemoteMessage(self, own, destination, [])
        message.begin()
        try:
            with self._posting:  # envelopes must arrive in the order of the sends
                number = self._sent[destination]
                self._sent[destination] += 1
                envelope = memoryview(replace(own, number=number).pack())
                message.transfers.append(
                    self._transport.send(envelope, destination, tags.ENVELOPES)
                )
                if size := count * BYTES[dtype]:
                    tag = tags.of_data(number)
                    payload = self._transport.send(bytes_at(data, size), destination, tag)
                    message.transfers.append(payload)
        except TransportError as error:
            self._fail(message, Gone(destination, error))
        return message

    def irecv(
        self, data: int, count: int, dtype: int, source: int, tag: int
    ) -> LocalMessage | RemoteMessage:
        local = self._local(source)
        if local is not None:
            return LocalMessage(self._native.irecv(data, count, dtype, local, tag), self)
        message = RemoteMessage(self, _header("recv", count, dtype, source, tag), source, [])
        if source >= 0:
            message.begin()
        try:
            self._inbox.expect(message, data, BYTES[dtype] * count)
        except TransportError as error:
            self._fail(message, Gone(source, error))
        return message

    def wait(self, message: LocalMessage | RemoteMessage, timeout: float) -> Answer:
        if isinstance(message, LocalMessage):
            return self.seen(self._native.wait(message.native, timeout), timeout)
        deadline = time.monotonic() + timeout
        message.show_wait()
        look = self._failing.looking()
        try:
            while not message.done and not message.advance(_SLICE):
                look()
                if (broken := self.failure()) is not None:
                    message.end(broken)
                elif time.monotonic() >= deadline:
                    late = Late(message.peer)
                    message.end(self._failing.late(late, self._doing(message), timeout))
        except Gone as gone:
            self._fail(message, gone)
        except BaseException:  # Ctrl-C: nothing keeps the message's tensor alive from now on
            words = f"rank {self._layout.rank} was interrupted in {self._doing(message)}"
            message.end(self._failing.tell(Told("interrupted", words, self._layout.rank)))
            raise
        finally:
            if message.status is not None:
                message.settle()
        return message.status

    def test(self, message: LocalMessage | RemoteMessage) -> bool:
        if isinstance(message, LocalMessage):
            return self._native.test(message.native)
        try:
            return message.done or message.advance(0)
        except Gone as gone:
            self._fail(message, gone)
            message.settle()
            return True

    def watch(self, message: LocalMessage, timeout: float) -> None:
        self._native.watch(message.native, timeout)

    def serve(self) -> list[_native.Message]:
        return self._native.serve()

    def stop(self) -> None:
        self._native.stop()

    # For messages and for the subclass with the collectives.

    @property
    def native(self) -> _native.Group:
        """The native group of this host."""
        return self._native

    def failure(self) -> Answer:
        raise NotImplementedError

    def seen(self, status: _native.Status | None, timeout: float = 0.0) -> Answer:
        """Return a native status as the failure of the whole group; None stays None."""
        return None if status is None else self._failing.seen(status, timeout)

    def rank_of(self, local: int) -> int:
        """Return the rank in the group of a local rank; -1 (any source) stays -1."""
        return self._layout.ranks[local] if local >= 0 else local

    def compare(self, message: RemoteMessage, theirs: Header) -> None:
        """Break the group if an announced message does not match its recv."""
        mine, given = message.own.fingerprint, theirs.fingerprint
        if (mine.count, mine.dtype) != (given.count, given.dtype):
            message.end(self._failing.differs(message.own, message.peer, theirs))

    def _local(self, rank: int) -> int | None:
        return self._layout.ranks.index(rank) if rank in self._layout.ranks else None

    def _fail(self, message: RemoteMessage, gone: Gone) -> None:
        if (broken := self.failure()) is not None:
            message.end(broken)
        else:
            message.end(self._failing.gone(gone, self._doing(message)))

    def _doing(self, message: RemoteMessage) -> str:
        return self._failing.operation(message.own)


def _idle(transfer: Transfer) -> bool:
    return isinstance(transfer, Expected) and transfer.idle


def _header(kind: str, count: int, dtype: int, peer: int, tag: int) -> Header:
    site = _native.call_site_text(_native.call_site())
    return Header(Fingerprint(kind, tag, count, dtype, 0, peer), site)
