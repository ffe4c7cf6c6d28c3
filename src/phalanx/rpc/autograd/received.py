"""Tensors that came from another worker, as a node of this process's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.rpc.autograd.note import Note, Source

__all__ = ["ANCHOR", "Backwards", "Origin", "origin_of", "receive", "receive_own"]

ANCHOR = torch.empty(0, requires_grad=True)
"""An input of every node: one without an input that requires gradients would be none."""


class Backwards(Protocol):
    """What a node needs of the graph that it belongs to."""

    def pull(self, origin: Origin, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring gradients to where the tensors came from; those of the origin's own sources."""
        ...

    def end(self, origin: Origin) -> None:
        """The node is gone."""
        ...


class Origin:
    """Whence the tensors of a node came.

    Attributes:
        peer: The worker that sent them.
        number: The message in which it did.
        indices: Which of the message's tensors these are, in the order of the node's outputs.
        reach: Tensors of other messages on which they depend.
        own: Those of `reach` that are this worker's, the node's inputs, in order.
        order: Of the nodes of this process, the how manieth.
        waiting: Indices of the tensors for which the peer still keeps what a backward pass needs.
    """

    def __init__(
        self, graph: Backwards, peer: int, note: Note, own: tuple[Source, ...], order: int
    ) -> None:
        self._graph = graph
        self.peer = peer
        self.number = note.number
        self.indices = note.indices
        self.reach = note.reach
        self.own = own
        self.order = order
        self.waiting = set(note.indices)

    def source(self, output: int) -> Source:
        """The name that an output of the node goes by."""
        return Source(self.peer, self.number, self.indices[output])

    def pull(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring gradients of the node's outputs to where these came from.

        Returns:
            The gradients of the node's inputs, in the order of `own`.
        """
        return self._graph.pull(self, gradients)

    def __del__(self) -> None:
        self._graph.end(self)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, origin: Origin, tensors: list[Tensor], *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.origin = origin
        # A view couldn't be changed in place by who gets it.
        return tuple(tensor.detach() if tensor._is_view() else tensor for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            inputs = ctx.origin.pull(gradients)
        if torch.is_grad_enabled() and inputs:
            inputs = _refusing(inputs)
        return (None, None, None, *inputs)


def _refusing(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of which there are no further ones: to ask for those is an error."""
    refuse: Any = torch._C._functions.DelayedError(
        b"gradients of gradients don't go through calls (create_graph=True)", len(gradients)
    )
    given = [None if one is None else one.detach().requires_grad_() for one in gradients]
    refused: Any = refuse(*given)
    return [refused] if isinstance(refused, Tensor) else list(refused)


def receive(origin: Origin, tensors: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a message as outputs of one node, which has these inputs."""
    with torch.enable_grad():
        made: tuple[Tensor, ...] = _Received.apply(  # type: ignore[no-untyped-call]
            origin, tensors, ANCHOR, *inputs
        )
    return made


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor], *_handles: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() if tensor._is_view() else tensor for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


def receive_own(tensors: list[Tensor], handles: list[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a message that this worker has sent to itself, in the graph of its handles."""
    made: tuple[Tensor, ...] = _Copied.apply(tensors, *handles)  # type: ignore[no-untyped-call]
    return made


def origin_of(node: object) -> Origin | None:
    """Whence a node's tensors came; None if it is another kind of node."""
    return node.origin if isinstance(node, _Received._backward_cls) else None  # type: ignore[attr-defined]
