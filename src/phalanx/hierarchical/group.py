"""The group that replaces a native group in the backend if ranks are on several hosts."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.hierarchical import data_movement, reductions
from phalanx.hierarchical.execution import Elements, NativeFailure, Operation
from phalanx.hierarchical.failure import (
    FailurePropagator,
    GroupFailure,
    SharedGroupState,
    watch_counterparts,
)
from phalanx.hierarchical.fingerprint import Fingerprint, Header, current_site
from phalanx.hierarchical.messages import PointToPointGroup
from phalanx.hierarchical.transfers import (
    ELEMENT_SIZES,
    ConnectionLost,
    DeadlineExceeded,
    GroupBroken,
)
from phalanx.observe.escape import escape
from phalanx.observe.exception_hook import SESSION_ENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx.hierarchical.failure import Formatter
    from phalanx.topology import Layout, RankRecord
    from phalanx.transports import Transport


_MAX_EXCEPTION_CHARACTERS = 640
_LEADER_GRACE = 1.0
"""Extra seconds that the ranks of a host give their leader to report the rank it waits for."""

__all__ = ["HierarchicalGroup"]

_UINT8 = _native.DTYPES["uint8"]


class HierarchicalGroup(PointToPointGroup):
    """A rank's view of a group that spans hosts, with the methods of `_native.Group`.

    All ranks in arguments and results are ranks of the whole group. An operation that fails
    returns a `GroupFailure`, the same on all ranks, and the group is then broken.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        records: The host and process of each rank of the group.
        store: The group's store.
        transport: This rank's end of the transport that carries bytes between hosts.
        formatter: The texts of failures and operations.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        records: list[RankRecord],
        store: Store,
        transport: Transport,
        formatter: Formatter,
    ) -> None:
        native.set_global_ranks(layout.ranks, records[0].nonce)
        shared_state = SharedGroupState(store)
        propagator = FailurePropagator(native, layout, records, shared_state, transport, formatter)
        super().__init__(native, layout, propagator, transport)
        self._records = records
        self._shared_state = shared_state
        self._formatter = formatter
        self._collective_lock = threading.Lock()
        self._is_watching = False

    # Members and state.

    @property
    def rank(self) -> int:
        return self._layout.rank

    @property
    def sequence(self) -> int:
        return self._native.sequence

    @property
    def closed(self) -> bool:
        return self._native.closed

    @property
    def identity(self) -> int:
        return self._records[0].nonce  # the same on all hosts

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
            self._matcher.close()
            self._native.close()
            self.disconnect(abrupt=False)

    def disconnect(self, *, abrupt: bool) -> None:
        """Close the connections to other hosts, at the latest at the end of the process.

        Args:
            abrupt: Whether to close without waiting until peers have received sent data.
        """
        self._propagator.is_closing = True
        if not abrupt and not self._native.closed and self._propagator.failure is None:
            self._shared_state.record_exit(self.rank)
        if abrupt:
            self._transport.abort()
        self._transport.close()

    # Collectives, with the signatures of `_native.Group`.

    def barrier(self, timeout: float) -> GroupFailure | None:
        return self._run_collective("barrier", 0, _UINT8, 0, -1, timeout, data_movement.barrier)

    def broadcast(
        self, data: int, count: int, dtype: int, root: int, timeout: float
    ) -> GroupFailure | None:
        steps = partial(_broadcast, data, count, _elements(dtype), root)
        return self._run_collective("broadcast", count, dtype, 0, root, timeout, steps)

    def all_reduce(
        self, data: int, count: int, dtype: int, op: int, timeout: float
    ) -> GroupFailure | None:
        elements = self._reduction_elements(dtype, op)
        return self._run_collective(
            "all_reduce", count, dtype, op, -1, timeout,
            lambda operation: reductions.all_reduce(operation, data, count, elements),
        )  # fmt: skip

    def reduce(
        self, data: int, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> GroupFailure | None:
        elements = self._reduction_elements(dtype, op)
        return self._run_collective(
            "reduce", count, dtype, op, root, timeout,
            lambda operation: reductions.reduce(operation, data, count, elements, root),
        )  # fmt: skip

    def gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, root: int, timeout: float
    ) -> GroupFailure | None:
        return self._run_collective(
            "gather", count, dtype, 0, root, timeout,
            lambda operation: data_movement.gather(
                operation, input, outputs, count, _elements(dtype), root
            ),
        )  # fmt: skip

    def scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, root: int, timeout: float
    ) -> GroupFailure | None:
        return self._run_collective(
            "scatter", count, dtype, 0, root, timeout,
            lambda operation: data_movement.scatter(
                operation, inputs, output, count, _elements(dtype), root
            ),
        )  # fmt: skip

    def all_gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, timeout: float
    ) -> GroupFailure | None:
        return self._run_collective(
            "all_gather", count, dtype, 0, -1, timeout,
            lambda operation: data_movement.all_gather(
                operation, input, outputs, count, _elements(dtype)
            ),
        )  # fmt: skip

    def reduce_scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, op: int, timeout: float
    ) -> GroupFailure | None:
        elements = self._reduction_elements(dtype, op)
        return self._run_collective(
            "reduce_scatter", count, dtype, op, -1, timeout,
            lambda operation: reductions.reduce_scatter(operation, inputs, output, count, elements),
        )  # fmt: skip

    def all_to_all(
        self,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        outputs: Sequence[int],
        output_counts: Sequence[int],
        dtype: int,
        timeout: float,
    ) -> GroupFailure | None:
        return self._run_collective(
            "all_to_all", 0, dtype, 0, -1, timeout,
            lambda operation: data_movement.all_to_all(
                operation, inputs, input_counts, outputs, output_counts, _elements(dtype)
            ),
        )  # fmt: skip

    def all_gather_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> GroupFailure | None:
        return self.all_gather(
            input, self._part_addresses(output, count, dtype), count, dtype, timeout
        )

    def reduce_scatter_single(
        self, input: int, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> GroupFailure | None:
        inputs = self._part_addresses(input, count, dtype)
        return self.reduce_scatter(inputs, output, count, dtype, op, timeout)

    def all_to_all_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> GroupFailure | None:
        inputs, outputs = (
            self._part_addresses(input, count, dtype),
            self._part_addresses(output, count, dtype),
        )
        counts = [count] * self._layout.size
        return self.all_to_all(inputs, counts, outputs, counts, dtype, timeout)

    # Execution of collectives.

    def _run_collective(
        self,
        kind: str,
        count: int,
        dtype: int,
        op: int,
        root: int,
        timeout: float,
        steps: Callable[[Operation], None],
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
            own = Fingerprint(kind, self._native.sequence + 1, count, dtype, op, root)
            create_failure_check = self._propagator.create_failure_check
            operation = Operation(
                self._layout, self._native, self._transport, deadline, create_failure_check
            )
            try:
                status = self._native.begin_composite(kind, count, dtype, op, root, timeout)
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
                error, self._propagator.format_operation(header), timeout
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
        rounds of a dissemination barrier (Hensgen, Finkel and Manber 1988). Each round doubles the
        number of hosts that a leader knows to agree. The leader then releases the other ranks of
        its host.
        """
        layout = self._layout
        if layout.local_rank == 0:
            hosts, distance = len(layout.hosts), 1
            while distance < hosts:
                ahead = layout.leaders[(layout.host + distance) % hosts]
                behind = layout.leaders[layout.host - distance]
                theirs = bytearray(Header.SIZE)
                received = operation.recv(memoryview(theirs), behind)
                sent = operation.send(memoryview(own.pack()), ahead)
                operation.wait(received, sent)
                header = Header.parse(theirs)
                if header.fingerprint != own.fingerprint:
                    return self._propagator.report_mismatch(own, behind, header)
                distance *= 2
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

    def _reduction_elements(self, dtype: int, op: int) -> Elements:
        return Elements(dtype, ELEMENT_SIZES[dtype], op, self._layout.size)

    def _part_addresses(self, whole: int, count: int, dtype: int) -> list[int]:
        size = count * ELEMENT_SIZES[dtype]
        return [whole + rank * size for rank in range(self._layout.size)]


def _broadcast(data: int, count: int, elements: Elements, root: int, operation: Operation) -> None:
    data_movement.broadcast(operation, data, count, elements, root)


def _elements(dtype: int) -> Elements:
    return Elements(dtype, ELEMENT_SIZES[dtype])
