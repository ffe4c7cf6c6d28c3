"""The operations that move data unchanged, and the barrier.

Each byte crosses the network once for every host that needs it. A large broadcast is a chain from
host to host along the rails, and all_gather is a ring. gather, scatter and all_to_all send from
rank to rank, since only the destination needs the data. On uneven hosts, the leaders send and
receive the data of broadcast and all_gather for their hosts.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from phalanx.hierarchical.execution import (
    LEADER,
    Chunk,
    Operation,
    Scratch,
    Steps,
    dissemination_rounds,
    is_for_rails,
    run_chunks,
)

_COUNT = struct.Struct("<Q")


class SplitSizeMismatch(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """Two ranks disagree on how many elements one sends to the other in all_to_all."""

    def __init__(self, peer: int, sent: int, expected: int) -> None:
        super().__init__(peer)
        self.peer, self.sent, self.expected = peer, sent, expected


def barrier(operation: Operation) -> None:
    """Block until all ranks have entered, by a dissemination barrier of the hosts' leaders.

    The ranks of this host have already synchronized when this is called.
    """
    if operation.layout.local_rank == LEADER:
        token, received = Scratch.allocate(1), Scratch.allocate(1)
        for ahead, behind in dissemination_rounds(operation.layout):
            operation.wait(
                *operation.post_recv(received, 1, behind), *operation.post_send(token, 1, ahead)
            )
    operation.run_local("barrier")


def broadcast(operation: Operation, data: int, count: int, root: int) -> None:
    """Overwrite the `count` elements at `data` with the root's."""
    if is_for_rails(operation, count):
        ranks = len(operation.layout.ranks)
        run_chunks(operation, _broadcast_by_rails, count, data, root, multiple=ranks)
    else:
        run_chunks(operation, _broadcast_by_leaders, count, data, root)


def _chain_position(operation: Operation, root: int) -> int:
    """Return this host's position in the chain of hosts, which begins at the root's host."""
    layout = operation.layout
    return (layout.host - layout.host_of(root)) % len(layout.hosts)


def _broadcast_by_leaders(operation: Operation, chunk: Chunk, data: int, root: int) -> Steps:
    layout, address = operation.layout, data + chunk.offset
    position = _chain_position(operation, root)
    senders = list(layout.leaders)
    senders[layout.host_of(root)] = root
    sender = senders[layout.host]
    if layout.rank == sender:
        if position > 0:
            yield operation.post_recv(address, chunk.size, senders[layout.host - 1], chunk.tag)
        if position < len(layout.hosts) - 1:
            next_sender = senders[(layout.host + 1) % len(layout.hosts)]
            yield operation.post_send(address, chunk.size, next_sender, chunk.tag)
    dtype = operation.elements.dtype
    operation.run_local("broadcast", address, chunk.count, dtype, layout.ranks.index(sender))


