"""Graph nodes for the tensors received from another worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.rpc.autograd.metadata import AutogradMetadata, Source

__all__ = ["ANCHOR", "BackwardGraph", "RecvRpcBackward", "receive", "receive_own", "recv_of"]

ANCHOR = torch.empty(0, requires_grad=True)
"""An input of every node: autograd makes no node without an input that requires gradients."""


class BackwardGraph(Protocol):
    """The interface of the graph to which a node belongs."""

    def propagate(
        self, recv: RecvRpcBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Send gradients to the tensors' sender, and return those of `recv.local_sources`."""
        ...

    def release_received(self, recv: RecvRpcBackward) -> None:
        """Record that the node has been freed."""
        ...


class RecvRpcBackward:
    """The tensors that a node outputs, and the way of their gradients back to the sender.

    Attributes:
        peer: The id of the worker that sent them.
        number: The number of the message that carried them.
        indices: Their indices in the message, in the order of the node's outputs.
        dependencies: Tensors of other messages on which they depend.
        local_sources: The tensors of `dependencies` that this worker sent, in the order of the
            node's inputs.
        order: The node's index among the nodes of this process, in order of creation.
        unfinished: Indices of the tensors for which the peer still keeps its graph.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        peer: int,
        metadata: AutogradMetadata,
        local_sources: tuple[Source, ...],
        order: int,
    ) -> None:
        self._graph = graph
        self.peer = peer
        self.number = metadata.number
        self.indices = metadata.indices
        self.dependencies = metadata.dependencies
        self.local_sources = local_sources
        self.order = order
        self.unfinished = set(metadata.indices)

    def source(self, output: int) -> Source:
        """Return the identifier of an output of the node."""
        return Source(self.peer, self.number, self.indices[output])

    def propagate(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send gradients of the node's outputs to the worker that sent the tensors.

        Returns:
            The gradients of the node's inputs, in the order of `local_sources`.
        """
        return self._graph.propagate(self, gradients)

    def __del__(self) -> None:
        self._graph.release_received(self)


class _RecvRpc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recv: RecvRpcBackward, tensors: list[Tensor], *_inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recv = recv
        # The caller could not change a view in place.
        return tuple(tensor.detach() if tensor._is_view() else tensor for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            inputs = ctx.recv.propagate(gradients)
        if torch.is_grad_enabled() and inputs:
            inputs = _refuse_second_derivatives(inputs)
        return (None, None, None, *inputs)


def _refuse_second_derivatives(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients such that differentiating them again raises an error."""
    refuse: Any = torch._C._functions.DelayedError(
        b"gradients of gradients do not pass through calls (create_graph=True)", len(gradients)
    )
    given = [None if one is None else one.detach().requires_grad_() for one in gradients]
    results: Any = refuse(*given)
    return [results] if isinstance(results, Tensor) else list(results)


def receive(
    recv: RecvRpcBackward, tensors: list[Tensor], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return the tensors of a message as outputs of one node with these inputs."""
    with torch.enable_grad():
        outputs: tuple[Tensor, ...] = _RecvRpc.apply(  # type: ignore[no-untyped-call]
            recv, tensors, ANCHOR, *inputs
        )
    return outputs


class _SendToSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor], *_handles: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() if tensor._is_view() else tensor for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


def receive_own(tensors: list[Tensor], handles: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of a message from this worker to itself, connected to their handles."""
    outputs: tuple[Tensor, ...] = _SendToSelf.apply(tensors, *handles)  # type: ignore[no-untyped-call]
    return outputs


def recv_of(node: object) -> RecvRpcBackward | None:
    """Return the origin of a node's tensors, or None if it is another kind of node."""
    return node.recv if isinstance(node, _RecvRpc._backward_cls) else None  # type: ignore[attr-defined]
