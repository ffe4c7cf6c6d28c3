"""Reductions whose data crosses between hosts in fewer bits.

The hosts exchange parts of their partial results: each host gets one part from all others, combines
it in float32, and sends it back. What is sent is encoded (`native/include/phalanx/quantization.h`),
and all hosts decode the same bytes, so the results are the same on all ranks, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from phalanx import _native
from phalanx.hierarchical.encoding import ITEM, Compression
from phalanx.hierarchical.execution import Operation, PostedTransfer, Scratch, Steps

BLOCK = 256
"""Parts begin at a multiple of this number of elements, which is one of all encodings' blocks.

It is counted from the beginning of a tensor, so that values which fill blocks of their own do not
share a scale with others.
"""


NOWHERE = 0
"""The address of elements that are in no tensor, since they fill a slice up."""


class Part(NamedTuple):
    """A range of elements that one host combines for all others."""

    begin: int
    length: int


class Link:
    """The transfers of one chunk of an operation between hosts, of elements as they are.

    Args:
        operation: The operation.
        tag: The tag of the transfers.
    """

    def __init__(self, operation: Operation, tag: int) -> None:
        self._operation, self._tag = operation, tag

    def encode(self, address: int, count: int, origin: int) -> int:  # noqa: ARG002 - see below
        """Return the address of elements as they are sent.

        Args:
            address: The address of the elements.
            count: The number of elements.
            origin: Their address in the tensor that the operation was given.
        """
        return address

    def decode(self, encoded: int, count: int) -> int:  # noqa: ARG002
        """Return the address of received elements."""
        return encoded

    def size(self, count: int) -> int:
        """Return the size of elements as they are sent, in bytes."""
        return count * self._operation.elements.bytes

    def send(self, encoded: int, count: int, peer: int) -> list[PostedTransfer]:
        """Send encoded elements."""
        return self._operation.post_send(encoded, self.size(count), peer, self._tag)

    def recv(self, count: int, peer: int) -> tuple[Scratch, list[PostedTransfer]]:
        """Receive encoded elements; return where they will be, and the transfers."""
        encoded = Scratch.allocate(self.size(count))
        posted = self._operation.post_recv(encoded, self.size(count), peer, self._tag)
        return encoded, posted


class CompressedLink(Link):
    """The transfers of one chunk in fewer bits."""

    def __init__(self, operation: Operation, tag: int, compression: Compression) -> None:
        super().__init__(operation, tag)
        self._compression, self._encoding = compression, compression.encoding
        self._encoded: list[Scratch] = []

    def encode(self, address: int, count: int, origin: int) -> Scratch:  # noqa: D102
        encoded = Scratch.allocate(self.size(count))
        lost, _owner = self._compression.residual(origin, count)
        _native.quantize(encoded, address, lost, count, self._encoding)
        self._encoded.append(encoded)  # its transfer may end later
        return encoded

    def decode(self, encoded: int, count: int) -> Scratch:  # noqa: D102
        decoded = Scratch.allocate(count * ITEM)
        self.decode_to(decoded, encoded, count)
        return decoded

    def decode_to(self, output: int, encoded: int, count: int) -> None:
        """Decode received elements to an address."""
        _native.dequantize(output, encoded, count, self._encoding)

    def size(self, count: int) -> int:  # noqa: D102
        return _native.quantized_size(count, self._encoding)


def make_link(operation: Operation, tag: int) -> Link:
    """Return the link for a chunk of an operation, which is compressed or not."""
    compression = operation.compression
    if compression is None:
        return Link(operation, tag)
    return CompressedLink(operation, tag, compression)


def split(count: int, hosts: int) -> list[Part]:
    """Split `count` elements into a part for each host; each begins at a block of the encodings."""
    blocks = -(-count // BLOCK)
    ends = [min(count, blocks * number // hosts * BLOCK) for number in range(hosts)] + [count]
    return [Part(begin, end - begin) for begin, end in itertools.pairwise(ends)]


def all_reduce_between_hosts(
    link: CompressedLink,
    operation: Operation,
    address: int,
    count: int,
    members: Sequence[int],
    origin: int,
) -> Steps:
    """Combine partial results of hosts, in place.

    Args:
        link: The link for these elements.
        operation: The operation.
        address: The address of this host's partial results.
        count: The number of elements.
        members: The rank of each host that takes part; this rank for this host.
        origin: The address of these elements in the tensor that the operation was given.
    """
    host, hosts = operation.layout.host, len(members)
    parts = split(count, hosts)
    own = parts[host]
    neighbours = [((host + step) % hosts, (host - step) % hosts) for step in range(1, hosts)]
    transfers, theirs = [], {}
    for ahead, behind in neighbours:
        theirs[behind], posted = link.recv(own.length, members[behind])
        transfers += posted
        begin, length = parts[ahead].begin * ITEM, parts[ahead].length
        encoded = link.encode(address + begin, length, origin + begin)
        transfers += link.send(encoded, length, members[ahead])
    yield transfers
    result = address + own.begin * ITEM
    sources: list[int] = [result] * hosts
    for other, received in theirs.items():
        sources[other] = link.decode(received, own.length)
    operation.elements.combine(result, sources, own.length, last=True)
    encoded = link.encode(result, own.length, origin + own.begin * ITEM)
    transfers, results = [], {host: encoded}
    for ahead, behind in neighbours:
        results[behind], posted = link.recv(parts[behind].length, members[behind])
        transfers += posted
        transfers += link.send(encoded, own.length, members[ahead])
    yield transfers
    for other, received in results.items():
        link.decode_to(address + parts[other].begin * ITEM, received, parts[other].length)
