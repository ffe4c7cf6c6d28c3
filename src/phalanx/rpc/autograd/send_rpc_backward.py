"""Handles of the tensors that this worker has sent, for the gradients that return."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from phalanx.rpc.autograd.metadata import Source

__all__ = ["SendHandles", "make_handle"]


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
