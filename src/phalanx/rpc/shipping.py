"""Arguments and results as bytes, with their tensors beside them.

Pickle, by which functions and classes go by reference: as names that the receiver imports. Those of
the main program do too, where the receiver runs the same program. What has no name (a lambda, a
function inside of another, one that was typed into an interpreter) goes by value, by cloudpickle;
so does what TorchScript has compiled, in its own format.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.rpc.wire import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.rpc.peer import Peer

__all__ = ["Shipment", "context", "pack", "unpack"]

_MAINS = ("__main__", "__mp_main__")
_DTYPES = frozenset(DTYPES)
# Of TorchScript: pickle doesn't know them.
_SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule)


class Shipment:
    """Where objects are packed for, or come from; `context` has this thread's."""

    def __init__(self, peer: Peer, is_answer: bool = False) -> None:
        self.peer, self.is_answer = peer, is_answer
        self.tensors: list[Tensor] = []
        self.undo: list[Callable[[], None]] = []
        """To be called if it never leaves."""

    def cancel(self) -> None:
        """It never leaves."""
        while self.undo:
            self.undo.pop()()


class _Context(threading.local):
    shipment: Shipment | None = None


context = _Context()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    def __init__(self, file: io.BytesIO, shipment: Shipment) -> None:
        super().__init__(file, protocol=5)
        self._shipment = shipment

    def reducer_override(self, obj: Any) -> Any:
        if obj is _nth:  # the most frequent by far
            return NotImplemented
        kind = type(obj)
        if kind is Tensor:
            return self._tensor(obj)
        if kind is nn.Parameter and obj.layout is torch.strided:
            return _parameter, (obj.detach(), obj.requires_grad)
        if self._shipment.peer.same_main and isinstance(obj, (type, types.FunctionType)):
            name = obj.__qualname__
            if obj.__module__ in _MAINS and _found(name) is obj:
                return _of_main, (name,)
        if isinstance(obj, _SCRIPTED):
            return _scripted, (obj.save_to_buffer(_extra_files={}),)
        return super().reducer_override(obj)

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.sparse_coo:
            parts = tensor._indices(), tensor._values()
            return _sparse, (*parts, tensor.shape, tensor.is_coalesced())
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
            return NotImplemented
        if tensor.device.type != "cpu":
            raise UsageError(
                f"a tensor of {tuple(tensor.shape)} on {tensor.device}: RPC carries tensors of the "
                "CPU; send tensor.cpu(), and move it where it arrives"
            )
        self._shipment.tensors.append(tensor)
        return _nth, (len(self._shipment.tensors) - 1,)


def pack(what: object, shipment: Shipment, said: str) -> bytes:
    """Pickle; the tensors are put into the shipment.

    Args:
        what: The object.
        shipment: Where it is for.
        said: What it is, for the message.

    Raises:
        UsageError: Something of it can't be pickled.
    """
    file = io.BytesIO()
    before, context.shipment = context.shipment, shipment
    try:
        _Pickler(file, shipment).dump(what)
    except UsageError:
        shipment.cancel()
        raise
    except Exception as error:
        shipment.cancel()
        raise UsageError(f"{said} can't be sent: {type(error).__name__}: {error}") from error
    finally:
        context.shipment = before
    return file.getvalue()


def unpack(payload: bytes | memoryview, tensors: Sequence[Tensor], shipment: Shipment) -> Any:
    """Unpickle, with the tensors that came beside."""
    shipment.tensors = list(tensors)
    before, context.shipment = context.shipment, shipment
    try:
        return pickle.loads(payload)
    finally:
        context.shipment = before


def by_value(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments, whose parameters are nodes of the graph: their gradients come back to them."""
    return tuple(
        each.view_as(each)
        if type(each) is nn.Parameter and each.requires_grad and torch.is_grad_enabled()
        else each
        for each in args
    )


def _nth(number: int) -> Tensor:
    shipment = context.shipment
    if shipment is None:
        raise RuntimeError("a pickle of phalanx.rpc was loaded outside of it")
    return shipment.tensors[number]


def _sparse(indices: Tensor, values: Tensor, shape: torch.Size, is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=False
    )


def _parameter(data: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(data, requires_grad)


def _scripted(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


def _found(name: str) -> Any:
    for module in _MAINS:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None


def _of_main(name: str) -> Any:
    if (found := _found(name)) is None:
        raise AttributeError(f"the main program of this worker has no {name!r}")
    return found