def _broadcast_by_rails(operation: Operation, chunk: Chunk, data: int, root: int) -> Steps:
    layout, elements, address = operation.layout, operation.elements, data + chunk.offset
    position = _chain_position(operation, root)
    ranks, hosts = len(layout.ranks), len(layout.hosts)
    slice_count = -(-chunk.count // ranks)
    size = slice_count * elements.bytes
    is_padded = chunk.count % ranks != 0
    # The root's tensor is only read: it may be in read-only memory.
    whole: int = address
    if is_padded or layout.rank == root:
        whole = Scratch.allocate(ranks * size)
    own_slice = Scratch.allocate(size)
    if position == 0:
        inputs: list[int] = []
        if layout.rank == root:
            source = address
            if is_padded:
                ctypes.memmove(whole, address, chunk.size)
                source = whole
            inputs = [source + rank * size for rank in range(ranks)]
        local_root = layout.ranks.index(root)
        operation.run_local("scatter", inputs, own_slice, slice_count, elements.dtype, local_root)
    else:
        yield operation.post_recv(own_slice, size, layout.rail[layout.host - 1], chunk.tag)
    sent = []
    if position < hosts - 1:
        next_rank = layout.rail[(layout.host + 1) % hosts]
        sent = operation.post_send(own_slice, size, next_rank, chunk.tag)
    operation.run_local("all_gather_single", own_slice, whole, slice_count, elements.dtype)
    if whole != address and layout.rank != root:
        ctypes.memmove(address, whole, chunk.size)
    yield sent


def all_gather(operation: Operation, input: int, outputs: Sequence[int], count: int) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on all ranks."""
    layout = operation.layout
    steps = _all_gather_by_rails if layout.is_even else _all_gather_by_leaders
    run_chunks(operation, steps, count, input, outputs, parts=max(map(len, layout.hosts)))


def _all_gather_by_rails(
    operation: Operation, chunk: Chunk, input: int, outputs: Sequence[int]
) -> Steps:
    layout, offset = operation.layout, chunk.offset
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    block: int = input + offset
    for step in range(hosts):
        transfers, next_block = [], block
        if step < hosts - 1:
            next_block = Scratch.allocate(chunk.size)
            transfers = operation.post_recv(next_block, chunk.size, behind, chunk.tag)
            transfers += operation.post_send(block, chunk.size, ahead, chunk.tag)
        targets = [outputs[rank] + offset for rank in layout.hosts[host - step]]
        operation.run_local("all_gather", block, targets, chunk.count, operation.elements.dtype)
        yield transfers
        block = next_block


def _all_gather_by_leaders(
    operation: Operation, chunk: Chunk, input: int, outputs: Sequence[int]
) -> Steps:
    layout, dtype = operation.layout, operation.elements.dtype
    hosts, host = len(layout.hosts), layout.host
    targets = [output + chunk.offset for output in outputs]
    local_targets = [targets[rank] for rank in layout.ranks]
    operation.run_local("all_gather", input + chunk.offset, local_targets, chunk.count, dtype)
    ahead, behind = layout.leaders[(host + 1) % hosts], layout.leaders[host - 1]
    for step in range(hosts - 1):
        received, sent = layout.hosts[(host - step - 1) % hosts], layout.hosts[host - step]
        transfers = []
        if layout.local_rank == LEADER:
            for rank in received:
                transfers += operation.post_recv(targets[rank], chunk.size, behind, chunk.tag)
            for rank in sent:
                transfers += operation.post_send(targets[rank], chunk.size, ahead, chunk.tag)
        yield transfers
        for rank in received:
            operation.run_local("broadcast", targets[rank], chunk.count, dtype, LEADER)


def gather(operation: Operation, input: int, outputs: Sequence[int], count: int, root: int) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on the root."""
    _exchange_with_root(operation, "gather", input, outputs, count, root)


def scatter(
    operation: Operation, inputs: Sequence[int], output: int, count: int, root: int
) -> None:
    """Send every rank its `count` elements of the root's `inputs`, one address per rank."""
    _exchange_with_root(operation, "scatter", output, inputs, count, root)


def _exchange_with_root(
    operation: Operation, kind: str, own: int, parts: Sequence[int], count: int, root: int
) -> None:
    """Move data between `own` on every rank and `parts`, one address per rank, on the root."""
    layout, elements = operation.layout, operation.elements
    size = count * elements.bytes
    is_gather = kind == "gather"
    if root not in layout.ranks:
        post_own = operation.post_send if is_gather else operation.post_recv
        operation.wait(*post_own(own, size, root))
        return
    transfers = []
    local_parts: list[int] = []
    if layout.rank == root:
        post_part = operation.post_recv if is_gather else operation.post_send
        local_parts = [parts[rank] for rank in layout.ranks]
        for rank in _remote_ranks(operation):
            transfers += post_part(parts[rank], size, rank)
    buffers = (own, local_parts) if is_gather else (local_parts, own)
    operation.run_local(kind, *buffers, count, elements.dtype, layout.ranks.index(root))
    operation.wait(*transfers)


def all_to_all(
    operation: Operation,
    inputs: Sequence[int],
    input_counts: Sequence[int],
    outputs: Sequence[int],
    output_counts: Sequence[int],
) -> None:
    """Send every rank the elements for it; counts may differ between pairs of ranks.

    Raises:
        SplitSizeMismatch: A rank of another host sends a different count than this rank expects.
    """
    elements, ranks = operation.elements, operation.layout.ranks
    _check_counts(operation, input_counts, output_counts)
    transfers = []
    for rank in _remote_ranks(operation):
        received, sent = output_counts[rank] * elements.bytes, input_counts[rank] * elements.bytes
        transfers += operation.post_recv(outputs[rank], received, rank, 1)
        transfers += operation.post_send(inputs[rank], sent, rank, 1)
    operands = inputs, input_counts, outputs, output_counts
    local_operands = ([each[rank] for rank in ranks] for each in operands)
    operation.run_local("all_to_all", *local_operands, elements.dtype)
    operation.wait(*transfers)


def _check_counts(
    operation: Operation, input_counts: Sequence[int], output_counts: Sequence[int]
) -> None:
    transfers, received = [], {}
    for rank in _remote_ranks(operation):
        received[rank] = bytearray(_COUNT.size)
        transfers.append(operation.recv(memoryview(received[rank]), rank))
        sent = memoryview(bytearray(_COUNT.pack(input_counts[rank])))
        transfers.append(operation.send(sent, rank))
    operation.wait(*transfers)
    for rank, data in received.items():
        (count,) = _COUNT.unpack(data)
        if count != output_counts[rank]:
            raise SplitSizeMismatch(rank, count, output_counts[rank])


def _remote_ranks(operation: Operation) -> list[int]:
    """Return the ranks of other hosts, starting after this rank, to spread the load."""
    layout = operation.layout
    order = [(layout.rank + step) % layout.size for step in range(1, layout.size)]
    return [rank for rank in order if rank not in layout.ranks]
