"""Pickling of arguments and results, with their tensors outside the pickle.

Pickle sends functions and classes by reference: as names that the receiver imports. Those of the
main program are also sent by reference, if the receiver runs the same program. Functions without an
importable name (lambdas, nested functions, functions typed into an interpreter) are sent by value,
by cloudpickle. So are compiled TorchScript objects, in TorchScript's own format.

Every tensor that is sent or received with a request or an answer passes through an `AutogradHook`.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.errors import ArgumentTypeError, UsageError
from phalanx.rpc.message import DTYPES
from phalanx.rpc.peer import Peer
from phalanx.system.pickling import CodePickler

# Types that may be, or contain, parameters whose gradients come back.
_WITH_PARAMETERS = frozenset((nn.Parameter, tuple, list, dict))

_NAMED = frozenset((type, types.FunctionType))
_MAINS = ("__main__", "__mp_main__")
_DTYPES = frozenset(DTYPES)
_SPARSE = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)


class AutogradHook(Protocol):
    """A hook that tensors pass through, in the thread that sends or receives them."""

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:
        """Process tensors before they are sent with a request or an answer.

        Args:
            peer: The id of the receiver.
            tensors: All tensors to send.

        Returns:
            The tensors to send in their place, without history, and metadata for the receiver.
        """

    def cancel(self, metadata: bytes) -> None:
        """Free what is kept for tensors that were to be sent with this metadata and were not."""

    def receive(self, peer: int, tensors: list[Tensor], metadata: bytes) -> list[Tensor]:
        """Process tensors before they are put into unpickled arguments or results.

        Args:
            peer: The id of the sender.
            tensors: The received tensors.
            metadata: The metadata that `send` returned on the sender.
        """

    def forget(self, peer: int) -> None:
        """Free everything kept for a peer that is lost."""

    def close(self) -> None:
        """Free everything; called after the last message."""


class PickleContext:
    """The state of packing for a peer, or of unpacking from it; `thread_local` has the thread's."""

    def __init__(self, peer: Peer, hook: AutogradHook, is_answer: bool = False) -> None:
        self.peer, self.hook, self.is_answer = peer, hook, is_answer
        self.tensors: list[Tensor] = []
        self.undo: list[Callable[[], None]] = []
        """Functions to call if the packed object is never sent."""

    def cancel(self) -> None:
        """Undo the packing of an object that is never sent."""
        while self.undo:
            self.undo.pop()()


class _ThreadLocal(threading.local):
    pickle_context: PickleContext | None = None


thread_local = _ThreadLocal()


