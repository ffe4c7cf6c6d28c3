"""The reductions: all_reduce, reduce, reduce_scatter.

On even hosts, a large all_reduce or reduce has three steps: a reduce-scatter in memory, which
leaves chunk_count rank of a host with a slice; a reduction between hosts along the rails; and an
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
    Operation,
    Scratch,
    Steps,
    run_pipeline,
    split_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["all_reduce", "reduce", "reduce_scatter"]

_SMALL_BYTES = 64 * 1024
_LEADER = 0


def all_reduce(operation: Operation, data: int, count: int, elements: Elements) -> None:
    """Combine the `count` elements at `data` of all ranks, in place."""
    layout = operation.layout
    chunk_count = CHUNK_BYTES // elements.bytes
    if not layout.is_even or count * elements.bytes <= _SMALL_BYTES:
        steps = (
            _all_reduce_by_leaders(operation, data, chunk, elements)
            for chunk in split_chunks(count, chunk_count)
        )
    else:
        chunk_count -= chunk_count % (len(layout.ranks) * len(layout.hosts))
        steps = (
            _all_reduce_by_rails(operation, data, chunk, elements)
            for chunk in split_chunks(count, chunk_count)
        )
    run_pipeline(operation, steps)


def _all_reduce_by_leaders(
    operation: Operation, data: int, chunk: Chunk, elements: Elements
) -> Steps:
    layout = operation.layout
    address, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    operation.run_local(
        "reduce", address, chunk.count, elements.dtype, elements.partial_op, _LEADER
    )
    if layout.local_rank == _LEADER:
        others = [leader for leader in layout.leaders if leader != layout.rank]
        theirs = {leader: Scratch.allocate(size) for leader in others}
        transfers = []
        for leader in others:
            transfers += operation.post_recv(theirs[leader], size, leader, chunk.tag)
            transfers += operation.post_send(address, size, leader, chunk.tag)
        yield transfers
        parts = [theirs.get(leader, address) for leader in layout.leaders]
        result = Scratch.allocate(size)
        elements.combine(result, parts, chunk.count, last=True)
        ctypes.memmove(address, result, size)
    else:
        yield []
    operation.run_local("broadcast", address, chunk.count, elements.dtype, _LEADER)


def _all_reduce_by_rails(
    operation: Operation, data: int, chunk: Chunk, elements: Elements
) -> Steps:
    ranks = len(operation.layout.ranks)
    address = data + chunk.begin * elements.bytes
    whole, count = _pad(address, chunk, elements, ranks)
    slice_count = count // ranks
    own_slice = Scratch.allocate(slice_count * elements.bytes)
    operation.run_local(
        "reduce_scatter_single", whole, own_slice, slice_count, elements.dtype, elements.partial_op
    )
    yield from _ring_all_reduce(operation, own_slice, slice_count, chunk.tag, elements)
    operation.run_local("all_gather_single", own_slice, whole, slice_count, elements.dtype)
    if whole != address:
        ctypes.memmove(address, whole, chunk.count * elements.bytes)


def _pad(address: int, chunk: Chunk, elements: Elements, ranks: int) -> tuple[int, int]:
    """Return the address and count of a chunk that the ranks of a host can share equally.

    The chunk is copied and padded with zeros if its count is not a multiple of `ranks`.
    """
    remainder = chunk.count % ranks
    if not remainder:
        return address, chunk.count
    count = chunk.count + ranks - remainder
    copy = Scratch.allocate(count * elements.bytes)
    ctypes.memmove(copy, address, chunk.count * elements.bytes)
    ctypes.memset(copy + chunk.count * elements.bytes, 0, (ranks - remainder) * elements.bytes)
    return copy, count


def _ring_all_reduce(
    operation: Operation, own_slice: int, count: int, tag: int, elements: Elements
) -> Steps:
    """All-reduce along the rail: a ring reduce-scatter, then a ring all-gather."""
    layout = operation.layout
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    ends = [count * number // hosts for number in range(hosts + 1)]

    def part(number: int) -> tuple[int, int]:
        number %= hosts
        begin = ends[number]
        return own_slice + begin * elements.bytes, ends[number + 1] - begin

    theirs = Scratch.allocate((-(-count // hosts)) * elements.bytes)
    for step in range(hosts - 1):
        sent, received = part(host - step), part(host - step - 1)
        yield [
            *operation.post_recv(theirs, received[1] * elements.bytes, behind, tag),
            *operation.post_send(sent[0], sent[1] * elements.bytes, ahead, tag),
        ]
        last = step == hosts - 2
        elements.combine(received[0], [theirs, received[0]], received[1], last=last)
    for step in range(hosts - 1):
        sent, received = part(host + 1 - step), part(host - step)
        yield [
            *operation.post_recv(received[0], received[1] * elements.bytes, behind, tag),
            *operation.post_send(sent[0], sent[1] * elements.bytes, ahead, tag),
        ]


def reduce(operation: Operation, data: int, count: int, elements: Elements, root: int) -> None:
    """Combine the `count` elements at `data` of all ranks; the root gets the result, in place."""
    layout = operation.layout
    chunk_count = CHUNK_BYTES // elements.bytes
    if not layout.is_even or count * elements.bytes <= _SMALL_BYTES:
        steps = (
            _reduce_to_root(operation, data, chunk, elements, root)
            for chunk in split_chunks(count, chunk_count)
        )
    else:
        chunk_count -= chunk_count % len(layout.ranks)
        steps = (
            _reduce_by_rails(operation, data, chunk, elements, root)
            for chunk in split_chunks(count, chunk_count)
        )
    run_pipeline(operation, steps)


def _reduce_to_root(
    operation: Operation, data: int, chunk: Chunk, elements: Elements, root: int
) -> Steps:
    layout = operation.layout
    address, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    root_host = layout.host_of(root)
    on_root_host = layout.host == root_host
    local_root = layout.ranks.index(root) if on_root_host else _LEADER
    own = address
    if layout.local_rank == local_root:
        # Only the root's tensor may be written.
        own = Scratch.allocate(size)
        ctypes.memmove(own, address, size)
    operation.run_local("reduce", own, chunk.count, elements.dtype, elements.partial_op, local_root)
    if layout.rank == root:
        parts: list[int] = [own] * len(layout.hosts)
        transfers = []
        for number, ranks in enumerate(layout.hosts):
            if number != root_host:
                parts[number] = Scratch.allocate(size)
                transfers += operation.post_recv(parts[number], size, ranks[0], chunk.tag)
        yield transfers
        elements.combine(address, parts, chunk.count, last=True)
    elif layout.local_rank == local_root and not on_root_host:
        yield operation.post_send(own, size, root, chunk.tag)


def _reduce_by_rails(
    operation: Operation, data: int, chunk: Chunk, elements: Elements, root: int
) -> Steps:
    layout = operation.layout
    address = data + chunk.begin * elements.bytes
    hosts, ranks, root_host = len(layout.hosts), len(layout.ranks), layout.host_of(root)
    whole, count = _pad(address, chunk, elements, ranks)
    slice_count = count // ranks
    size = slice_count * elements.bytes
    own_slice = Scratch.allocate(size)
    operation.run_local(
        "reduce_scatter_single", whole, own_slice, slice_count, elements.dtype, elements.partial_op
    )
    position = (layout.host - root_host - 1) % hosts  # in the chain that ends at the root's host
    if position > 0:
        theirs = Scratch.allocate(size)
        yield operation.post_recv(theirs, size, layout.rail[layout.host - 1], chunk.tag)
        last = position == hosts - 1
        elements.combine(own_slice, [theirs, own_slice], slice_count, last=last)
    if position < hosts - 1:
        yield operation.post_send(
            own_slice, size, layout.rail[(layout.host + 1) % hosts], chunk.tag
        )
        return
    outputs: list[int] = []
    if layout.rank == root:
        if whole != address:
            whole = Scratch.allocate(count * elements.bytes)
        outputs = [whole + rank * size for rank in range(ranks)]
    operation.run_local(
        "gather", own_slice, outputs, slice_count, elements.dtype, layout.ranks.index(root)
    )
    if layout.rank == root and whole != address:
        ctypes.memmove(address, whole, chunk.count * elements.bytes)


def reduce_scatter(
    operation: Operation, inputs: Sequence[int], output: int, count: int, elements: Elements
) -> None:
    """Combine the inputs of all ranks, one of `count` elements per rank; rank r gets the r-th."""
    layout = operation.layout
    steps = _reduce_scatter_by_rails if layout.is_even else _reduce_scatter_by_leaders
    chunk_count = CHUNK_BYTES // elements.bytes // max(map(len, layout.hosts))
    run_pipeline(
        operation,
        (
            steps(operation, inputs, output, chunk, elements)
            for chunk in split_chunks(count, chunk_count)
        ),
    )


def _reduce_scatter_by_rails(
    operation: Operation, inputs: Sequence[int], output: int, chunk: Chunk, elements: Elements
) -> Steps:
    layout = operation.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    parts = [Scratch.allocate(size) for _ in layout.hosts]
    theirs = [Scratch.allocate(size) for _ in layout.hosts]
    transfers = []
    for step in range(1, len(layout.hosts) + 1):
        host = (layout.host + step) % len(layout.hosts)
        sources = [inputs[rank] + offset for rank in layout.hosts[host]]
        operation.run_local(
            "reduce_scatter", sources, parts[host], chunk.count, elements.dtype, elements.partial_op
        )
        if host != layout.host:
            transfers += operation.post_recv(theirs[host], size, layout.rail[host], chunk.tag)
            transfers += operation.post_send(parts[host], size, layout.rail[host], chunk.tag)
    yield transfers
    theirs[layout.host] = parts[layout.host]
    elements.combine(output + offset, theirs, chunk.count, last=True)


def _reduce_scatter_by_leaders(
    operation: Operation, inputs: Sequence[int], output: int, chunk: Chunk, elements: Elements
) -> Steps:
    layout = operation.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    is_leader = layout.local_rank == _LEADER
    transfers, own, theirs = [], {}, {}
    for host, ranks in enumerate(layout.hosts):
        for rank in ranks:
            part = inputs[rank] + offset
            if is_leader:
                own[rank] = Scratch.allocate(size)
                ctypes.memmove(own[rank], part, size)
                part = own[rank]
            operation.run_local(
                "reduce", part, chunk.count, elements.dtype, elements.partial_op, _LEADER
            )
            if is_leader and host != layout.host:
                transfers += operation.post_send(part, size, ranks[0], chunk.tag)
    if is_leader:
        for peer in (leader for leader in layout.leaders if leader != layout.rank):
            for rank in layout.ranks:
                theirs[peer, rank] = Scratch.allocate(size)
                transfers += operation.post_recv(theirs[peer, rank], size, peer, chunk.tag)
    yield transfers
    results: list[int] = []
    for rank in layout.ranks if is_leader else ():
        parts = [theirs.get((leader, rank), own[rank]) for leader in layout.leaders]
        results.append(Scratch.allocate(size))
        elements.combine(results[-1], parts, chunk.count, last=True)
    operation.run_local("scatter", results, output + offset, chunk.count, elements.dtype, _LEADER)
