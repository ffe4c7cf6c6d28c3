"""The group that replaces a native group in the backend if ranks are on several hosts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # exported at run time

from phalanx import _native
from phalanx.errors import PhalanxError, UsageError
from phalanx.hierarchical import data_movement, reductions
from phalanx.hierarchical.bandwidth import measure_slowest
from phalanx.hierarchical.encoding import Compression, choose_encoding
from phalanx.hierarchical.execution import (
    ELEMENT_SIZES,
    LEADER,
    ConnectionLost,
    DeadlineExceeded,
    Elements,
    GroupBroken,
    NativeFailure,
    Operation,
    dissemination_rounds,
)
from phalanx.hierarchical.failure import (
    EXITED,
    FailurePropagator,
    Formatter,
    GroupFailure,
    SharedGroupState,
    watch_counterparts,
)
from phalanx.hierarchical.fingerprint import Fingerprint, Header, current_site
from phalanx.hierarchical.links import Links
from phalanx.hierarchical.messages import PointToPointGroup
from phalanx.recorder.exception_hook import SESSION_ENDED
from phalanx.system.escape import escape
from phalanx.system.polling import attempts
from phalanx.topology import HostLink, Layout, RankRecord, StoreBoard, own_address
from phalanx.topology.layout import AUTO
from phalanx.topology.store_rendezvous import get_values
from phalanx.transports import Transport, TransportError, open_transport
from phalanx.transports.liveness import LivenessProbes, process_endpoint

_MAX_EXCEPTION_CHARACTERS = 640
_LEADER_GRACE = 1.0
"""Extra seconds that the ranks of a host give their leader to report the rank it waits for."""
_COUNT_KEY, _OPEN_KEY = "phalanx/transports", "phalanx/open"
_ENDPOINT_KEY = "phalanx/endpoint/{}"
"""Key with the endpoint of a rank's process, for `LivenessProbes`."""
_UINT8 = _native.DTYPES["uint8"]


def _collective(steps: Callable[..., None], *parameters: str) -> Callable[..., GroupFailure | None]:
    """Return the method of a collective, with the signature of the method of `_native.Group`.

    Args:
        steps: Runs the collective. Its arguments are the operation and, by keyword, those of the
            method except for the dtype, the operator and the timeout.
        parameters: The names of the method's arguments, without the last, the timeout.
    """

    def run(self: HierarchicalGroup, *arguments: Any) -> GroupFailure | None:
        *values, timeout = arguments
        operands = dict(zip(parameters, values, strict=True))
        dtype, op = operands.pop("dtype", _UINT8), operands.pop("op", 0)
        count, root = operands.get("count", 0), operands.get("root", -1)
        fingerprint = Fingerprint(steps.__name__, 0, count, dtype, op, root)
        return self._run_collective(fingerprint, timeout, partial(steps, **operands))

    return run


