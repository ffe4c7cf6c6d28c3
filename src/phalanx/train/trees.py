"""Trees of objects and tensors, such as states of optimizers, that ranks send to each other."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.torch_versions import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_PIECE = 1 << 22
"""Bytes in a message of `TreeSender`: each has the timeout of the group."""


class _Shape(tuple[Any, ...]):
    """The dtype and shape of a tensor, in its place."""

    __slots__ = ()


def broadcast_tree(own: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the tree of objects that the source has; its tensors are broadcast one by one.

    Args:
        own: The tree of this rank; only used on the source.
        source: The rank in the group.
        group: The group; the default group if None.
    """
    is_source = dist.get_rank(group) == source
    outline = [tree_map_only(Tensor, _shape, own)]
    dist.broadcast_object_list(outline, group_src=source, group=group)
    leaves, spec = tree_flatten(own if is_source else outline[0])
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, _Shape):
            leaves[index] = torch.empty(leaf[1], dtype=leaf[0], device="cpu")
        elif isinstance(leaf, Tensor):
            leaves[index] = leaf.detach().contiguous()
        else:
            continue
        dist.broadcast(leaves[index], group_src=source, group=group)
    return tree_unflatten(leaves, spec)


def _shape(tensor: Tensor) -> _Shape:
    return _Shape((tensor.dtype, tuple(tensor.shape)))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor; in its memory if it is contiguous and on the CPU."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


class TreeSender:
    """A tree that is sent to other ranks in the background, as it is when this is constructed.

    It ends early if a rank is lost, which the loop notices by itself.

    Args:
        own: The tree.
        receivers: The ranks in the group that call `receive_tree`.
        group: A group that has no other operation meanwhile.
    """

    def __init__(self, own: Any, receivers: Sequence[int], group: dist.ProcessGroup) -> None:
        tensors = [each.detach() for each in tree_leaves(own) if isinstance(each, Tensor)]
        outline = pickle.dumps(tree_map_only(Tensor, _shape, own))
        parts = [torch.frombuffer(bytearray(outline), dtype=torch.uint8), *map(_as_bytes, tensors)]
        data = torch.cat(parts)
        header = torch.tensor([len(outline), len(data)], device="cpu")
        self._thread = Thread(
            target=_send, args=(header, data, receivers, group), name="phalanx-state", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which the loss of the group brings at once."""
        self._thread.join()


def _send(header: Tensor, data: Tensor, receivers: Sequence[int], group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # a loss, or the group is left
        for piece in (header, *torch.split(data, _PIECE)):
            for receiver in receivers:
                dist.send(piece, group=group, group_dst=receiver)


def receive_tree(source: int, group: dist.ProcessGroup) -> Any:
    """Return the tree that a rank of the group sends by `TreeSender`; its tensors are on the CPU.

    Blocks until it is here.
    """
    header = torch.empty(2, dtype=torch.int64, device="cpu")
    dist.recv(header, group=group, group_src=source)
    length, size = header.tolist()
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    for piece in torch.split(data, _PIECE):
        dist.recv(piece, group=group, group_src=source)
    leaves, spec = tree_flatten(pickle.loads(data[:length].numpy().tobytes()))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, _Shape):
            dtype, shape = leaf
            part = torch.empty(shape, dtype=dtype, device="cpu")
            begin, length = length, length + part.nbytes
            _as_bytes(part).copy_(data[begin:length])
            leaves[index] = part
    return tree_unflatten(leaves, spec)
