"""The reductions: all_reduce, reduce, reduce_scatter.

On even hosts, a large all_reduce or reduce has three steps: a reduce-scatter in memory, which
leaves each rank of a host with a slice; a reduction between hosts along the rails; and an
all-gather (for reduce, a gather) in memory. Between hosts, all_reduce is a ring (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009) and reduce is a
chain that ends at the root's host. Small reductions, and those on uneven hosts, go through the
leaders of the hosts, which exchange the partial results of their hosts and combine them in the
order of the hosts. The order of combination depends only on sizes and layout, so results are the
same in every run and on all ranks.
"""

from __future__ import annotations

import ctypes
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

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from phalanx.hierarchical.transfers import Posted

    Steps = Generator[list[Posted], None, None]

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

_SMALL_BYTES = 64 * 1024
_LEADER = 0


def all_reduce(run: Run, data: int, count: int, elements: Elements) -> None:
    """Combine the `count` elements at `data` of all ranks, in place."""
    layout = run.layout
    each = CHUNK_BYTES // elements.bytes
    if not layout.even or count * elements.bytes <= _SMALL_BYTES:
        steps = (_by_leaders(run, data, chunk, elements) for chunk in chunks(count, each))
    else:
        each -= each % (len(layout.ranks) * len(layout.hosts))
        steps = (_by_rails(run, data, chunk, elements) for chunk in chunks(count, each))
    pipelined(run, steps)


def _by_leaders(run: Run, data: int, chunk: Chunk, elements: Elements) -> Steps:
    layout = run.layout
    at, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    run.local("reduce", at, chunk.count, elements.dtype, elements.partial, _LEADER)
    if layout.local_rank == _LEADER:
        others = [leader for leader in layout.leaders if leader != layout.rank]
        theirs = {leader: Scratch.of(size) for leader in others}
        posted = []
        for leader in others:
            posted += run.take(theirs[leader], size, leader, chunk.tag)
            posted += run.give(at, size, leader, chunk.tag)
        yield posted
        parts = [theirs.get(leader, at) for leader in layout.leaders]
        result = Scratch.of(size)
        elements.combine(result, parts, chunk.count, last=True)
        ctypes.memmove(at, result, size)
    else:
        yield []
    run.local("broadcast", at, chunk.count, elements.dtype, _LEADER)


def _by_rails(run: Run, data: int, chunk: Chunk, elements: Elements) -> Steps:
    ranks = len(run.layout.ranks)
    at = data + chunk.begin * elements.bytes
    whole, count = _padded(at, chunk, elements, ranks)
    slice_count = count // ranks
    mine = Scratch.of(slice_count * elements.bytes)
    run.local("reduce_scatter_single", whole, mine, slice_count, elements.dtype, elements.partial)
    yield from _ring(run, mine, slice_count, chunk.tag, elements)
    run.local("all_gather_single", mine, whole, slice_count, elements.dtype)
    if whole != at:
        ctypes.memmove(at, whole, chunk.count * elements.bytes)


def _padded(at: int, chunk: Chunk, elements: Elements, ranks: int) -> tuple[int, int]:
    """Return the address and count of a chunk that the ranks of a host can share equally.

    The chunk is copied and padded with zeros if its count is not a multiple of `ranks`.
    """
    left = chunk.count % ranks
    if not left:
        return at, chunk.count
    count = chunk.count + ranks - left
    copy = Scratch.of(count * elements.bytes)
    ctypes.memmove(copy, at, chunk.count * elements.bytes)
    ctypes.memset(copy + chunk.count * elements.bytes, 0, (ranks - left) * elements.bytes)
    return copy, count


