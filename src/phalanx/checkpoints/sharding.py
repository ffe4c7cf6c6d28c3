"""The division of tensors into shards that ranks write, and their reassembly.

One rank writes a tensor that every rank has. If such a tensor is larger than an equal share of the
state, it is divided by rows among the ranks. Each shard of a DTensor is written by one of the ranks
that hold it. A shard is described by a box: its offset in the whole tensor, and its shape. Boxes do
not refer to ranks, so any world size can read them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.checkpoints.safetensors import DTYPES, itemsize
from phalanx.errors import UsageError


@dataclass(frozen=True)
class Box:
    """A part of a tensor: the indices of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box":
        """Return the common part of two boxes, whose size is 0 if there is none."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape)

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of this box in a tensor whose first element is at `origin`."""
        return tuple(
            slice(start - first, start - first + length)
            for start, length, first in zip(self.offset, self.shape, origin, strict=True)
        )


@dataclass(frozen=True)
class TensorDescription:
    """A rank's description of a tensor.

    It has the dtype and shape of the whole tensor and, for a DTensor, the local shard.
    """

    dtype: str
    shape: tuple[int, ...]
    local: Box | None

    @property
    def whole(self) -> Box:
        """The box of the whole tensor."""
        return Box((0,) * len(self.shape), self.shape)

    def bytes(self, box: Box) -> int:
        """Return the size in bytes of a part of the tensor."""
        return box.size * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that one rank writes, and its key in that rank's file."""

    name: str
    key: str
    box: Box


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorDescription]:
    """Return the description of each tensor on this rank."""
    return {
        name: TensorDescription(
            DTYPES[tensor.dtype],
            tuple(tensor.shape),
            local_box(tensor, name) if is_distributed(tensor) else None,
        )
        for name, tensor in tensors.items()
    }


def local_box(tensor: Any, name: str) -> Box:
    """Return the box of this rank's shard of a DTensor.

    Raises:
        UsageError: The DTensor has a partial placement, or not exactly one shard on this rank.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{name} is a DTensor with placements {tensor.placements}, expected none that is "
            "partial: redistribute it first"
        )
    chunks = tensor.__create_chunk_list__()  # torch.distributed.checkpoint uses it too
    if len(chunks) != 1:
        raise UsageError(
            f"{name} is a DTensor with {len(chunks)} shards on this rank, expected one"
        )
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def assign_shards(
    descriptions: Sequence[Mapping[str, TensorDescription]], files: int = 0
) -> list[list[Shard]]:
    """Return the shards that each rank writes. The result is the same on every rank.

    Args:
        descriptions: The tensors of each rank.
        files: Number of files if a single rank writes all tensors. The result then has the shards
            of each file, and no tensor is divided.

    Raises:
        UsageError: The tensors differ between ranks, or the ranks lack shards of a DTensor.
    """
    _check_same_tensors(descriptions)
    writers = files or len(descriptions)
    max_bytes = math.inf if files else total_bytes(descriptions[0]) / writers
    parts = [
        part
        for name in descriptions[0]
        for part in _split_tensor(name, descriptions, max_bytes, writers)
    ]
    parts.sort(key=lambda part: (-part[1], part[0].key))
    bytes_by_rank = [0] * writers
    shards_by_rank: list[list[Shard]] = [[] for _ in bytes_by_rank]
    for shard, length, ranks in parts:
        writer = min(ranks, key=lambda rank: (bytes_by_rank[rank], rank))
        shards_by_rank[writer].append(shard)
        bytes_by_rank[writer] += length
    return shards_by_rank


def total_bytes(descriptions: Mapping[str, TensorDescription]) -> int:
    """Return the total size of all tensors in bytes."""
    return sum(description.bytes(description.whole) for description in descriptions.values())


def extract_shard(tensor: Any, shard: Shard) -> Tensor:
    """Return a shard of a tensor as a view; this rank must hold it."""
    if is_distributed(tensor):
        local: Tensor = tensor.to_local()
        return local
    part: Tensor = tensor.detach()[shard.box.slices((0,) * tensor.dim())]
    return part


def copy_overlap(target: Tensor, target_box: Box, source: Tensor, box: Box) -> int:
    """Copy the intersection of two boxes from one tensor to another.

    Args:
        target: The tensor to copy to.
        target_box: The box of `target`.
        source: The tensor to copy from.
        box: The box of `source`.

    Returns:
        The number of elements copied.
    """
    overlap = box.intersect(target_box)
    if overlap.size:
        target[overlap.slices(target_box.offset)] = source[overlap.slices(box.offset)]
    return overlap.size


def _check_same_tensors(descriptions: Sequence[Mapping[str, TensorDescription]]) -> None:
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for name in sorted({*first, *other}):
            expected, actual = (_format_description(side.get(name)) for side in (first, other))
            if expected != actual:
                raise UsageError(
                    f"state: {name} is {expected} on rank 0 and {actual} on rank {rank}, expected "
                    "the same tensors on all ranks of a sharded checkpoint"
                )


def _format_description(description: TensorDescription | None) -> str:
    if description is None:
        return "missing"
    return f"{'whole' if description.local is None else 'distributed'} {description}"


def _split_tensor(
    name: str,
    descriptions: Sequence[Mapping[str, TensorDescription]],
    max_bytes: float,
    writers: int,
) -> list[tuple[Shard, int, list[int]]]:
    """Return the shards of a tensor, each with its size in bytes and the ranks that hold it."""
    first = descriptions[0][name]
    ranks_by_box: dict[Box, list[int]] = {}
    if first.local is None:
        is_large = first.bytes(first.whole) > max_bytes
        boxes = _split_rows(first.whole, writers) if is_large else [first.whole]
        ranks_by_box = {box: list(range(writers)) for box in boxes}
    else:
        for rank, other in enumerate(descriptions):
            local = other[name].local
            if local is not None and (local.size or not first.whole.size):
                ranks_by_box.setdefault(local, []).append(rank)
        if sum(box.size for box in ranks_by_box) != first.whole.size:
            raise UsageError(
                f"state: {name} is a DTensor of shape {list(first.shape)}, of which the ranks of "
                "this group have only a part: give Checkpointer the group of the whole device mesh"
            )
    return [
        (Shard(name, _key(name, box, first.whole), box), first.bytes(box), ranks)
        for box, ranks in ranks_by_box.items()
    ]


def _split_rows(box: Box, count: int) -> list[Box]:
    """Divide a tensor along its first dimension into `count` boxes of about equal length."""
    if not box.shape or not box.size:
        return [box]
    rows, rest = box.shape[0], box.shape[1:]
    edges = [rows * index // count for index in range(count + 1)]
    return [
        Box((start, *box.offset[1:]), (stop - start, *rest))
        for start, stop in itertools.pairwise(edges)
        if stop > start
    ]


def _key(name: str, box: Box, whole: Box) -> str:
    """Return a key that is unique among the shards of all tensors.

    The key of a part ends with the offset in brackets. The key of a whole tensor is its name, with
    empty brackets appended if the name itself ends with a bracket.
    """
    if box != whole:
        return f"{name}[{','.join(str(index) for index in box.offset)}]"
    return f"{name}[]" if name.endswith("]") else name
