"""The operations that move data unchanged, and the barrier.

Each byte crosses the network once for every host that needs it. Large broadcasts go along the
rails, in a chain from host to host. all_gather goes around rings. gather, scatter and all_to_all
send from rank to rank, since only the destination needs the data. On uneven hosts, the leaders
carry the data of broadcast and all_gather for their hosts.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from phalanx.hierarchical.execution import (
    CHUNK_BYTES,
    Chunk,
    Elements,
    Run,
    Scratch,
    chunks,
    pipelined,
)
from phalanx.hierarchical.transfers import Posted

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    Steps = Generator[list[Posted], None, None]

__all__ = ["Uneven", "all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]

_SMALL_BYTES = 64 * 1024
_LEADER = 0
_COUNT = struct.Struct("<Q")


class Uneven(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """Two ranks disagree on how many elements one sends to the other in all_to_all."""

    def __init__(self, peer: int, given: int, expected: int) -> None:
        super().__init__(peer)
        self.peer, self.given, self.expected = peer, given, expected


def barrier(run: Run) -> None:
    """Block until all ranks have entered, by a dissemination barrier of the hosts' leaders.

    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. The ranks of
    this host have already synchronized when this is called.
    """
    layout = run.layout
    if layout.local_rank == _LEADER:
        token = Scratch.of(1)
        seen = Scratch.of(1)
        hosts, distance = len(layout.hosts), 1
        while distance < hosts:
            ahead = layout.leaders[(layout.host + distance) % hosts]
            behind = layout.leaders[layout.host - distance]
            run.wait(*run.take(seen, 1, behind), *run.give(token, 1, ahead))
            distance *= 2
    run.local("barrier")


def broadcast(run: Run, data: int, count: int, elements: Elements, root: int) -> None:
    """Overwrite the `count` elements at `data` with the root's."""
    layout = run.layout
    each = CHUNK_BYTES // elements.bytes
    if not layout.even or count * elements.bytes <= _SMALL_BYTES:
        steps = (_spread(run, data, chunk, elements, root) for chunk in chunks(count, each))
    else:
        each -= each % len(layout.ranks)
        steps = (
            _spread_by_rails(run, data, chunk, elements, root) for chunk in chunks(count, each)
        )
    pipelined(run, steps)


def _chain(run: Run, root: int) -> tuple[int, int, int]:
    """Return this host's position in the chain of hosts, and the previous and next host.

    The chain begins at the root's host.
    """
    hosts = len(run.layout.hosts)
    place = (run.layout.host - run.layout.host_of(root)) % hosts
    return place, (run.layout.host - 1) % hosts, (run.layout.host + 1) % hosts


def _spread(run: Run, data: int, chunk: Chunk, elements: Elements, root: int) -> Steps:
    layout = run.layout
    at, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    place, before, after = _chain(run, root)
    carriers = [ranks[0] for ranks in layout.hosts]
    carriers[layout.host_of(root)] = root
    carrier = carriers[layout.host]
    if layout.rank == carrier:
        if place > 0:
            yield run.take(at, size, carriers[before], chunk.tag)
        if place < len(layout.hosts) - 1:
            yield run.give(at, size, carriers[after], chunk.tag)
    run.local("broadcast", at, chunk.count, elements.dtype, layout.ranks.index(carrier))


