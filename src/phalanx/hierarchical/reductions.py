"""The reductions: all_reduce, reduce, reduce_scatter.

On even hosts, a large all_reduce or reduce has three steps: a reduce-scatter in memory, which
leaves each rank of a host with a slice; a reduction between hosts along the rails; and an
all-gather (for reduce, a gather) in memory. Between hosts, all_reduce is a ring (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009) and reduce is a
chain that ends at the root's host. Small reductions, and those on uneven hosts, go through the
leaders of the hosts, which exchange the partial results of their hosts and combine them in the
order of the hosts. The order of combination depends only on sizes and layout, so results are the
same in every run and on all ranks. If what crosses between hosts is compressed, the hosts exchange
parts of their partial results instead (`compression`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from phalanx.hierarchical.compression import (
    BLOCK,
    NOWHERE,
    CompressedLink,
    all_reduce_between_hosts,
    make_link,
)
from phalanx.hierarchical.execution import (
    LEADER,
    Chunk,
    Operation,
    Scratch,
    Steps,
    is_for_rails,
    run_chunks,
)


def all_reduce(operation: Operation, data: int, count: int) -> None:
    """Combine the `count` elements at `data` of all ranks, in place."""
    layout, block = operation.layout, _block(operation)
    if is_for_rails(operation, count):
        multiple = len(layout.ranks) * max(block, len(layout.hosts))
        run_chunks(operation, _all_reduce_by_rails, count, data, multiple=multiple)
    else:
        run_chunks(operation, _all_reduce_by_leaders, count, data, multiple=block)


def _block(operation: Operation) -> int:
    """Return the number of elements of which the parts of an operation are multiples."""
    return BLOCK if operation.compression is not None else 1


def _all_reduce_by_leaders(operation: Operation, chunk: Chunk, data: int) -> Steps:
    layout, elements = operation.layout, operation.elements
    address, count = data + chunk.offset, chunk.count
    operation.run_local("reduce", address, count, elements.dtype, elements.partial_op, LEADER)
    link = make_link(operation, chunk.tag)
    if isinstance(link, CompressedLink):
        members = layout.leaders
        steps = all_reduce_between_hosts(link, operation, address, count, members, address)
        # All ranks of a host make equally many steps.
        yield from steps if layout.local_rank == LEADER else ([], [])
    elif layout.local_rank == LEADER:
        others = [leader for leader in layout.leaders if leader != layout.rank]
        theirs = {leader: Scratch.allocate(chunk.size) for leader in others}
        transfers = []
        for leader in others:
            transfers += operation.post_recv(theirs[leader], chunk.size, leader, chunk.tag)
            transfers += operation.post_send(address, chunk.size, leader, chunk.tag)
        yield transfers
        parts = [theirs.get(leader, address) for leader in layout.leaders]
        result = Scratch.allocate(chunk.size)
        elements.combine(result, parts, count, last=True)
        ctypes.memmove(address, result, chunk.size)
    else:
        yield []
    operation.run_local("broadcast", address, count, elements.dtype, LEADER)


def _all_reduce_by_rails(operation: Operation, chunk: Chunk, data: int) -> Steps:
    address, dtype = data + chunk.offset, operation.elements.dtype
    whole, own_slice, slice_count = _reduce_scatter_chunk(
        operation, address, chunk, _block(operation)
    )
    link, layout = make_link(operation, chunk.tag), operation.layout
    if isinstance(link, CompressedLink):
        begin = layout.local_rank * slice_count
        origin = address + begin * operation.elements.bytes if begin < chunk.count else NOWHERE
        yield from all_reduce_between_hosts(
            link, operation, own_slice, slice_count, layout.rail, origin
        )
    else:
        yield from _ring_all_reduce(operation, own_slice, slice_count, chunk.tag)
    operation.run_local("all_gather_single", own_slice, whole, slice_count, dtype)
    if whole != address:
        ctypes.memmove(address, whole, chunk.size)


def _reduce_scatter_chunk(
    operation: Operation, address: int, chunk: Chunk, multiple: int = 1
) -> tuple[int, Scratch, int]:
    """Reduce a chunk in memory, and leave each rank of the host with a slice of the result.

    Args:
        operation: The operation.
        address: The address of the chunk.
        chunk: The chunk.
        multiple: The number of which the element count of a slice is a multiple.

    Returns:
        The address of the chunk, or of a copy that is padded with zeros if the ranks cannot share
        the chunk equally; the slice of this rank; the element count of a slice.
    """
    elements, ranks = operation.elements, len(operation.layout.ranks)
    slice_count = -(-chunk.count // (ranks * multiple)) * multiple
    whole, size = address, slice_count * elements.bytes
    if chunk.count != ranks * slice_count:
        whole = Scratch.allocate(ranks * size)
        ctypes.memmove(whole, address, chunk.size)
        ctypes.memset(whole + chunk.size, 0, ranks * size - chunk.size)
    own_slice = Scratch.allocate(size)
    operation.run_local(
        "reduce_scatter_single", whole, own_slice, slice_count, elements.dtype, elements.partial_op
    )
    return whole, own_slice, slice_count


def _ring_all_reduce(operation: Operation, own_slice: int, count: int, tag: int) -> Steps:
    """All-reduce along the rail: a ring reduce-scatter, then a ring all-gather."""
    layout, elements = operation.layout, operation.elements
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    ends = [count * number // hosts for number in range(hosts + 1)]

    def part(number: int) -> tuple[int, int, int]:
        """Return the address, the element count and the size of a part of the slice."""
        begin, end = ends[number % hosts], ends[number % hosts + 1]
        address = own_slice + begin * elements.bytes
        return address, end - begin, (end - begin) * elements.bytes

    theirs = Scratch.allocate((-(-count // hosts)) * elements.bytes)
    for step in range(hosts - 1):
        sent, _, sent_size = part(host - step)
        received, received_count, size = part(host - step - 1)
        yield [
            *operation.post_recv(theirs, size, behind, tag),
            *operation.post_send(sent, sent_size, ahead, tag),
        ]
        last = step == hosts - 2
        elements.combine(received, [theirs, received], received_count, last=last)
    for step in range(hosts - 1):
        sent, _, sent_size = part(host + 1 - step)
        received, _, size = part(host - step)
        yield [
            *operation.post_recv(received, size, behind, tag),
            *operation.post_send(sent, sent_size, ahead, tag),
        ]


def reduce(operation: Operation, data: int, count: int, root: int) -> None:
    """Combine the `count` elements at `data` of all ranks; the root gets the result, in place."""
    if is_for_rails(operation, count):
        ranks = len(operation.layout.ranks)
        run_chunks(operation, _reduce_by_rails, count, data, root, multiple=ranks)
    else:
        run_chunks(operation, _reduce_to_root, count, data, root)


def _reduce_to_root(operation: Operation, chunk: Chunk, data: int, root: int) -> Steps:
    layout, elements = operation.layout, operation.elements
    address, size = data + chunk.offset, chunk.size
    root_host = layout.host_of(root)
    on_root_host = layout.host == root_host
    local_root = layout.ranks.index(root) if on_root_host else LEADER
    own = address
    if layout.local_rank == local_root:
        # Only the root's tensor may be written.
        own = Scratch.allocate(size)
        ctypes.memmove(own, address, size)
    operation.run_local("reduce", own, chunk.count, elements.dtype, elements.partial_op, local_root)
    if layout.rank == root:
        parts: list[int] = [own] * len(layout.hosts)
        transfers = []
        for number, leader in enumerate(layout.leaders):
            if number != root_host:
                parts[number] = Scratch.allocate(size)
                transfers += operation.post_recv(parts[number], size, leader, chunk.tag)
        yield transfers
        elements.combine(address, parts, chunk.count, last=True)
    elif layout.local_rank == local_root and not on_root_host:
        yield operation.post_send(own, size, root, chunk.tag)


def _reduce_by_rails(operation: Operation, chunk: Chunk, data: int, root: int) -> Steps:
    layout, elements, address = operation.layout, operation.elements, data + chunk.offset
    hosts, ranks, host = len(layout.hosts), len(layout.ranks), layout.host
    whole, own_slice, slice_count = _reduce_scatter_chunk(operation, address, chunk)
    size = slice_count * elements.bytes
    position = (host - layout.host_of(root) - 1) % hosts  # in the chain that ends at the root's
    if position > 0:
        theirs = Scratch.allocate(size)
        yield operation.post_recv(theirs, size, layout.rail[host - 1], chunk.tag)
        last = position == hosts - 1
        elements.combine(own_slice, [theirs, own_slice], slice_count, last=last)
    if position < hosts - 1:
        yield operation.post_send(own_slice, size, layout.rail[(host + 1) % hosts], chunk.tag)
        return
    outputs: list[int] = []
    if layout.rank == root:
        if whole != address:
            whole = Scratch.allocate(ranks * size)
        outputs = [whole + rank * size for rank in range(ranks)]
    local_root = layout.ranks.index(root)
    operation.run_local("gather", own_slice, outputs, slice_count, elements.dtype, local_root)
    if layout.rank == root and whole != address:
        ctypes.memmove(address, whole, chunk.size)


def reduce_scatter(operation: Operation, inputs: Sequence[int], output: int, count: int) -> None:
    """Combine the inputs of all ranks, one of `count` elements per rank; rank r gets the r-th."""
    layout = operation.layout
    steps = _reduce_scatter_by_rails if layout.is_even else _reduce_scatter_by_leaders
    run_chunks(operation, steps, count, inputs, output, parts=max(map(len, layout.hosts)))


def _reduce_scatter_by_rails(
    operation: Operation, chunk: Chunk, inputs: Sequence[int], output: int
) -> Steps:
    layout, elements = operation.layout, operation.elements
    link = make_link(operation, chunk.tag)
    parts = [Scratch.allocate(chunk.size) for _ in layout.hosts]
    transfers, theirs = [], {}
    for step in range(1, len(layout.hosts) + 1):
        host = (layout.host + step) % len(layout.hosts)
        sources = [inputs[rank] + chunk.offset for rank in layout.hosts[host]]
        operation.run_local(
            "reduce_scatter", sources, parts[host], chunk.count, elements.dtype, elements.partial_op
        )
        if host != layout.host:
            peer = layout.rail[host]
            theirs[host], posted = link.recv(chunk.count, peer)
            encoded = link.encode(parts[host], chunk.count, inputs[peer] + chunk.offset)
            transfers += posted + link.send(encoded, chunk.count, peer)
    yield transfers
    partial_results: list[int] = [*parts]
    for host, received in theirs.items():
        partial_results[host] = link.decode(received, chunk.count)
    elements.combine(output + chunk.offset, partial_results, chunk.count, last=True)


def _reduce_scatter_by_leaders(
    operation: Operation, chunk: Chunk, inputs: Sequence[int], output: int
) -> Steps:
    layout, elements, size = operation.layout, operation.elements, chunk.size
    link, is_leader = make_link(operation, chunk.tag), layout.local_rank == LEADER
    transfers, own, theirs = [], {}, {}
    for leader, ranks in zip(layout.leaders, layout.hosts, strict=True):
        for rank in ranks:
            part = inputs[rank] + chunk.offset
            if is_leader:
                own[rank] = Scratch.allocate(size)
                ctypes.memmove(own[rank], part, size)
                part = own[rank]
            operation.run_local(
                "reduce", part, chunk.count, elements.dtype, elements.partial_op, LEADER
            )
            if is_leader and leader != layout.rank:
                encoded = link.encode(part, chunk.count, inputs[rank] + chunk.offset)
                transfers += link.send(encoded, chunk.count, leader)
    if is_leader:
        for peer in (leader for leader in layout.leaders if leader != layout.rank):
            for rank in layout.ranks:
                theirs[peer, rank], posted = link.recv(chunk.count, peer)
                transfers += posted
    yield transfers
    results: list[int] = []
    for rank in layout.ranks if is_leader else ():
        parts: list[int] = []
        for leader in layout.leaders:
            received = theirs.get((leader, rank))
            decoded = None if received is None else link.decode(received, chunk.count)
            parts.append(own[rank] if decoded is None else decoded)
        results.append(Scratch.allocate(size))
        elements.combine(results[-1], parts, chunk.count, last=True)
    operation.run_local(
        "scatter", results, output + chunk.offset, chunk.count, elements.dtype, LEADER
    )