class _Pickler(CodePickler):
    def __init__(
        self, file: io.BytesIO, pickle_context: PickleContext, refuse_parameters: bool
    ) -> None:
        super().__init__(file, protocol=5)
        self._pickle_context, self._refuse_parameters = pickle_context, refuse_parameters
        self._copied_parameters: set[int] = set()
        """The ids of parameters of modules and optimizers, which arrive as parameters."""
        self._linked_parameters: set[int] = set()
        """The ids of parameters that arrive as tensors whose gradients come back."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _NAMED and _is_own_name(obj):  # the most frequent by far
            return NotImplemented
        if kind is Tensor and (reduced := self._reduce_tensor(obj)) is not NotImplemented:
            return reduced
        if kind is nn.Parameter and obj.layout is torch.strided:
            return self._reduce_parameter(obj)
        if isinstance(obj, (nn.Module, torch.optim.Optimizer)):
            self._copy_parameters(obj)
        if self._pickle_context.peer.same_main and isinstance(obj, (type, types.FunctionType)):
            name = obj.__qualname__
            if obj.__module__ in _MAINS and _find_in_main(name) is obj:
                return _load_from_main, (name,)
        if isinstance(obj, Tensor) and obj.grad_fn is not None and torch.is_grad_enabled():
            raise UsageError(
                f"a tensor of type {kind.__name__}, {obj.dtype} and {obj.layout} that requires "
                "gradients: autograd cannot follow it through a call; send tensor.detach()"
            )
        if isinstance(obj, torch.jit.ScriptFunction):
            return self._reduce_script_function(obj)
        if isinstance(obj, torch.jit.ScriptModule):
            return _load_script_module, (obj.save_to_buffer(_extra_files={}),)
        return super().reducer_override(obj)

    def _reduce_parameter(self, parameter: nn.Parameter) -> Any:
        if parameter.requires_grad and torch.is_grad_enabled():
            if self._refuse_parameters:
                raise _ParameterFound
            if id(parameter) not in self._copied_parameters:
                self._linked_parameters.add(id(parameter))
                return self._reduce_tensor(parameter.view_as(parameter))
        return _make_parameter, (parameter.detach(), parameter.requires_grad)

    def _copy_parameters(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """Send the parameters of a module or an optimizer as parameters, wherever they occur.

        Raises:
            UsageError: One of them was sent before, from a container of another type than a list,
                a tuple or a dict.
        """
        if isinstance(owner, nn.Module):
            numbers = set(map(id, _parameters_of(owner)))
        else:
            numbers = {id(each) for group in owner.param_groups for each in group["params"]}
        if numbers & self._linked_parameters:
            raise UsageError(
                f"a parameter of a {type(owner).__name__} is sent beside it, where its gradient "
                "comes back, but not in a list, tuple or dict: put it into one of these"
            )
        self._copied_parameters |= numbers

    def _reduce_script_function(self, function: Any) -> Any:
        """Reduce to a reference if the name leads to it, else to code, name and defaults."""
        compiled: Any = getattr(function, "_torchdynamo_inline", None)
        if compiled is not None:
            module, name = compiled.__module__, compiled.__qualname__
            if module in _MAINS:
                if self._pickle_context.peer.same_main and _find_in_main(name) is function:
                    return _load_from_main, (name,)
            elif _get_attribute(sys.modules.get(module), name) is function:
                return _load_from_module, (module, name)
        arguments = function.schema.arguments
        names = [argument.name for argument in arguments]
        defaults = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
        saved = function.save_to_buffer(_extra_files={})
        return _ScriptFunction, (saved, function.name, names, defaults)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return (
                self._reduce_sparse_tensor(tensor) if tensor.layout in _SPARSE else NotImplemented
            )
        if tensor.dtype not in _DTYPES:
            return NotImplemented
        if tensor.device.type != "cpu":
            raise UsageError(
                f"a tensor of {tuple(tensor.shape)} on {tensor.device}: RPC sends CPU tensors "
                "only; send tensor.cpu(), and move it to the device on the receiver"
            )
        self._pickle_context.tensors.append(tensor)
        return _get_tensor, (len(self._pickle_context.tensors) - 1,)

    def _reduce_sparse_tensor(self, tensor: Tensor) -> Any:
        """Reduce to indices and values, which are sent as tensors; the graph sees one tensor."""
        if tensor.requires_grad:
            context = self._pickle_context
            (detached,), metadata = context.hook.send(context.peer.id, [tensor])
            if metadata:
                context.undo.append(partial(context.hook.cancel, metadata))
                return _attach_history, (detached, metadata)
            tensor = detached
        if tensor.layout is torch.sparse_coo:
            parts = tensor._indices(), tensor._values()
            return _make_sparse_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = tensor.crow_indices(), tensor.col_indices()
        else:
            parts = tensor.ccol_indices(), tensor.row_indices()
        return _make_sparse_compressed, (*parts, tensor.values(), tensor.shape, tensor.layout)


def _parameters_of(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """Yield the parameters of a module; `parameters()` of a remote one raises."""
    yield from vars(module).get("_parameters", {}).values()
    for child in vars(module).get("_modules", {}).values():
        if child is not None:
            yield from _parameters_of(child)


def serialize(obj: object, pickle_context: PickleContext, description: str) -> bytes:
    """Pickle an object; its tensors are added to the context.

    Args:
        obj: The object.
        pickle_context: The state of the packing.
        description: A description of the object, for error messages.

    Raises:
        UsageError: A part of the object cannot be pickled.
    """
    saved_context, thread_local.pickle_context = thread_local.pickle_context, pickle_context
    try:
        try:
            return _pickle(obj, pickle_context, torch.is_grad_enabled())
        except _ParameterFound:
            pickle_context.cancel()
            pickle_context.tensors.clear()
            return _pickle(_replace_parameters(obj, {}), pickle_context, False)
    except UsageError:
        pickle_context.cancel()
        raise
    except Exception as error:
        pickle_context.cancel()
        kind = ArgumentTypeError if isinstance(error, TypeError) else UsageError
        raise kind(f"{description} cannot be sent: {type(error).__name__}: {error}") from error
    finally:
        thread_local.pickle_context = saved_context


def _pickle(obj: object, pickle_context: PickleContext, refuse_parameters: bool) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle_context, refuse_parameters).dump(obj)
    return file.getvalue()


def deserialize(
    payload: bytes | memoryview, tensors: Sequence[Tensor], pickle_context: PickleContext
) -> Any:
    """Unpickle an object, with the tensors that were sent outside the pickle."""
    pickle_context.tensors = list(tensors)
    saved_context, thread_local.pickle_context = thread_local.pickle_context, pickle_context
    try:
        return pickle.loads(payload)
    finally:
        thread_local.pickle_context = saved_context


class _ParameterFound(Exception):  # noqa: N818 - not an error
    """The pickler has found a parameter that requires gradients."""


def _replace_parameters(value: Any, memo: dict[int, Any]) -> Any:
    """Replace parameters by nodes of the graph, so that their gradients come back to them.

    Args:
        value: A parameter, or a tuple, list or dict of such values. The pickler replaces those in
            other containers, and leaves those of modules and optimizers.
        memo: The replacements by id, so that one object stays one object.
    """
    kind = type(value)
    if kind not in _WITH_PARAMETERS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if kind is nn.Parameter:
        made = value.view_as(value) if value.requires_grad else value
    elif kind is tuple:
        made = tuple([_replace_parameters(each, memo) for each in value])
    else:
        made = memo[id(value)] = kind()  # before its elements, one of which may be `value`
        if kind is dict:
            made.update((key, _replace_parameters(each, memo)) for key, each in value.items())
        else:
            made.extend(_replace_parameters(each, memo) for each in value)
    memo[id(value)] = made
    return made


def _get_tensor(number: int) -> Tensor:
    return _get_pickle_context().tensors[number]


def _get_pickle_context() -> PickleContext:
    if thread_local.pickle_context is None:
        raise RuntimeError("a pickle of phalanx.rpc was loaded outside of it")
    return thread_local.pickle_context


def _make_sparse_coo(
    indices: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool
) -> Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=is_coalesced,
        check_invariants=False,
        device=values.device,
        dtype=values.dtype,
    )


def _make_sparse_compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: torch.Size, layout: torch.layout
) -> Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def _attach_history(tensor: Tensor, metadata: bytes) -> Tensor:
    context = _get_pickle_context()
    (attached,) = context.hook.receive(context.peer.id, [tensor], metadata)
    return attached


def _make_parameter(data: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(data, requires_grad)


def _load_script_module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


class _ScriptFunction:
    """A TorchScript function received by value: a module, and the default arguments it lacks."""

    def __init__(self, saved: bytes, name: str, names: list[str], defaults: dict[str, Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self._parts = saved, name, names, defaults
        self._module = _load_script_module(saved)
        self._names, self._defaults = names, defaults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        remaining = self._names[len(args) :]
        given = {name: value for name, value in self._defaults.items() if name in remaining}
        return self._module(*args, **{**given, **kwargs})

    def __reduce__(self) -> Any:
        return _ScriptFunction, self._parts


def _is_own_name(obj: Any) -> bool:
    """Return whether a function or class has an importable name in this package."""
    module = obj.__module__
    return (
        isinstance(module, str)
        and module.startswith("phalanx.rpc.")
        and _get_attribute(sys.modules.get(module), obj.__qualname__) is obj
    )


def _find_in_main(name: str) -> Any:
    for module in _MAINS:
        if (found := _get_attribute(sys.modules.get(module), name)) is not None:
            return found
    return None


def _get_attribute(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _load_from_module(module: str, name: str) -> Any:
    if (found := _get_attribute(importlib.import_module(module), name)) is None:
        raise AttributeError(f"module {module!r} of this worker has no {name!r}")
    return found


def _load_from_main(name: str) -> Any:
    if (found := _find_in_main(name)) is None:
        raise AttributeError(f"the main program of this worker has no {name!r}")
    return found