def _spread_by_rails(run: Run, data: int, chunk: Chunk, elements: Elements, root: int) -> Steps:
    layout = run.layout
    ranks = len(layout.ranks)
    at = data + chunk.begin * elements.bytes
    slice_count = -(-chunk.count // ranks)
    size = slice_count * elements.bytes
    place, before, after = _chain(run, root)
    padded = chunk.count % ranks != 0
    # The root's tensor is only read: it may be in read-only memory.
    whole: int = at
    if padded or layout.rank == root:
        whole = Scratch.of(slice_count * ranks * elements.bytes)
    mine = Scratch.of(size)
    if place == 0:
        inputs: list[int] = []
        if layout.rank == root:
            source = at
            if padded:
                ctypes.memmove(whole, at, chunk.count * elements.bytes)
                source = whole
            inputs = [source + rank * size for rank in range(ranks)]
        run.local("scatter", inputs, mine, slice_count, elements.dtype, layout.ranks.index(root))
    else:
        yield run.take(mine, size, layout.rail[before], chunk.tag)
    sent = run.give(mine, size, layout.rail[after], chunk.tag) if _goes_on(run, place) else []
    run.local("all_gather_single", mine, whole, slice_count, elements.dtype)
    if whole != at and layout.rank != root:
        ctypes.memmove(at, whole, chunk.count * elements.bytes)
    yield sent


def _goes_on(run: Run, place: int) -> bool:
    return place < len(run.layout.hosts) - 1


def all_gather(run: Run, data: int, outputs: Sequence[int], count: int, elements: Elements) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on all ranks."""
    layout = run.layout
    steps = _gathered_by_rails if layout.even else _gathered_by_leaders
    each = CHUNK_BYTES // elements.bytes // max(map(len, layout.hosts))
    pipelined(run, (steps(run, data, outputs, chunk, elements) for chunk in chunks(count, each)))


def _gathered_by_rails(
    run: Run, data: int, outputs: Sequence[int], chunk: Chunk, elements: Elements
) -> Steps:
    layout = run.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    block: int = data + offset
    for step in range(hosts):
        posted, following = [], None
        if step < hosts - 1:
            following = Scratch.of(size)
            posted = run.take(following, size, behind, chunk.tag)
            posted += run.give(block, size, ahead, chunk.tag)
        places = [outputs[rank] + offset for rank in layout.hosts[host - step]]
        run.local("all_gather", block, places, chunk.count, elements.dtype)
        yield posted
        block = block if following is None else following


def _gathered_by_leaders(
    run: Run, data: int, outputs: Sequence[int], chunk: Chunk, elements: Elements
) -> Steps:
    layout = run.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    hosts, host = len(layout.hosts), layout.host
    places = [outputs[rank] + offset for rank in layout.ranks]
    run.local("all_gather", data + offset, places, chunk.count, elements.dtype)
    ahead, behind = layout.leaders[(host + 1) % hosts], layout.leaders[host - 1]
    for step in range(hosts - 1):
        posted = []
        if layout.local_rank == _LEADER:
            for rank in layout.hosts[(host - step - 1) % hosts]:
                posted += run.take(outputs[rank] + offset, size, behind, chunk.tag)
            for rank in layout.hosts[(host - step) % hosts]:
                posted += run.give(outputs[rank] + offset, size, ahead, chunk.tag)
        yield posted
        for rank in layout.hosts[(host - step - 1) % hosts]:
            place = outputs[rank] + offset
            run.local("broadcast", place, chunk.count, elements.dtype, _LEADER)


def gather(
    run: Run, data: int, outputs: Sequence[int], count: int, elements: Elements, root: int
) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on the root."""
    layout, size = run.layout, count * elements.bytes
    if root not in layout.ranks:
        run.wait(*run.give(data, size, root))
        return
    posted = []
    places: list[int] = []
    if layout.rank == root:
        places = [outputs[rank] for rank in layout.ranks]
        for rank in _elsewhere(run):
            posted += run.take(outputs[rank], size, rank)
    run.local("gather", data, places, count, elements.dtype, layout.ranks.index(root))
    run.wait(*posted)


def scatter(
    run: Run, inputs: Sequence[int], output: int, count: int, elements: Elements, root: int
) -> None:
    """Send every rank its `count` elements of the root's `inputs`, one address per rank."""
    layout, size = run.layout, count * elements.bytes
    if root not in layout.ranks:
        run.wait(*run.take(output, size, root))
        return
    posted = []
    places: list[int] = []
    if layout.rank == root:
        places = [inputs[rank] for rank in layout.ranks]
        for rank in _elsewhere(run):
            posted += run.give(inputs[rank], size, rank)
    run.local("scatter", places, output, count, elements.dtype, layout.ranks.index(root))
    run.wait(*posted)


def all_to_all(
    run: Run,
    inputs: Sequence[int],
    given: Sequence[int],
    outputs: Sequence[int],
    taken: Sequence[int],
    elements: Elements,
) -> None:
    """Send every rank the elements for it; counts may differ between pairs of ranks.

    Raises:
        Uneven: A rank of another host sends another count than this rank expects.
    """
    layout = run.layout
    _check_counts(run, given, taken)
    posted = []
    for rank in _elsewhere(run):
        posted += run.take(outputs[rank], taken[rank] * elements.bytes, rank, 1)
        posted += run.give(inputs[rank], given[rank] * elements.bytes, rank, 1)
    here = layout.ranks
    run.local(
        "all_to_all",
        *([of[rank] for rank in here] for of in (inputs, given, outputs, taken)),
        elements.dtype,
    )
    run.wait(*posted)


def _check_counts(run: Run, given: Sequence[int], taken: Sequence[int]) -> None:
    posted, told = [], {}
    for rank in _elsewhere(run):
        told[rank] = bytearray(_COUNT.size)
        posted.append(run.recv(memoryview(told[rank]), rank))
        posted.append(run.send(memoryview(bytearray(_COUNT.pack(given[rank]))), rank))
    run.wait(*posted)
    for rank, text in told.items():
        (count,) = _COUNT.unpack(text)
        if count != taken[rank]:
            raise Uneven(rank, count, taken[rank])


def _elsewhere(run: Run) -> list[int]:
    """Return the ranks of other hosts, beginning after this rank, to spread the load."""
    layout = run.layout
    order = [(layout.rank + step) % layout.size for step in range(1, layout.size)]
    return [rank for rank in order if rank not in layout.ranks]
