"""The division of tensors into pieces that ranks write, and their reassembly.

One rank writes a tensor that every rank has. If such a tensor is larger than an equal share of the
state, it is divided by rows among the ranks. Each shard of a DTensor is written by one of the ranks
that hold it. A piece is described by a box: its offset in the whole tensor, and its shape. Boxes do
not refer to ranks, so any world size can read them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.checkpoints.safetensors import DTYPES, itemsize

__all__ = [
    "Box",
    "Held",
    "Piece",
    "box_of",
    "bytes_in",
    "cut",
    "hold",
    "is_distributed",
    "overlap",
    "share_out",
]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: the indices of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Held:
    """A rank's description of a tensor.

    It has the dtype and shape of the whole tensor and, for a DTensor, the local shard.
    """

    dtype: str
    shape: tuple[int, ...]
    own: Box | None

    @property
    def whole(self) -> Box:
        """The box of the whole tensor."""
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that one rank writes, and its key in that rank's file."""

    name: str
    key: str
    box: Box


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def hold(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Return the description of each tensor on this rank."""
    return {
        name: Held(
            DTYPES[tensor.dtype],
            tuple(tensor.shape),
            box_of(tensor, name) if is_distributed(tensor) else None,
        )
        for name, tensor in tensors.items()
    }


def box_of(tensor: Any, name: str) -> Box:
    """Return the box of this rank's shard of a DTensor.

    Raises:
        UsageError: The DTensor has a partial placement, or not exactly one shard on this rank.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{name} is a DTensor with placements {tensor.placements}, expected none partial: "
            "redistribute it first"
        )
    chunks = tensor.__create_chunk_list__()  # torch.distributed.checkpoint uses it too
    if len(chunks) != 1:
        raise UsageError(f"{name} is a DTensor of {len(chunks)} parts on a rank, expected one")
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def share_out(held: Sequence[Mapping[str, Held]], files: int = 0) -> list[list[Piece]]:
    """Return the pieces that each rank writes. The result is the same on every rank.

    Args:
        held: The tensors of each rank.
        files: Number of files if a single rank writes all tensors. The result then has the pieces
            of each file, and no tensor is divided.

    Raises:
        UsageError: The tensors differ between ranks, or the ranks lack shards of a DTensor.
    """
    _check_alike(held)
    writers = files or len(held)
    share = math.inf if files else bytes_in(held[0]) / writers
    parts = [part for name in held[0] for part in _parts(name, held, share, writers)]
    parts.sort(key=lambda part: (-part[1], part[0].key))
    loads = [0] * writers
    shares: list[list[Piece]] = [[] for _ in loads]
    for piece, length, ranks in parts:
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        shares[writer].append(piece)
        loads[writer] += length
    return shares


def bytes_in(held: Mapping[str, Held]) -> int:
    """Return the total size of all tensors in bytes."""
    return sum(_bytes(it, it.whole) for it in held.values())


def cut(tensor: Any, piece: Piece) -> Tensor:
    """Return a piece of a tensor as a view; this rank must hold the piece."""
    if is_distributed(tensor):
        local: Tensor = tensor.to_local()
        return local
    part: Tensor = tensor.detach()
    for dimension, (start, length) in enumerate(
        zip(piece.box.offset, piece.box.shape, strict=True)
    ):
        part = part.narrow(dimension, start, length)
    return part


def overlap(target: Tensor, place: Box, source: Tensor, box: Box) -> int:
    """Copy the intersection of two boxes from one tensor to another.

    Args:
        target: The tensor to copy to.
        place: The box of `target`.
        source: The tensor to copy from.
        box: The box of `source`.

    Returns:
        The number of elements copied.
    """
    starts = [max(a, b) for a, b in zip(place.offset, box.offset, strict=True)]
    stops = [
        min(a + n, b + m)
        for a, n, b, m in zip(place.offset, place.shape, box.offset, box.shape, strict=True)
    ]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return 0
    for dimension, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        target = target.narrow(dimension, start - place.offset[dimension], stop - start)
        source = source.narrow(dimension, start - box.offset[dimension], stop - start)
    target.copy_(source)
    return target.numel()


def _check_alike(held: Sequence[Mapping[str, Held]]) -> None:
    first = held[0]
    for rank, other in enumerate(held):
        for name in sorted({*first, *other}):
            here, there = (_words(side.get(name)) for side in (first, other))
            if here != there:
                raise UsageError(
                    f"state: {name} is {here} on rank 0 and {there} on rank {rank}, expected the "
                    "same tensors on all ranks of a sharded checkpoint"
                )


def _words(held: Held | None) -> str:
    if held is None:
        return "missing"
    return f"{'whole' if held.own is None else 'distributed'} {held.dtype}{list(held.shape)}"


def _parts(
    name: str, held: Sequence[Mapping[str, Held]], share: float, writers: int
) -> list[tuple[Piece, int, list[int]]]:
    """Return the pieces of a tensor, each with its size in bytes and the ranks that hold it."""
    first = held[0][name]
    holders: dict[Box, list[int]] = {}
    if first.own is None:
        everybody = list(range(writers))
        large = _bytes(first, first.whole) > share
        rows = _rows(first.whole, writers) if large else [first.whole]
        holders = dict.fromkeys(rows, everybody)
    else:
        for rank, other in enumerate(held):
            own = other[name].own
            if own is not None and (own.size or not first.whole.size):
                holders.setdefault(own, []).append(rank)
        if sum(box.size for box in holders) != first.whole.size:
            raise UsageError(
                f"state: {name} is a DTensor of shape {list(first.shape)}, of which this group's "
                "ranks have only a part: give Checkpointer the group of its whole device mesh"
            )
    return [
        (Piece(name, _key(name, box, first.whole), box), _bytes(first, box), ranks)
        for box, ranks in holders.items()
    ]


def _rows(box: Box, count: int) -> list[Box]:
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
    """Return a key that is unique among the pieces of all tensors.

    The key of a piece ends with the offset in brackets. The key of a whole tensor is its name, with
    empty brackets appended if the name itself ends with a bracket.
    """
    if box != whole:
        return f"{name}[{','.join(str(index) for index in box.offset)}]"
    return f"{name}[]" if name.endswith("]") else name


def _bytes(held: Held, box: Box) -> int:
    return box.size * itemsize(held.dtype)
