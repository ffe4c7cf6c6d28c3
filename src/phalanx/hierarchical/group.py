"""Replacement of a native group for the backend if ranks are on several hosts."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx import _native
from phalanx.hierarchical import data_movement, reductions
from phalanx.hierarchical.element_sizes import BYTES
from phalanx.hierarchical.execution import Elements, Refused, Run
from phalanx.hierarchical.failure_detector import watch
from phalanx.hierarchical.failure_propagation import Failing
from phalanx.hierarchical.fingerprint import Fingerprint, Header
from phalanx.hierarchical.group_failure import Story, Told
from phalanx.hierarchical.messages import HostsMessages
from phalanx.hierarchical.transfers import Broken, Gone, Late
from phalanx.observe.escape import escape
from phalanx.observe.exception_hook import SESSION_ENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx.hierarchical.failure_propagation import Words
    from phalanx.topology import Layout, Place
    from phalanx.transports import Transport

    Answer = Told | None

_MOST_WORDS = 640
_LEADER_FIRST = 1.0
"""Extra seconds that the ranks of a host give their leader to report why it is late."""

__all__ = ["HostsGroup"]

_UINT8 = _native.DTYPES["uint8"]


class HostsGroup(HostsMessages):
    """A rank's view of a group that spans hosts, with the methods of `_native.Group`.

    All ranks in arguments and results are ranks of the whole group. An operation that fails
    returns a `Told`, the same on all ranks, and the group is then broken.

    Args:
        native: The native group of this host.
        layout: The ranks of the group by host.
        places: The host and process of each rank of the group.
        store: The group's store.
        transport: This rank's end of the transport that carries bytes between hosts.
        words: The backend's wording of failures and operations.
    """

    def __init__(
        self,
        native: _native.Group,
        layout: Layout,
        places: list[Place],
        store: Store,
        transport: Transport,
        words: Words,
    ) -> None:
        native.set_global_ranks(layout.ranks, places[0].nonce)
        story = Story(store)
        failing = Failing(native, layout, places, story, transport, words)
        super().__init__(native, layout, failing, transport)
        self._places = places
        self._story = story
        self._words = words
        self._turn = threading.Lock()
        self._watching = False

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
        return self._places[0].nonce  # the same on all hosts

    def pid(self, rank: int) -> int:
        return self._places[rank].pid

    def host(self, rank: int) -> str:
        """Return the display name of a rank's host; empty for this rank's host."""
        return "" if rank in self._layout.ranks else self._places[rank].host

    def wait_status(self, rank: int) -> int | None:
        local = self._local(rank)
        return None if local is None else self._native.wait_status(local)

    def is_failing(self, rank: int) -> bool:
        local = self._local(rank)
        return local is not None and self._native.is_failing(local)

    def flight_recorder(self, rank: int, history: int) -> dict[str, Any] | None:
        local = self._local(rank)
        return None if local is None else self._native.flight_recorder(local, history)

    def is_awaited(self) -> bool:
        """Return False: the progress of ranks of other hosts is unknown."""
        return False

    def ranks_behind(self, rank: int) -> list[int]:
        """Return the ranks of this host that are behind `rank` in the group's collectives.

        Returns none if `rank` is on another host.
        """
        local = self._local(rank)
        late = [] if local is None else self._native.ranks_behind(local)
        return [self._layout.ranks[other] for other in late]

    def failure(self) -> Answer:
        if self._failing.told is None:
            try:
                status = self._native.failure()
            except ValueError:  # closed
                return Told("left", f"rank {self.rank} has left the group", self.rank, self.rank)
            if status is not None:
                return self._failing.seen(status, 0.0)
        return self._failing.told

    def abort(self, why: str) -> Answer:
        site = self._words.ending(_site())
        words = f"the group was aborted by rank {self.rank}{site}{': ' + why if why else ''}"
        return self._failing.tell(Told("aborted", words, self.rank))

    def abort_deadlock(self, peer: int, why: str) -> Answer:
        return self._failing.tell(Told("deadlock", why, self.rank, peer))

    def fail(self, wake: bool, why: str = "") -> None:
        """Report an exception that ends this rank's part: for its peers it is lost from now on.

        Args:
            wake: Whether to wake waiting peers and to share the reason with other hosts. A process
                with several groups first reports to all of them without it.
            why: The reason; by default the exception in this rank's flight recorder.
        """
        if wake and self._failing.told is None:
            box = self._native.flight_recorder(self._layout.local_rank, 0)
            last = why.removeprefix(SESSION_ENDED) or escape(
                box["exception"] if box else "", _MOST_WORDS
            )
            ending = f"failed with {last or 'an exception that nobody caught'}"
            words = f"{self._failing.name(self.rank)} {ending}"
            self._story.tell(Told("peer_lost", words, self.rank, self.rank))
        self._native.fail(wake, why)
        if wake:
            self._transport.abort()

    def close(self) -> None:
        if not self._native.closed:
            if self._failing.told is None:
                self._story.leave(self.rank, _site())
            self._inbox.close()
            self._native.close()
            self.disconnect(abrupt=False)

    def disconnect(self, *, abrupt: bool) -> None:
        """Close the connections to other hosts, at the latest at the end of the process.

        Args:
            abrupt: Whether to close without waiting until peers have received sent data.
        """
        self._failing.closing = True
        if not abrupt and not self._native.closed and self._failing.told is None:
            self._story.end(self.rank)
        if abrupt:
            self._transport.abort()
        self._transport.close()

    # Collectives, with the signatures of `_native.Group`.

    def barrier(self, timeout: float) -> Answer:
        return self._composed("barrier", 0, _UINT8, 0, -1, timeout, data_movement.barrier)

    def broadcast(self, data: int, count: int, dtype: int, root: int, timeout: float) -> Answer:
        body = partial(_broadcast, data, count, _elements(dtype), root)
        return self._composed("broadcast", count, dtype, 0, root, timeout, body)

    def all_reduce(self, data: int, count: int, dtype: int, op: int, timeout: float) -> Answer:
        elements = self._combined(dtype, op)
        return self._composed(
            "all_reduce", count, dtype, op, -1, timeout,
            lambda run: reductions.all_reduce(run, data, count, elements),
        )  # fmt: skip

    def reduce(
        self, data: int, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> Answer:
        elements = self._combined(dtype, op)
        return self._composed(
            "reduce", count, dtype, op, root, timeout,
            lambda run: reductions.reduce(run, data, count, elements, root),
        )  # fmt: skip

    def gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, root: int, timeout: float
    ) -> Answer:
        return self._composed(
            "gather", count, dtype, 0, root, timeout,
            lambda run: data_movement.gather(run, input, outputs, count, _elements(dtype), root),
        )  # fmt: skip

    def scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, root: int, timeout: float
    ) -> Answer:
        return self._composed(
            "scatter", count, dtype, 0, root, timeout,
            lambda run: data_movement.scatter(run, inputs, output, count, _elements(dtype), root),
        )  # fmt: skip

    def all_gather(
        self, input: int, outputs: Sequence[int], count: int, dtype: int, timeout: float
    ) -> Answer:
        return self._composed(
            "all_gather", count, dtype, 0, -1, timeout,
            lambda run: data_movement.all_gather(run, input, outputs, count, _elements(dtype)),
        )  # fmt: skip

    def reduce_scatter(
        self, inputs: Sequence[int], output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Answer:
        elements = self._combined(dtype, op)
        return self._composed(
            "reduce_scatter", count, dtype, op, -1, timeout,
            lambda run: reductions.reduce_scatter(run, inputs, output, count, elements),
        )  # fmt: skip

    def all_to_all(
        self,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        outputs: Sequence[int],
        output_counts: Sequence[int],
        dtype: int,
        timeout: float,
    ) -> Answer:
        return self._composed(
            "all_to_all", 0, dtype, 0, -1, timeout,
            lambda run: data_movement.all_to_all(
                run, inputs, input_counts, outputs, output_counts, _elements(dtype)
            ),
        )  # fmt: skip

    def all_gather_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Answer:
        return self.all_gather(input, self._parts(output, count, dtype), count, dtype, timeout)

    def reduce_scatter_single(
        self, input: int, output: int, count: int, dtype: int, op: int, timeout: float
    ) -> Answer:
        inputs = self._parts(input, count, dtype)
        return self.reduce_scatter(inputs, output, count, dtype, op, timeout)

    def all_to_all_single(
        self, input: int, output: int, count: int, dtype: int, timeout: float
    ) -> Answer:
        inputs, outputs = self._parts(input, count, dtype), self._parts(output, count, dtype)
        counts = [count] * self._layout.size
        return self.all_to_all(inputs, counts, outputs, counts, dtype, timeout)

    # Execution of collectives.

    def _composed(
        self,
        kind: str,
        count: int,
        dtype: int,
        op: int,
        root: int,
        timeout: float,
        body: Callable[[Run], None],
    ) -> Answer:
        """Synchronize with the ranks of this host, compare with other hosts, and run `body`."""
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            words = (
                f"rank {self.rank} waited for its own turn until the timeout of {timeout:g} s: "
                "another thread of it is in an operation of this group"
            )
            return self._failing.tell(Told("timeout", words, self.rank, self.rank))
        try:
            own = Fingerprint(kind, self._native.sequence + 1, count, dtype, op, root)
            looking = self._failing.looking
            run = Run(self._layout, self._native, self._transport, deadline, looking)
            try:
                status = self._native.begin_composite(kind, count, dtype, op, root, timeout)
                if status is not None:
                    return self._failing.seen(status, timeout)
                answer = self._run(run, own, timeout, body)
            except BaseException:
                if self._native.closed:  # another thread has left the group meanwhile
                    return self.failure()
                self._interrupted(own)
                raise
            finally:
                run.settle()
            self._native.end_composite(answer.code if answer else "ok")
            return answer
        finally:
            self._turn.release()

    def _run(
        self, run: Run, own: Fingerprint, timeout: float, body: Callable[[Run], None]
    ) -> Answer:
        if not self._watching:
            self._watching = True
            watch(self._layout, self._transport, self._failing)
        header = Header(own, _site())
        try:
            differs = self._compare(run, header)
            if differs is not None:
                return differs
            body(run)
        except Refused as refused:
            return self._failing.seen(refused.status, timeout)
        except Broken:
            return self.failure()
        except Gone as gone:
            return self._failing.gone(gone, self._failing.operation(header))
        except Late as late:
            return self._failing.late(late, self._failing.operation(header), timeout)
        except data_movement.Uneven as uneven:
            return self._failing.tell(self._uneven(own, uneven))
        return None

    def _interrupted(self, own: Fingerprint) -> None:
        """Report that a Python exception, such as Ctrl-C or out of memory, ended an operation."""
        words = f"rank {self.rank} was interrupted in {self._words.operation(own, _site())}"
        self._failing.tell(Told("interrupted", words, self.rank))
        self._native.end_composite("interrupted")

    def _compare(self, run: Run, own: Header) -> Answer:
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
                taken = run.recv(memoryview(theirs), behind)
                given = run.send(memoryview(own.pack()), ahead)
                run.wait(taken, given)
                header = Header.parse(theirs)
                if header.fingerprint != own.fingerprint:
                    return self._failing.differs(own, behind, header)
                distance *= 2
        if len(layout.ranks) > 1:
            # The leader must time out first: it knows which rank it waits for.
            run.local("barrier", extra=_LEADER_FIRST)
        return None

    def _uneven(self, own: Fingerprint, uneven: data_movement.Uneven) -> Told:
        words = (
            f"split sizes disagree in all_to_all #{own.sequence}: rank {uneven.peer} gives rank "
            f"{self.rank} {uneven.given} elements, which expects {uneven.expected}"
            f"{self._words.ending(_site())}"
        )
        return Told("mismatch", words, self.rank, uneven.peer)

    def _combined(self, dtype: int, op: int) -> Elements:
        return Elements(dtype, BYTES[dtype], op, self._layout.size)

    def _parts(self, whole: int, count: int, dtype: int) -> list[int]:
        size = count * BYTES[dtype]
        return [whole + rank * size for rank in range(self._layout.size)]


def _broadcast(data: int, count: int, elements: Elements, root: int, run: Run) -> None:
    data_movement.broadcast(run, data, count, elements, root)


def _elements(dtype: int) -> Elements:
    return Elements(dtype, BYTES[dtype])


def _site() -> str:
    return _native.call_site_text(_native.call_site())
