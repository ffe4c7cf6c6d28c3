"""The tensors that others have got from this worker, for gradients that come back."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from phalanx.rpc.autograd.note import Source

__all__ = ["Sent", "handle"]


class _Sending(torch.autograd.Function):
    """A node of the graph where the tensor was when it was sent, whatever is done to it later.

    Its output stands for the tensor and holds no values: what is kept for a backward pass is the
    graph alone.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        single = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        return single.expand(tensor.shape).detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def handle(tensor: Tensor) -> Tensor:
    """What stands for a tensor in the graph: of its shape, and of no use but for gradients."""
    made: Tensor = _Sending.apply(tensor)  # type: ignore[no-untyped-call]
    return made


class Sent:
    """Handles by message; each is kept until its gradient has come, or nobody can send one."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[int, dict[int, Tensor]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    def keep(self, peer: int, number: int, handles: dict[int, Tensor]) -> None:
        """Keep the handles of a message to a peer."""
        self._messages[number] = (peer, handles)

    def handle(self, source: Source) -> Tensor | None:
        """The handle of a tensor of this worker, None if it is kept no longer."""
        _, handles = self._messages.get(source.number, (0, {}))
        return handles.get(source.place)

    def take(self, peer: int, number: int, indices: Iterable[int], keep: bool) -> list[Tensor]:
        """Handles for which gradients have come; unless `keep`, no other will.

        Raises:
            RuntimeError: They are kept no longer.
        """
        with self._lock:
            receiver, handles = self._messages.get(number, (peer, {}))
            found = [handles.get(index) for index in indices]
            if receiver != peer or any(one is None for one in found):
                raise RuntimeError(
                    f"gradients of what was sent to worker {peer} in message {number} came before, "
                    "and what they needed is freed: for a second backward pass through the same "
                    "graph, call the first with retain_graph=True"
                )
            if not keep:
                for index in indices:
                    del handles[index]
                if not handles:
                    del self._messages[number]
        return [one for one in found if one is not None]

    def release(self, number: int) -> None:
        """The receiver has nothing any more that depends on the message."""
        with self._lock:
            gone = self._messages.pop(number, None)
        del gone  # with its graph, the end of which may release others

    def forget(self, peer: int) -> None:
        """A peer is dead, or says that it leaves."""
        with self._lock:
            gone = [number for number, (to, _) in self._messages.items() if to == peer]
            lost = [self._messages.pop(number) for number in gone]
        del lost
