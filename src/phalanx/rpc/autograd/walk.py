"""Through the graph of this process, from tensors to what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from phalanx.rpc.autograd.note import Source
from phalanx.rpc.autograd.received import ANCHOR, Origin, origin_of

__all__ = ["leaves", "sources"]


def sources(tensors: Iterable[Tensor], peer: int) -> tuple[Source, ...]:
    """What these depend on of all that has travelled, as far as it concerns a peer.

    Behind tensors that the peer sent the walk ends: what these depend on the peer knows itself.
    """
    found: dict[Source, None] = {}

    def ends(origin: Origin, output: int) -> bool:
        found[origin.source(output)] = None
        if origin.peer != peer:
            found.update(dict.fromkeys(origin.reach))
        return origin.peer == peer

    for _ in _nodes(tensors, ends):
        pass
    return tuple(found)


def leaves(tensors: Iterable[Tensor], stop: Iterable[Source]) -> list[Tensor]:
    """The tensors at the end of the graph (parameters), not looked for behind those in `stop`."""
    closed = {(source.owner, source.number) for source in stop}

    def ends(origin: Origin, _: int) -> bool:
        return (origin.peer, origin.number) in closed

    found = (getattr(node, "variable", None) for node in _nodes(tensors, ends))
    return [variable for variable in found if variable is not None and variable is not ANCHOR]


def _nodes(tensors: Iterable[Tensor], ends: Callable[[Origin, int], bool]) -> Iterator[Node]:
    """All nodes, each once; `ends` says whether to go on behind an output of what was received."""
    stack: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors]
    # A set of the nodes keeps their Python objects alive, so that equal ones are the same one.
    seen: set[Node] = set()
    while stack:
        node, output = stack.pop()
        if node is None:
            continue
        if (origin := origin_of(node)) is not None and ends(origin, output):
            continue
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(node.next_functions)