def _ring(run: Run, mine: int, count: int, tag: int, elements: Elements) -> Steps:
    """All-reduce along the rail: a ring reduce-scatter, then a ring all-gather."""
    layout = run.layout
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    ends = [count * number // hosts for number in range(hosts + 1)]

    def span(number: int) -> tuple[int, int]:
        number %= hosts
        begin = ends[number]
        return mine + begin * elements.bytes, ends[number + 1] - begin

    theirs = Scratch.of((-(-count // hosts)) * elements.bytes)
    for step in range(hosts - 1):
        given, taken = span(host - step), span(host - step - 1)
        yield [
            *run.take(theirs, taken[1] * elements.bytes, behind, tag),
            *run.give(given[0], given[1] * elements.bytes, ahead, tag),
        ]
        last = step == hosts - 2
        elements.combine(taken[0], [theirs, taken[0]], taken[1], last=last)
    for step in range(hosts - 1):
        given, taken = span(host + 1 - step), span(host - step)
        yield [
            *run.take(taken[0], taken[1] * elements.bytes, behind, tag),
            *run.give(given[0], given[1] * elements.bytes, ahead, tag),
        ]


def reduce(run: Run, data: int, count: int, elements: Elements, root: int) -> None:
    """Combine the `count` elements at `data` of all ranks; the root gets the result, in place."""
    layout = run.layout
    each = CHUNK_BYTES // elements.bytes
    if not layout.even or count * elements.bytes <= _SMALL_BYTES:
        steps = (_to_root(run, data, chunk, elements, root) for chunk in chunks(count, each))
    else:
        each -= each % len(layout.ranks)
        steps = (_along_chains(run, data, chunk, elements, root) for chunk in chunks(count, each))
    pipelined(run, steps)


def _to_root(run: Run, data: int, chunk: Chunk, elements: Elements, root: int) -> Steps:
    layout = run.layout
    at, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    home = layout.host_of(root)
    here = layout.host == home
    carrier = layout.ranks.index(root) if here else _LEADER
    own = at
    if layout.local_rank == carrier:
        # Only the root's tensor may be written.
        own = Scratch.of(size)
        ctypes.memmove(own, at, size)
    run.local("reduce", own, chunk.count, elements.dtype, elements.partial, carrier)
    if layout.rank == root:
        parts: list[int] = [own] * len(layout.hosts)
        posted = []
        for number, ranks in enumerate(layout.hosts):
            if number != home:
                parts[number] = Scratch.of(size)
                posted += run.take(parts[number], size, ranks[0], chunk.tag)
        yield posted
        elements.combine(at, parts, chunk.count, last=True)
    elif layout.local_rank == carrier and not here:
        yield run.give(own, size, root, chunk.tag)


def _along_chains(run: Run, data: int, chunk: Chunk, elements: Elements, root: int) -> Steps:
    layout = run.layout
    at = data + chunk.begin * elements.bytes
    hosts, ranks, home = len(layout.hosts), len(layout.ranks), layout.host_of(root)
    whole, count = _padded(at, chunk, elements, ranks)
    slice_count = count // ranks
    size = slice_count * elements.bytes
    mine = Scratch.of(size)
    run.local("reduce_scatter_single", whole, mine, slice_count, elements.dtype, elements.partial)
    place = (layout.host - home - 1) % hosts  # position in the chain that ends at the root's host
    if place > 0:
        theirs = Scratch.of(size)
        yield run.take(theirs, size, layout.rail[layout.host - 1], chunk.tag)
        last = place == hosts - 1
        elements.combine(mine, [theirs, mine], slice_count, last=last)
    if place < hosts - 1:
        yield run.give(mine, size, layout.rail[(layout.host + 1) % hosts], chunk.tag)
        return
    outputs: list[int] = []
    if layout.rank == root:
        if whole != at:
            whole = Scratch.of(count * elements.bytes)
        outputs = [whole + rank * size for rank in range(ranks)]
    run.local("gather", mine, outputs, slice_count, elements.dtype, layout.ranks.index(root))
    if layout.rank == root and whole != at:
        ctypes.memmove(at, whole, chunk.count * elements.bytes)


def reduce_scatter(
    run: Run, inputs: Sequence[int], output: int, count: int, elements: Elements
) -> None:
    """Combine the inputs of all ranks, one of `count` elements per rank; rank r gets the r-th."""
    layout = run.layout
    steps = _scattered_by_rails if layout.even else _scattered_by_leaders
    each = CHUNK_BYTES // elements.bytes // max(map(len, layout.hosts))
    pipelined(run, (steps(run, inputs, output, chunk, elements) for chunk in chunks(count, each)))


def _scattered_by_rails(
    run: Run, inputs: Sequence[int], output: int, chunk: Chunk, elements: Elements
) -> Steps:
    layout = run.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    parts = [Scratch.of(size) for _ in layout.hosts]
    theirs = [Scratch.of(size) for _ in layout.hosts]
    posted = []
    for step in range(1, len(layout.hosts) + 1):
        host = (layout.host + step) % len(layout.hosts)
        sources = [inputs[rank] + offset for rank in layout.hosts[host]]
        run.local(
            "reduce_scatter", sources, parts[host], chunk.count, elements.dtype, elements.partial
        )
        if host != layout.host:
            posted += run.take(theirs[host], size, layout.rail[host], chunk.tag)
            posted += run.give(parts[host], size, layout.rail[host], chunk.tag)
    yield posted
    theirs[layout.host] = parts[layout.host]
    elements.combine(output + offset, theirs, chunk.count, last=True)


def _scattered_by_leaders(
    run: Run, inputs: Sequence[int], output: int, chunk: Chunk, elements: Elements
) -> Steps:
    layout = run.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    leads = layout.local_rank == _LEADER
    posted, own, theirs = [], {}, {}
    for host, ranks in enumerate(layout.hosts):
        for rank in ranks:
            part = inputs[rank] + offset
            if leads:
                own[rank] = Scratch.of(size)
                ctypes.memmove(own[rank], part, size)
                part = own[rank]
            run.local("reduce", part, chunk.count, elements.dtype, elements.partial, _LEADER)
            if leads and host != layout.host:
                posted += run.give(part, size, ranks[0], chunk.tag)
    if leads:
        for peer in (leader for leader in layout.leaders if leader != layout.rank):
            for rank in layout.ranks:
                theirs[peer, rank] = Scratch.of(size)
                posted += run.take(theirs[peer, rank], size, peer, chunk.tag)
    yield posted
    results: list[int] = []
    for rank in layout.ranks if leads else ():
        parts = [theirs.get((leader, rank), own[rank]) for leader in layout.leaders]
        results.append(Scratch.of(size))
        elements.combine(results[-1], parts, chunk.count, last=True)
    run.local("scatter", results, output + offset, chunk.count, elements.dtype, _LEADER)
