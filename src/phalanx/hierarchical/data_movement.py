"""The operations that move data unchanged, and the barrier.

Each byte crosses the network once for every host that needs it. A large broadcast is a chain from
host to host along the rails, and all_gather is a ring. gather, scatter and all_to_all send from
rank to rank, since only the destination needs the data. On uneven hosts, the leaders send and
receive the data of broadcast and all_gather for their hosts.
"""

from __future__ import annotations

import ctypes
import struct
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

__all__ = [
    "SplitSizeMismatch",
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "scatter",
]

_SMALL_BYTES = 64 * 1024
_LEADER = 0
_COUNT = struct.Struct("<Q")


class SplitSizeMismatch(Exception):  # noqa: N818 - ends an operation early; not yet an error
    """Two ranks disagree on how many elements one sends to the other in all_to_all."""

    def __init__(self, peer: int, sent: int, expected: int) -> None:
        super().__init__(peer)
        self.peer, self.sent, self.expected = peer, sent, expected


def barrier(operation: Operation) -> None:
    """Block until all ranks have entered, by a dissemination barrier of the hosts' leaders.

    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988. The ranks of
    this host have already synchronized when this is called.
    """
    layout = operation.layout
    if layout.local_rank == _LEADER:
        token = Scratch.allocate(1)
        received = Scratch.allocate(1)
        hosts, distance = len(layout.hosts), 1
        while distance < hosts:
            ahead = layout.leaders[(layout.host + distance) % hosts]
            behind = layout.leaders[layout.host - distance]
            operation.wait(
                *operation.post_recv(received, 1, behind), *operation.post_send(token, 1, ahead)
            )
            distance *= 2
    operation.run_local("barrier")


def broadcast(operation: Operation, data: int, count: int, elements: Elements, root: int) -> None:
    """Overwrite the `count` elements at `data` with the root's."""
    layout = operation.layout
    chunk_count = CHUNK_BYTES // elements.bytes
    if not layout.is_even or count * elements.bytes <= _SMALL_BYTES:
        steps = (
            _broadcast_by_leaders(operation, data, chunk, elements, root)
            for chunk in split_chunks(count, chunk_count)
        )
    else:
        chunk_count -= chunk_count % len(layout.ranks)
        steps = (
            _broadcast_by_rails(operation, data, chunk, elements, root)
            for chunk in split_chunks(count, chunk_count)
        )
    run_pipeline(operation, steps)


def _chain(operation: Operation, root: int) -> tuple[int, int, int]:
    """Return this host's position in the chain of hosts, and the previous and next host.

    The chain begins at the root's host.
    """
    hosts = len(operation.layout.hosts)
    position = (operation.layout.host - operation.layout.host_of(root)) % hosts
    return position, (operation.layout.host - 1) % hosts, (operation.layout.host + 1) % hosts


def _broadcast_by_leaders(
    operation: Operation, data: int, chunk: Chunk, elements: Elements, root: int
) -> Steps:
    layout = operation.layout
    address, size = data + chunk.begin * elements.bytes, chunk.count * elements.bytes
    position, previous_host, next_host = _chain(operation, root)
    senders = [ranks[0] for ranks in layout.hosts]
    senders[layout.host_of(root)] = root
    sender = senders[layout.host]
    if layout.rank == sender:
        if position > 0:
            yield operation.post_recv(address, size, senders[previous_host], chunk.tag)
        if position < len(layout.hosts) - 1:
            yield operation.post_send(address, size, senders[next_host], chunk.tag)
    operation.run_local(
        "broadcast", address, chunk.count, elements.dtype, layout.ranks.index(sender)
    )