class HierarchicalGroup(PointToPointGroup):
    """A rank's view of a group that spans hosts, with the methods of `_native.Group`.

    All ranks in arguments and results are ranks of the whole group. An operation that fails
    returns a `GroupFailure`, the same on all ranks, and the group is then broken.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        records: The host and process of each rank of the group.
        store: The group's store.
        endpoints: The endpoint of each rank's process, for `LivenessProbes`.
        transport: This rank's end of the transport that carries bytes between hosts.
        make_formatter: Returns the texts of failures and operations for this group.
        compress: The encoding of large reductions between hosts; empty if there is none.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        records: list[RankRecord],
        store: Store,
        endpoints: Sequence[str],
        transport: Transport,
        make_formatter: Callable[[HierarchicalGroup], Formatter],
        compress: str = "",
    ) -> None:
        formatter = make_formatter(self)
        native.set_global_ranks(layout.ranks, records[0].nonce)
        shared_state = SharedGroupState(store)
        propagator = FailurePropagator(
            native, layout, records, shared_state, transport, formatter, self.has_ended
        )
        hosts = ["" if rank in layout.ranks else records[rank].host for rank in range(layout.size)]
        super().__init__(native, layout, propagator, transport, Links(hosts))
        self._records = records
        self._shared_state = shared_state
        self._store = store
        self._endpoints = endpoints
        self._probes = LivenessProbes()
        self._formatter = formatter
        self._collective_lock = threading.Lock()
        self._is_watching = False
        self.compression = Compression(compress) if compress else None
        self.rank = layout.rank
        self.identity = records[0].nonce  # the same on all hosts

    # Members and state.

    @property
    def sequence(self) -> int:
        return self._native.sequence

    @property
    def closed(self) -> bool:
        return self._native.closed

    def pid(self, rank: int) -> int:
        return self._records[rank].pid

    def host(self, rank: int) -> str:
        """Return the display name of a rank's host; empty for this rank's host."""
        return "" if rank in self._layout.ranks else self._records[rank].host

    def wait_status(self, rank: int) -> int | None:
        local = self._local_rank(rank)
        return None if local is None else self._native.wait_status(local)

    def is_failing(self, rank: int) -> bool:
        local = self._local_rank(rank)
        return local is not None and self._native.is_failing(local)

    def begin_leaving(self) -> None:
        """Announce to this host that this rank posts no more operations."""
        self._native.begin_leaving()

    def posts_no_more(self, rank: int) -> bool:
        """Return whether a rank of this host is leaving or gone; True for those of other hosts.

        These do not say so, and a receive from them is given up if its message has not come.
        """
        local = self._local_rank(rank)
        return local is None or self._native.posts_no_more(local)

    def has_gone(self, rank: int) -> bool:
        """Return whether a rank has left, or is known to have died, even if the group is broken.

        The end of a process on another host is known from its endpoint, or if its ranks are reached
        by the relay only, from the relay. It is unknown if that host does not answer, or if the
        relay has ended with a rank.
        """
        local = self._local_rank(rank)
        if local is not None:
            return self._native.has_gone(local)
        return self.has_ended(rank) or self._shared_state.has_left(rank)

    def has_ended(self, rank: int) -> bool:
        """Return whether a process of another host is known to have ended. Never blocks."""
        endpoint = self._endpoints[rank]
        return self._probes.has_ended(endpoint) if endpoint else self._transport.has_ended(rank)

    @property
    def board(self) -> StoreBoard:
        """The board of the agreement on the ranks that go on after a failure."""
        return StoreBoard(PrefixStore("phalanx/agreement", self._store))

    def flight_recorder(self, rank: int, history: int) -> dict[str, Any] | None:
        local = self._local_rank(rank)
        return None if local is None else self._native.flight_recorder(local, history)

    def is_awaited(self) -> bool:
        """Return False: the progress of ranks of other hosts is unknown."""
        return False

    def ranks_behind(self, rank: int) -> list[int]:
        """Return the ranks of this host that are behind `rank` in the group's collectives.

        Returns none if `rank` is on another host.
        """
        local = self._local_rank(rank)
        late = [] if local is None else self._native.ranks_behind(local)
        return [self._layout.ranks[other] for other in late]

    def failure(self) -> GroupFailure | None:
        if self._propagator.failure is None:
            try:
                status = self._native.failure()
            except ValueError:  # closed
                return GroupFailure(
                    "left", f"rank {self.rank} has left the group", self.rank, self.rank
                )
            if status is not None:
                return self._propagator.report_status(status, 0.0)
        return self._propagator.failure

    def abort(self, why: str) -> GroupFailure | None:
        site = self._formatter.format_site(current_site())
        message = f"the group was aborted by rank {self.rank}{site}{': ' + why if why else ''}"
        return self._propagator.report(GroupFailure("aborted", message, self.rank))

    def abort_deadlock(self, peer: int, why: str) -> GroupFailure | None:
        return self._propagator.report(GroupFailure("deadlock", why, self.rank, peer))

    def fail(self, wake: bool, why: str = "") -> None:
        """Report an exception that ends this rank's participation; its peers now treat it as lost.

        Args:
            wake: Whether to wake waiting peers and to share the reason with other hosts. A process
                with several groups first reports to all of them without it.
            why: The reason; by default the exception in this rank's flight recorder.
        """
        if wake and self._propagator.failure is None:
            recorder = self._native.flight_recorder(self._layout.local_rank, 0)
            exception = why.removeprefix(SESSION_ENDED) or escape(
                recorder["exception"] if recorder else "", _MAX_EXCEPTION_CHARACTERS
            )
            message = (
                f"{self._propagator.format_rank(self.rank)} failed with "
                f"{exception or 'an uncaught exception'}"
            )
            self._shared_state.report(GroupFailure("peer_lost", message, self.rank, self.rank))
        self._native.fail(wake, why)
        if wake:
            self._transport.abort()

    def close(self) -> None:
        if not self._native.closed:
            if self._propagator.failure is None:
                self._shared_state.record_leave(self.rank, current_site())
            else:
                self._shared_state.record_end(self.rank)
            self._matcher.close()
            self._native.close()
            self.disconnect(abrupt=False)
            self._probes.close()

    def disconnect(self, *, abrupt: bool) -> None:
        """Close the connections to other hosts, at the latest at the end of the process.

        Args:
            abrupt: Whether to close without waiting until peers have received sent data.
        """
        self._propagator.is_closing = True
        if not abrupt and not self._native.closed and self._propagator.failure is None:
            self._shared_state.record_leave(self.rank, EXITED)
        if abrupt:
            self._transport.abort()
        self._transport.close()

    # Collectives, with the signatures of `_native.Group`.

    barrier = _collective(data_movement.barrier)
    broadcast = _collective(data_movement.broadcast, "data", "count", "dtype", "root")
    all_reduce = _collective(reductions.all_reduce, "data", "count", "dtype", "op")
    reduce = _collective(reductions.reduce, "data", "count", "dtype", "op", "root")
    gather = _collective(data_movement.gather, "input", "outputs", "count", "dtype", "root")
    scatter = _collective(data_movement.scatter, "inputs", "output", "count", "dtype", "root")
    all_gather = _collective(data_movement.all_gather, "input", "outputs", "count", "dtype")
    reduce_scatter = _collective(
        reductions.reduce_scatter, "inputs", "output", "count", "dtype", "op"
    )
    all_to_all = _collective(
        data_movement.all_to_all, "inputs", "input_counts", "outputs", "output_counts", "dtype"
    )

    def all_gather_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> GroupFailure | None:
        outputs = self._part_addresses(output, count, dtype)
        return self.all_gather(input, outputs, count, dtype, timeout)

    def reduce_scatter_single(
        self, input: int, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> GroupFailure | None:
        inputs = self._part_addresses(input, count, dtype)
        return self.reduce_scatter(inputs, output, count, dtype, op, timeout)

    def all_to_all_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> GroupFailure | None:
        inputs = self._part_addresses(input, count, dtype)
        outputs = self._part_addresses(output, count, dtype)
        counts = [count] * self._layout.size
        return self.all_to_all(inputs, counts, outputs, counts, dtype, timeout)

    # Execution of collectives.

    def _run_collective(
        self, described: Fingerprint, timeout: float, steps: Callable[[Operation], None]
    ) -> GroupFailure | None:
        """Synchronize with the ranks of this host, compare with other hosts, and run `steps`."""
        deadline = time.monotonic() + timeout
        if not self._collective_lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            message = (
                f"rank {self.rank} waited for its own turn until the timeout of {timeout:g} s: "
                "another thread of it is in an operation of this group"
            )
            return self._propagator.report(GroupFailure("timeout", message, self.rank, self.rank))
        try:
            own = replace(described, sequence=self._native.sequence + 1)
            compression = self.compression
            if compression is not None and not compression.applies(
                own.kind, own.dtype, own.op, own.count
            ):
                compression = None
            operation = Operation(
                self._layout,
                Elements(own.dtype, own.op, self._layout.size),
                self._native,
                self._transport,
                deadline,
                self._propagator.create_failure_check,
                self._links,
                compression,
            )
            try:
                status = self._native.begin_composite(
                    own.kind, own.count, own.dtype, own.op, own.root, timeout
                )
                if status is not None:
                    return self._propagator.report_status(status, timeout)
                failure = self._run_steps(operation, own, timeout, steps)
            except BaseException:
                if self._native.closed:  # another thread has left the group in the meantime
                    return self.failure()
                self._interrupted(own)
                raise
            finally:
                operation.drain()
            self._native.end_composite(failure.code if failure else "ok")
            return failure
        finally:
            self._collective_lock.release()

    def _run_steps(
        self,
        operation: Operation,
        own: Fingerprint,
        timeout: float,
        steps: Callable[[Operation], None],
    ) -> GroupFailure | None:
        if not self._is_watching:
            self._is_watching = True
            watch_counterparts(self._layout, self._transport, self._propagator)
        header = Header(own, current_site())
        try:
            mismatch = self._compare_headers(operation, header)
            if mismatch is not None:
                return mismatch
            steps(operation)
        except NativeFailure as error:
            return self._propagator.report_status(error.status, timeout)
        except GroupBroken:
            return self.failure()
        except ConnectionLost as error:
            return self._propagator.report_connection_lost(
                error, self._propagator.format_operation(header)
            )
        except DeadlineExceeded as error:
            return self._propagator.report_timeout(
                error.peer, self._propagator.format_operation(header), timeout
            )
        except data_movement.SplitSizeMismatch as error:
            return self._propagator.report(self._split_size_failure(own, error))
        return None

    def _interrupted(self, own: Fingerprint) -> None:
        """Report that a Python exception, such as Ctrl-C or out of memory, ended an operation."""
        operation = self._formatter.format_operation(own, current_site())
        message = f"rank {self.rank} was interrupted in {operation}"
        self._propagator.report(GroupFailure("interrupted", message, self.rank))
        self._native.end_composite("interrupted")

    def _compare_headers(self, operation: Operation, own: Header) -> GroupFailure | None:
        """Check that all hosts are in the same operation, before they exchange any data.

        The ranks of a host have already compared, so only the leaders of the hosts compare, in the
        rounds of a dissemination barrier. Each round doubles the number of hosts that a leader
        knows to agree. The leader then releases the other ranks of its host.
        """
        layout = self._layout
        if layout.local_rank == LEADER:
            for ahead, behind in dissemination_rounds(layout):
                theirs = bytearray(Header.SIZE)
                received = operation.recv(memoryview(theirs), behind)
                sent = operation.send(memoryview(own.pack()), ahead)
                operation.wait(received, sent)
                header = Header.parse(theirs)
                if header.fingerprint != own.fingerprint:
                    return self._propagator.report_mismatch(own, behind, header)
        if len(layout.ranks) > 1:
            # The leader must time out first: it knows which rank it waits for.
            operation.run_local("barrier", extra=_LEADER_GRACE)
        return None

    def _split_size_failure(
        self, own: Fingerprint, error: data_movement.SplitSizeMismatch
    ) -> GroupFailure:
        message = (
            f"split sizes disagree in all_to_all #{own.sequence}: rank {error.peer} gives rank "
            f"{self.rank} {error.sent} elements, which expects {error.expected}"
            f"{self._formatter.format_site(current_site())}"
        )
        return GroupFailure("mismatch", message, self.rank, error.peer)

    def _part_addresses(self, whole: int, count: int, dtype: int) -> list[int]:
        size = count * ELEMENT_SIZES[dtype]
        return [whole + rank * size for rank in range(self._layout.size)]


def form_group(
    native: _native.Group,
    layout: Layout,
    records: list[RankRecord],
    store: Store,
    link: HostLink,
    timeout: timedelta,
    make_formatter: Callable[[Any], Formatter],
    check: Callable[[], None] | None = None,
) -> HierarchicalGroup:
    """Return a group of several hosts, which takes the place of the native group of this host.

    Blocks until all ranks have opened their transports.

    Args:
        native: The native group of this host. It is closed if this fails.
        layout: The ranks of the group by host.
        records: The host and process of each rank of the group.
        store: The group's store.
        link: The link between hosts.
        timeout: The time to wait for the other ranks.
        make_formatter: Returns the texts of failures and operations for a group.
        check: A function that is called during the wait, and may raise to end it.

    Raises:
        UsageError: This machine has no such interface, or lacks something that the transport needs.
        PhalanxError: The transport cannot be opened here or on another rank, or a rank did not open
            its transport in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    rank_label = f"rank {layout.rank}/{layout.size}"
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(native.close)
        try:
            address = own_address(store, records)
            # With the relay, ranks are reached through rank 0 only, and nothing else listens.
            endpoint = "" if link.transport == "relay" else process_endpoint(address)
            store.set(_ENDPOINT_KEY.format(layout.rank), endpoint)
            transport_store = PrefixStore("phalanx/transport", store)
            opened = open_transport(
                link.transport,
                transport_store,
                layout.rank,
                layout.size,
                address,
                link.connections,
            )
        except (OSError, TransportError, UsageError) as error:
            reason = f"the transport {link.transport} is not available: {error}"
            store.compare_set(_OPEN_KEY, "", f"on rank {layout.rank} {reason}")
            if isinstance(error, UsageError):
                raise
            raise PhalanxError(f"[{rank_label}] {reason}") from None
        on_failure.callback(opened.close)
        on_failure.callback(opened.abort)
        _wait_until_all_open(store, layout.size, rank_label, end, check)
        keys = [_ENDPOINT_KEY.format(rank) for rank in range(layout.size)]
        endpoints = [each.decode() for each in get_values(store, keys)]
        compress = link.compress
        if compress == AUTO:
            try:
                compress = choose_encoding(measure_slowest(opened, layout, store, end, check))
            except (TimeoutError, TransportError) as error:
                raise PhalanxError(
                    f"[{rank_label}] compress='auto' cannot measure the links: {error}"
                ) from None
        on_failure.pop_all()
    return HierarchicalGroup(
        native, layout, records, store, endpoints, opened, make_formatter, compress
    )


def _wait_until_all_open(
    store: Store, size: int, rank_label: str, end: float, check: Callable[[], None] | None
) -> None:
    """Wait until all ranks have opened their transports; raise if one could not."""
    if store.add(_COUNT_KEY, 1) == size:
        store.compare_set(_OPEN_KEY, "", "all")
    for _ in attempts(end):
        if check is not None:
            check()
        if store.check([_OPEN_KEY]):
            break
    else:
        raise PhalanxError(f"[{rank_label}] not all ranks have opened their transports in time")
    outcome = store.get(_OPEN_KEY).decode()
    if outcome != "all":
        raise PhalanxError(f"[{rank_label}] {outcome}")
