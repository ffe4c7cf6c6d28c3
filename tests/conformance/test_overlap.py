"""Inputs and outputs that overlap in one buffer, at random distances.

The oracle is the same operation on tensors that share no memory, computed here from every rank's
data.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

# Elements of a part: small parts are staged at once, large ones in several chunks.
SIZES = (5, 300_001)
ROUNDS = 4


class Buffer:
    """Memory of this rank with tensors at any offset, and the inputs of all ranks in theirs.

    Args:
        seed: The same on all ranks.
        part: Elements of a part.
        async_op: Whether operations are asynchronous.
    """

    def __init__(self, seed: int, part: int, async_op: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.part, self.async_op, self.seed = part, async_op, seed
        self.choose = random.Random(seed + self.rank)  # each rank has its own distances
        self.memory = torch.full((3 * self.size * part,), -1, dtype=torch.int64)

    def at(self, begin: int, parts: int) -> Tensor:
        return self.memory[begin : begin + parts * self.part]

    def random_offset(self, begin: int, parts: int) -> int:
        """Return an offset of parts that overlap or touch those at `begin`."""
        shift = self.choose.choice((0, 1, self.part // 2, self.part, 2 * self.part))
        shift = self.choose.choice((-shift, shift))
        return max(0, min(begin + shift, self.memory.numel() - parts * self.part))

    def input_of(self, rank: int, parts: int) -> Tensor:
        """Return the input of a rank."""
        made: Tensor = cases.data("int64", parts * self.part, self.seed, rank)
        return made

    def finish(self, work: dist.Work | None) -> None:
        if self.async_op:
            assert work is not None
            work.wait()

    def check(self, output: Tensor, expected: Tensor, name: str, source: int, target: int) -> None:
        assert torch.equal(output, expected), (
            f"{name} on rank {self.rank} of {self.size}: parts of {self.part} elements, input at "
            f"{source}, output at {target}, async_op={self.async_op}, seed {self.seed}"
        )


def all_to_all_single(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    source = size * part
    target = buffer.random_offset(source, size)
    buffer.at(source, size).copy_(buffer.input_of(buffer.rank, size))
    output = buffer.at(target, size)
    splits = [part] * size if buffer.choose.random() < 0.5 else None
    work = dist.all_to_all_single(
        output, buffer.at(source, size), splits, splits, async_op=buffer.async_op
    )
    buffer.finish(work)
    buffer.check(output, _exchanged(buffer), "all_to_all_single", source, target)


def all_to_all(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    source = size * part
    target = buffer.random_offset(source, size)
    buffer.at(source, size).copy_(buffer.input_of(buffer.rank, size))
    output = buffer.at(target, size)
    inputs = list(buffer.at(source, size).split(part))
    # In any order of their addresses.
    outputs = list(output.split(part))
    order = buffer.choose.sample(range(size), size)
    shuffled = [outputs[index] for index in order]
    buffer.finish(dist.all_to_all(shuffled, inputs, async_op=buffer.async_op))
    parts = _exchanged(buffer).split(part)
    expected = [parts[order.index(index)] for index in range(size)]
    buffer.check(output, torch.cat(expected), "all_to_all", source, target)


def all_gather_single(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    target = size * part
    source = buffer.random_offset(target + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, 1).copy_(buffer.input_of(buffer.rank, 1))
    output = buffer.at(target, size)
    work = dist.all_gather_into_tensor(output, buffer.at(source, 1), async_op=buffer.async_op)
    buffer.finish(work)
    buffer.check(output, _gathered(buffer), "all_gather_into_tensor", source, target)


def all_gather(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    target = size * part
    source = buffer.random_offset(target + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, 1).copy_(buffer.input_of(buffer.rank, 1))
    output = buffer.at(target, size)
    outputs = list(output.split(part))
    buffer.finish(dist.all_gather(outputs, buffer.at(source, 1), async_op=buffer.async_op))
    buffer.check(output, _gathered(buffer), "all_gather", source, target)


def gather(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    target = size * part
    source = buffer.random_offset(target + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, 1).copy_(buffer.input_of(buffer.rank, 1))
    output = buffer.at(target, size)
    outputs = list(output.split(part)) if buffer.rank == 0 else None
    buffer.finish(dist.gather(buffer.at(source, 1), outputs, async_op=buffer.async_op))
    if buffer.rank == 0:
        buffer.check(output, _gathered(buffer), "gather", source, target)


def scatter(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    source = size * part
    target = buffer.random_offset(source + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, size).copy_(buffer.input_of(0, size))
    output = buffer.at(target, 1)
    inputs = list(buffer.at(source, size).split(part)) if buffer.rank == 0 else None
    buffer.finish(dist.scatter(output, inputs, async_op=buffer.async_op))
    expected = buffer.input_of(0, size).split(part)[buffer.rank]
    buffer.check(output, expected, "scatter", source, target)


def reduce_scatter_single(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    source = size * part
    target = buffer.random_offset(source + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, size).copy_(buffer.input_of(buffer.rank, size))
    output = buffer.at(target, 1)
    work = dist.reduce_scatter_tensor(output, buffer.at(source, size), async_op=buffer.async_op)
    buffer.finish(work)
    buffer.check(output, _summed(buffer), "reduce_scatter_tensor", source, target)


def reduce_scatter(buffer: Buffer) -> None:
    size, part = buffer.size, buffer.part
    source = size * part
    target = buffer.random_offset(source + buffer.choose.randrange(size) * part, 1)
    buffer.at(source, size).copy_(buffer.input_of(buffer.rank, size))
    output = buffer.at(target, 1)
    inputs = list(buffer.at(source, size).split(part))
    buffer.finish(dist.reduce_scatter(output, inputs, async_op=buffer.async_op))
    buffer.check(output, _summed(buffer), "reduce_scatter", source, target)


def _exchanged(buffer: Buffer) -> Tensor:
    size, part = buffer.size, buffer.part
    inputs = [buffer.input_of(rank, size).split(part) for rank in range(size)]
    return torch.cat([parts[buffer.rank] for parts in inputs])


def _gathered(buffer: Buffer) -> Tensor:
    return torch.cat([buffer.input_of(rank, 1) for rank in range(buffer.size)])


def _summed(buffer: Buffer) -> Tensor:
    inputs = [buffer.input_of(rank, buffer.size) for rank in range(buffer.size)]
    total: Tensor = sum(inputs, torch.zeros_like(inputs[0]))
    return total.split(buffer.part)[buffer.rank]


OPERATIONS: list[Callable[[Buffer], None]] = [
    all_to_all_single,
    all_to_all,
    all_gather_single,
    all_gather,
    gather,
    scatter,
    reduce_scatter_single,
    reduce_scatter,
]


def at_random_distances(operation: Callable[[Buffer], None], seed: int) -> None:
    for turn in range(ROUNDS):
        for part in SIZES:
            operation(Buffer(seed + 100 * turn, part, async_op=bool(turn % 2)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_overlap(ranks: RankServer, operation: Callable[[Buffer], None]) -> None:
    ranks.run(3, at_random_distances, operation, fresh_seed())