def _broadcast_by_rails(
    operation: Operation, data: int, chunk: Chunk, elements: Elements, root: int
) -> Steps:
    layout = operation.layout
    ranks = len(layout.ranks)
    address = data + chunk.begin * elements.bytes
    slice_count = -(-chunk.count // ranks)
    size = slice_count * elements.bytes
    position, previous_host, next_host = _chain(operation, root)
    is_padded = chunk.count % ranks != 0
    # The root's tensor is only read: it may be in read-only memory.
    whole: int = address
    if is_padded or layout.rank == root:
        whole = Scratch.allocate(slice_count * ranks * elements.bytes)
    own_slice = Scratch.allocate(size)
    if position == 0:
        inputs: list[int] = []
        if layout.rank == root:
            source = address
            if is_padded:
                ctypes.memmove(whole, address, chunk.count * elements.bytes)
                source = whole
            inputs = [source + rank * size for rank in range(ranks)]
        operation.run_local(
            "scatter", inputs, own_slice, slice_count, elements.dtype, layout.ranks.index(root)
        )
    else:
        yield operation.post_recv(own_slice, size, layout.rail[previous_host], chunk.tag)
    sent = (
        operation.post_send(own_slice, size, layout.rail[next_host], chunk.tag)
        if _has_next(operation, position)
        else []
    )
    operation.run_local("all_gather_single", own_slice, whole, slice_count, elements.dtype)
    if whole != address and layout.rank != root:
        ctypes.memmove(address, whole, chunk.count * elements.bytes)
    yield sent


def _has_next(operation: Operation, position: int) -> bool:
    return position < len(operation.layout.hosts) - 1


def all_gather(
    operation: Operation, data: int, outputs: Sequence[int], count: int, elements: Elements
) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on all ranks."""
    layout = operation.layout
    steps = _all_gather_by_rails if layout.is_even else _all_gather_by_leaders
    chunk_count = CHUNK_BYTES // elements.bytes // max(map(len, layout.hosts))
    run_pipeline(
        operation,
        (
            steps(operation, data, outputs, chunk, elements)
            for chunk in split_chunks(count, chunk_count)
        ),
    )


def _all_gather_by_rails(
    operation: Operation, data: int, outputs: Sequence[int], chunk: Chunk, elements: Elements
) -> Steps:
    layout = operation.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    hosts, host = len(layout.hosts), layout.host
    ahead, behind = layout.rail[(host + 1) % hosts], layout.rail[host - 1]
    block: int = data + offset
    for step in range(hosts):
        transfers, next_block = [], None
        if step < hosts - 1:
            next_block = Scratch.allocate(size)
            transfers = operation.post_recv(next_block, size, behind, chunk.tag)
            transfers += operation.post_send(block, size, ahead, chunk.tag)
        local_outputs = [outputs[rank] + offset for rank in layout.hosts[host - step]]
        operation.run_local("all_gather", block, local_outputs, chunk.count, elements.dtype)
        yield transfers
        block = block if next_block is None else next_block


def _all_gather_by_leaders(
    operation: Operation, data: int, outputs: Sequence[int], chunk: Chunk, elements: Elements
) -> Steps:
    layout = operation.layout
    offset, size = chunk.begin * elements.bytes, chunk.count * elements.bytes
    hosts, host = len(layout.hosts), layout.host
    local_outputs = [outputs[rank] + offset for rank in layout.ranks]
    operation.run_local("all_gather", data + offset, local_outputs, chunk.count, elements.dtype)
    ahead, behind = layout.leaders[(host + 1) % hosts], layout.leaders[host - 1]
    for step in range(hosts - 1):
        transfers = []
        if layout.local_rank == _LEADER:
            for rank in layout.hosts[(host - step - 1) % hosts]:
                transfers += operation.post_recv(outputs[rank] + offset, size, behind, chunk.tag)
            for rank in layout.hosts[(host - step) % hosts]:
                transfers += operation.post_send(outputs[rank] + offset, size, ahead, chunk.tag)
        yield transfers
        for rank in layout.hosts[(host - step - 1) % hosts]:
            output = outputs[rank] + offset
            operation.run_local("broadcast", output, chunk.count, elements.dtype, _LEADER)


def gather(
    operation: Operation,
    data: int,
    outputs: Sequence[int],
    count: int,
    elements: Elements,
    root: int,
) -> None:
    """Collect `count` elements of each rank in `outputs`, one address per rank, on the root."""
    layout, size = operation.layout, count * elements.bytes
    if root not in layout.ranks:
        operation.wait(*operation.post_send(data, size, root))
        return
    transfers = []
    local_outputs: list[int] = []
    if layout.rank == root:
        local_outputs = [outputs[rank] for rank in layout.ranks]
        for rank in _remote_ranks(operation):
            transfers += operation.post_recv(outputs[rank], size, rank)
    operation.run_local(
        "gather", data, local_outputs, count, elements.dtype, layout.ranks.index(root)
    )
    operation.wait(*transfers)


def scatter(
    operation: Operation,
    inputs: Sequence[int],
    output: int,
    count: int,
    elements: Elements,
    root: int,
) -> None:
    """Send every rank its `count` elements of the root's `inputs`, one address per rank."""
    layout, size = operation.layout, count * elements.bytes
    if root not in layout.ranks:
        operation.wait(*operation.post_recv(output, size, root))
        return
    transfers = []
    local_inputs: list[int] = []
    if layout.rank == root:
        local_inputs = [inputs[rank] for rank in layout.ranks]
        for rank in _remote_ranks(operation):
            transfers += operation.post_send(inputs[rank], size, rank)
    operation.run_local(
        "scatter", local_inputs, output, count, elements.dtype, layout.ranks.index(root)
    )
    operation.wait(*transfers)


def all_to_all(
    operation: Operation,
    inputs: Sequence[int],
    input_counts: Sequence[int],
    outputs: Sequence[int],
    output_counts: Sequence[int],
    elements: Elements,
) -> None:
    """Send every rank the elements for it; counts may differ between pairs of ranks.

    Raises:
        SplitSizeMismatch: A rank of another host sends a different count than this rank expects.
    """
    layout = operation.layout
    _check_counts(operation, input_counts, output_counts)
    transfers = []
    for rank in _remote_ranks(operation):
        transfers += operation.post_recv(
            outputs[rank], output_counts[rank] * elements.bytes, rank, 1
        )
        transfers += operation.post_send(inputs[rank], input_counts[rank] * elements.bytes, rank, 1)
    ranks = layout.ranks
    operation.run_local(
        "all_to_all",
        *(
            [each[rank] for rank in ranks]
            for each in (inputs, input_counts, outputs, output_counts)
        ),
        elements.dtype,
    )
    operation.wait(*transfers)


def _check_counts(
    operation: Operation, input_counts: Sequence[int], output_counts: Sequence[int]
) -> None:
    transfers, received = [], {}
    for rank in _remote_ranks(operation):
        received[rank] = bytearray(_COUNT.size)
        transfers.append(operation.recv(memoryview(received[rank]), rank))
        transfers.append(
            operation.send(memoryview(bytearray(_COUNT.pack(input_counts[rank]))), rank)
        )
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
