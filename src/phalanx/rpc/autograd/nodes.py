"""Graph nodes of the tensors that workers send and receive, their metadata, and the traversal."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from phalanx.torch_versions import DelayedError

ANCHOR = torch.empty(0, requires_grad=True, dtype=torch.float32, device="cpu")
"""An input of every node: autograd makes no node without an input that requires gradients."""

_HEADER = struct.Struct("<QII")
_INDEX = struct.Struct("<I")
_SOURCE = struct.Struct("<IQI")


class _SendRpc(torch.autograd.Function):
    """A node at the tensor's position in the graph when it was sent, unaffected by later changes.

    Its output represents the tensor but holds no values: only the graph is kept for a backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        if tensor.layout is not torch.strided:  # a gradient may have the layout of its tensor
            return torch.zeros_like(tensor)
        single = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        return single.expand(tensor.shape).detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def make_handle(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that represents a sent tensor in the graph."""
    output: Tensor = _SendRpc.apply(tensor)  # type: ignore[no-untyped-call]
    return output


class SendHandles:
    """The handles by message, each kept until its gradient has arrived or none can arrive."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[int, dict[int, Tensor]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    def keep(self, peer: int, number: int, handles: dict[int, Tensor]) -> None:
        """Keep the handles of a message to a peer, by the index of their tensor in the message."""
        self._messages[number] = (peer, handles)

    def get(self, source: Source) -> Tensor | None:
        """Return the handle of a tensor that this worker sent, or None if it has been freed."""
        _, handles = self._messages.get(source.number, (0, {}))
        return handles.get(source.tensor_index)

    def take(self, peer: int, number: int, indices: Iterable[int], keep: bool) -> list[Tensor]:
        """Return the handles of tensors whose gradients have arrived, and free them unless `keep`.

        Raises:
            RuntimeError: A handle has been freed, or the message was sent to another worker.
        """
        with self._lock:
            receiver, handles = self._messages.get(number, (peer, {}))
            found = [handles.get(index) for index in indices]
            if receiver != peer or any(handle is None for handle in found):
                raise RuntimeError(
                    f"the gradients of message {number} to worker {peer} have already been "
                    "received, and its graph is freed: for a second backward pass through the "
                    "same graph, call the first with retain_graph=True"
                )
            if not keep:
                for index in indices:
                    del handles[index]
                if not handles:
                    del self._messages[number]
        return [handle for handle in found if handle is not None]

    def release(self, number: int) -> None:
        """Free the handles of a message on which nothing at the receiver depends any more."""
        with self._lock:
            released = self._messages.pop(number, None)
        del released  # outside the lock: freeing its graph may release other messages

    def forget(self, peer: int) -> None:
        """Free the handles of all messages to a peer that has died or is leaving."""
        with self._lock:
            numbers = [number for number, (to, _) in self._messages.items() if to == peer]
            released = [self._messages.pop(number) for number in numbers]
        del released


class SharedTensor:
    """A tensor of a peer that this worker reads in the peer's memory.

    It is as if the peer sent it for every use, except that the peer keeps one handle for all uses,
    until this object and all graphs with the tensor are freed.

    Args:
        graph: The graph of this worker.
        peer: The id of the worker that has the tensor.
        number: The number of the handle.
        values: The values, in memory that this worker has mapped.
    """

    def __init__(self, graph: BackwardGraph, peer: int, number: int, values: Tensor) -> None:
        self._graph, self.peer, self.number, self.values = graph, peer, number, values
        self._metadata = AutogradMetadata(number, (0,), ())

    def attach(self) -> Tensor:
        """Return the tensor, whose gradients go to the peer, with the present values."""
        order = self._graph.next_order()
        recv = RecvRpcBackward(self._graph, self.peer, self._metadata, (), order, self)
        (output,) = receive(recv, [self.values.detach()], [])
        return output

    def __del__(self) -> None:
        self._graph.release_shared(self)


class BackwardGraph(Protocol):
    """The interface of the graph to which a node belongs."""

    def propagate(
        self, recv: RecvRpcBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Send gradients to the tensors' sender, and return those of `recv.local_sources`."""

    def next_order(self) -> int:
        """Return the index of a new node."""

    def release_received(self, recv: RecvRpcBackward) -> None:
        """Record that the node has been freed."""

    def release_shared(self, shared: SharedTensor) -> None:
        """Record that a shared tensor is no longer used."""


class RecvRpcBackward:
    """The tensors that a node outputs, and the way of their gradients back to the sender.

    Attributes:
        peer: The id of the worker that sent them.
        metadata: The metadata of the message that carried them; the node's outputs have the order
            of its indices.
        local_sources: The tensors on which they depend that this worker sent, in the order of the
            node's inputs.
        order: The node's index among the nodes of this process, in order of creation.
        shared: The peer's tensor that this node represents in place of a message, or None.
        unfinished: Indices of the tensors for which the peer still keeps its graph, until this node
            is freed.
    """

    def __init__(
        self,
        graph: BackwardGraph,
        peer: int,
        metadata: AutogradMetadata,
        local_sources: tuple[Source, ...],
        order: int,
        shared: object = None,
    ) -> None:
        self._graph, self.peer, self.metadata = graph, peer, metadata
        self.local_sources, self.order, self.shared = local_sources, order, shared
        self.unfinished = set(() if shared else metadata.indices)

    def source(self, output: int) -> Source:
        """Return the identifier of an output of the node."""
        return Source(self.peer, self.metadata.number, self.metadata.indices[output])

    def propagate(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send gradients of the node's outputs to the worker that sent the tensors.

        Returns:
            The gradients of the node's inputs, in the order of `local_sources`.
        """
        return self._graph.propagate(self, gradients)

    def __del__(self) -> None:
        if self.shared is None:
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
    refuse = DelayedError(
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


class Source(NamedTuple):
    """A tensor that was sent, identified by its sender, its message and its index there."""

    owner: int
    number: int
    tensor_index: int


class AutogradMetadata(NamedTuple):
    """The metadata of one message, a request or a reply.

    Attributes:
        number: The message's number, unique at its sender.
        indices: Indices of the message's tensors that require gradients.
        dependencies: Tensors sent earlier on which these depend. The receiver connects its graph to
            those that it sent itself, and passes the others on in metadata of its own.
    """

    number: int
    indices: tuple[int, ...]
    dependencies: tuple[Source, ...]


def pack_metadata(metadata: AutogradMetadata) -> bytes:
    """Serialize metadata."""
    number, indices, dependencies = metadata
    head = _HEADER.pack(number, len(indices), len(dependencies))
    return b"".join((head, *map(_INDEX.pack, indices), *starmap(_SOURCE.pack, dependencies)))


def read_number(data: bytes) -> int:
    """Return the message number in packed metadata."""
    number: int = _HEADER.unpack_from(data)[0]
    return number


def unpack_metadata(data: bytes, tensors: int) -> AutogradMetadata:
    """Deserialize the metadata of a message.

    Args:
        data: The packed metadata.
        tensors: The number of tensors in the message.

    Raises:
        ValueError: The data is not metadata of such a message.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"metadata of {len(data)} bytes: expected at least {_HEADER.size}")
    number, index_count, source_count = _HEADER.unpack_from(data)
    sources_offset = _HEADER.size + index_count * _INDEX.size
    end = sources_offset + source_count * _SOURCE.size
    if len(data) != end:
        raise ValueError(f"metadata of {len(data)} bytes: its header declares {end}")
    indices = tuple(index for (index,) in _INDEX.iter_unpack(data[_HEADER.size : sources_offset]))
    if not indices or max(indices) >= tensors or len(set(indices)) < len(indices):
        raise ValueError(f"metadata for the tensors {indices} of a message with {tensors}")
    return AutogradMetadata(
        number, indices, tuple(map(Source._make, _SOURCE.iter_unpack(data[sources_offset:])))
    )


def sources(tensors: Iterable[Tensor], peer: int) -> tuple[Source, ...]:
    """Return the sent and received tensors on which these depend, as far as a peer needs them.

    The traversal ends at tensors that the peer sent: the peer knows the dependencies of those.
    """
    found: dict[Source, None] = {}

    def ends(recv: RecvRpcBackward, output: int) -> bool:
        found[recv.source(output)] = None
        if recv.peer != peer:
            found.update(dict.fromkeys(recv.metadata.dependencies))
        return recv.peer == peer

    for _ in _nodes(tensors, ends):
        pass
    return tuple(found)


def leaves(tensors: Iterable[Tensor], stop: Iterable[Source]) -> list[Tensor]:
    """Return the leaves of the graph (parameters), without those behind the messages in `stop`."""
    stopped = {(source.owner, source.number) for source in stop}

    def ends(recv: RecvRpcBackward, _: int) -> bool:
        return (recv.peer, recv.metadata.number) in stopped

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
        is_recv = isinstance(node, _RecvRpc._backward_cls)
        if is_recv and ends(node.recv, output):
            continue
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(node.next_functions)
