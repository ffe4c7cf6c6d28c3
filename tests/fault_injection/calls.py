"""One call of each operation, as a line of source, so that a test can choose its call site.

A `Call` describes an operation; a `PreparedCall` has its tensors and runs the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist

# `_Namespace` defines the names in these lines.
LINES = {
    "all_reduce": "dist.all_reduce(t, op, group, async_op)",
    "reduce": "dist.reduce(t, root, op, group, async_op)",
    "broadcast": "dist.broadcast(t, root, group, async_op)",
    "gather": "dist.gather(t, outs if rank == root else None, root, group, async_op)",
    "scatter": "dist.scatter(t, parts if rank == root else None, root, group, async_op)",
    "all_gather": "dist.all_gather(outs, t, group, async_op)",
    "all_gather_single": "dist.all_gather_into_tensor(whole, t, group, async_op)",
    "reduce_scatter": "dist.reduce_scatter(t, parts, op, group, async_op)",
    "reduce_scatter_single": "dist.reduce_scatter_tensor(t, whole, op, group, async_op)",
    "all_to_all": "dist.all_to_all(outs, parts, group, async_op)",
    "all_to_all_single": "dist.all_to_all_single(taken, whole, None, None, group, async_op)",
    "all_reduce_coalesced": "dist.all_reduce_coalesced([t, parts[0]], op, group, async_op)",
    "barrier": "dist.barrier(group, async_op)",
    "monitored_barrier": "dist.monitored_barrier(group)",
    "objects": "dist.all_gather_object([None] * size, {'rank': rank, 'text': text}, group)",
    "ring": "first(t) or second(t)",
    "exchange": "[dist.isend(t, right, group, tag), dist.irecv(parts[0], left, group, tag)]",
    "batch": "dist.batch_isend_irecv([dist.P2POp(dist.irecv, parts[0], left, group, tag), "
    "dist.P2POp(dist.isend, t, right, group, tag)])",
    "any_source": "recv_all(whole) if rank == root else dist.send(t, root, group, tag)",
}
MESSAGES = ("ring", "exchange", "batch", "any_source")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_reduce_coalesced",
)
BLOCKING = ("monitored_barrier", "objects", "ring", "any_source")
WITHOUT_TENSORS = ("barrier", "monitored_barrier", "objects")
DTYPES = ("float32", "float64", "int32", "int64", "uint8", "bfloat16")
REDUCTIONS = ("SUM", "MAX", "MIN", "PRODUCT")
# In the caller's thread, or in the group's thread and awaited by its work or by its future.
MODES = ("blocking", "work", "future")
# Below and above the inline limit and the size of a chunk.
COUNTS = (1, 16, 1000, 4095, 5000, 60_000, 300_000)
ON_GLOO = (
    "all_reduce",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "barrier",
    "exchange",
    "ring",
    "all_to_all_single",
)


@dataclass(frozen=True)
class Call:
    """An operation of all ranks.

    Attributes:
        kind: A name in `LINES`.
        dtype: Name of the dtype of the tensors.
        count: Number of elements of a tensor, or of each part if there is one for each rank.
        root: Rank of the root.
        reduction: Name of the reduction, such as SUM.
        mode: A name in `MODES`.
        tag: Tag of messages; each receive from any source needs its own.
    """

    kind: str
    dtype: str = "float32"
    count: int = 1
    root: int = 0
    reduction: str = "SUM"
    mode: str = "blocking"
    tag: int = 0

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind not in WITHOUT_TENSORS:
            words.append(f"{self.dtype}[{self.count}]")
        if self.kind in REDUCING:
            words.append(self.reduction)
        if self.kind in ROOTED or self.kind == "any_source":
            words.append(f"root {self.root}")
        return " ".join([*words, self.mode])


def draw(random: Random, size: int, kinds: tuple[str, ...] = tuple(LINES), tag: int = 0) -> Call:
    """Draw a random call for a group of `size` ranks."""
    kind = random.choice(kinds)
    return Call(
        kind,
        random.choice(DTYPES),
        random.choice(COUNTS) // (size if kind in ("all_to_all", "all_gather") else 1),
        random.randrange(size),
        random.choice(REDUCTIONS),
        "blocking" if kind in BLOCKING else random.choice(MODES),
        tag,
    )


class PreparedCall:
    """A call on this rank, with its tensors allocated and its line compiled.

    Args:
        call: The call.
        group: A group of all ranks, so that ranks in it are global ranks.
        file: File name of the call site.
        number: Line number of the call site.
    """

    def __init__(self, call: Call, group: Any, file: str = "call.py", number: int = 1) -> None:
        self._call = call
        self._code = compile("\n" * (number - 1) + LINES[call.kind], file, "eval")
        names = _Namespace(call, group)
        # Only the names that the line uses, to save memory.
        self._names = {
            name: getattr(names, name) for name in self._code.co_names if hasattr(names, name)
        }

    def begin(self) -> list[Any]:
        """Make the call and return its works or futures."""
        works = eval(self._code, self._names)
        works = works if isinstance(works, list) else [works]
        return [work for work in works if hasattr(work, "wait")]

    def run(self) -> None:
        """Make the call and wait for it in its mode."""
        for work in self.begin():
            if self._call.mode == "future" and isinstance(work, dist.Work):
                work.get_future().wait()
            work.wait()


class _Namespace:
    """The names that the lines use."""

    dist = dist
    text = "x" * 100

    def __init__(self, call: Call, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.root, self.tag = call.root, call.tag
        self.op = getattr(dist.ReduceOp, call.reduction)
        self.async_op = call.mode != "blocking"
        self._dtype = getattr(torch, call.dtype)
        self._count = call.count

    @property
    def t(self) -> torch.Tensor:
        return torch.ones(self._count, dtype=self._dtype)

    @property
    def whole(self) -> torch.Tensor:
        return torch.ones(self._count * self.size, dtype=self._dtype)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.t for _ in range(self.size)]

    taken, outs = whole, parts

    # One rank must receive before it sends.

    @property
    def first(self) -> Callable[[torch.Tensor], None]:
        return self._send if self.rank else self._recv

    @property
    def second(self) -> Callable[[torch.Tensor], None]:
        return self._recv if self.rank else self._send

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self.right, self.group, self.tag)

    def _recv(self, tensor: torch.Tensor) -> None:
        dist.recv(torch.empty_like(tensor), self.left, self.group, self.tag)

    def recv_all(self, whole: torch.Tensor) -> None:
        for part in whole.chunk(self.size)[1:]:
            dist.recv(part, None, self.group, self.tag)
