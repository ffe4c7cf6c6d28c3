"""Traversal of this process's graph, from tensors to their dependencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from phalanx.rpc.autograd.metadata import Source
from phalanx.rpc.autograd.recv_rpc_backward import ANCHOR, RecvRpcBackward, recv_of

__all__ = ["leaves", "sources"]


def sources(tensors: Iterable[Tensor], peer: int) -> tuple[Source, ...]:
    """Return the sent and received tensors on which these depend, as far as a peer needs them.

    The traversal ends at tensors that the peer sent: the peer knows the dependencies of those.
    """
    found: dict[Source, None] = {}

    def ends(recv: RecvRpcBackward, output: int) -> bool:
        found[recv.source(output)] = None
        if recv.peer != peer:
            found.update(dict.fromkeys(recv.dependencies))
        return recv.peer == peer

    for _ in _nodes(tensors, ends):
        pass
    return tuple(found)


def leaves(tensors: Iterable[Tensor], stop: Iterable[Source]) -> list[Tensor]:
    """Return the leaves of the graph (parameters), without those behind the messages in `stop`."""
    stopped = {(source.owner, source.number) for source in stop}

    def ends(recv: RecvRpcBackward, _: int) -> bool:
        return (recv.peer, recv.number) in stopped

    found = (getattr(node, "variable", None) for node in _nodes(tensors, ends))
    return [variable for variable in found if variable is not None and variable is not ANCHOR]


def _nodes(
    tensors: Iterable[Tensor], ends: Callable[[RecvRpcBackward, int], bool]
) -> Iterator[Node]:
    """Yield each node once; if `ends` is true for a received output, do not go behind it."""
    stack: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
    # The set keeps the nodes' Python objects alive, so that a node keeps its identity.
    visited: set[Node] = set()
    while stack:
        node, output = stack.pop()
        if node is None:
            continue
        if (recv := recv_of(node)) is not None and ends(recv, output):
            continue
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(node.next_functions)
