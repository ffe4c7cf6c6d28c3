"""The conversion of a nested state to a JSON tree and named tensors, and back."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.checkpoints.safetensors import DTYPES

__all__ = ["KeyPath", "TensorName", "flatten", "format_path", "unflatten", "unflatten_names"]

# A dict with one of these as its only key represents a value that JSON cannot represent.
TENSOR, FLOAT, ITEMS = "$tensor", "$float", "$items"

KeyPath = tuple[str | int, ...]


class TensorName(str):
    """The name of a tensor, as a placeholder for the tensor in a state."""

    __slots__ = ()


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON tree of a state, and its tensors by name.

    A tensor that occurs several times (tied weights) gets one name. Names are paths such as
    "model.layer.weight".

    Raises:
        UsageError: A value is neither a tensor nor a JSON value; the message has its path.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"state is a {type(state).__name__}, expected a dict of tensors and JSON values"
        )
    flattening = _Flattening()
    return flattening.encode(state, ()), flattening.tensors


def unflatten(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the state that a tree represents; `tensor` maps the name of a tensor to its value."""
    if isinstance(tree, list):
        return [unflatten(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensor(tree[TENSOR])
    if FLOAT in tree:
        return float(tree[FLOAT])
    pairs = tree[ITEMS] if ITEMS in tree else tree.items()
    return {key: unflatten(item, tensor) for key, item in pairs}


def unflatten_names(tree: Any) -> Any:
    """Return the state that a tree represents, with a `TensorName` in place of each tensor."""
    return unflatten(tree, TensorName)


def format_path(path: KeyPath) -> str:
    """Return a path as Python code, such as `state["model"]["weight"]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Flattening:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._ancestors: set[int] = set()

    def encode(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR: self._tensor_name(value, path)}
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
        if isinstance(value, (np.bool_, np.integer, np.floating)):
            return self.encode(value.item(), path)
        if isinstance(value, (Mapping, list, tuple)):
            return self._encode_nested(value, path)
        raise UsageError(
            f"{format_path(path)} is a {type(value).__module__}.{type(value).__qualname__}, "
            "expected a tensor, an int, float, bool, str or None, or dicts and lists of these: a "
            "checkpoint contains no other objects, because loading must not unpickle anything"
        )

    def _encode_nested(self, value: Any, path: KeyPath) -> Any:
        if id(value) in self._ancestors:
            raise UsageError(f"{format_path(path)} contains itself, expected a tree")
        self._ancestors.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._encode_dict(value, path)
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        finally:
            self._ancestors.remove(id(value))

    def _encode_dict(self, value: Mapping[Any, Any], path: KeyPath) -> Any:
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise UsageError(
                    f"{format_path(path)} has the key {key!r}, a {type(key).__name__}, expected "
                    "str or int"
                )
        pairs = [(key, self.encode(item, (*path, key))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {ITEMS: [list(pair) for pair in pairs]}

    def _tensor_name(self, tensor: Tensor, path: KeyPath) -> str:
        identity = _identity(tensor, path)
        if identity not in self._names:
            name = base = ".".join(str(key) for key in path)
            number = 2
            while name in self.tensors or name == "__metadata__":
                name, number = f"{base}#{number}", number + 1
            self._names[identity] = name
            self.tensors[name] = tensor
        return self._names[identity]


def _identity(tensor: Tensor, path: KeyPath) -> object:
    """Return a key that is equal for tensors that are the same view of the same memory.

    Raises:
        UsageError: A checkpoint cannot hold such a tensor.
    """
    local = getattr(tensor, "_local_tensor", tensor)  # the local shard of a DTensor
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        kind = "meta" if local.device.type == "meta" else str(local.layout).removeprefix("torch.")
        kind = "quantized" if local.is_quantized else kind
        raise UsageError(
            f"{format_path(path)} is a {kind} tensor, expected a dense tensor with data"
        )
    if local.dtype not in DTYPES:
        raise UsageError(
            f"{format_path(path)} is a tensor of {local.dtype}, which safetensors does not "
            "support: convert it first"
        )
    if local is not tensor or local.numel() == 0:
        return id(tensor)
    storage = (local.device, local.data_ptr(), local.dtype, local.is_conj(), local.is_neg())
    return (*storage, local.shape, local.stride())
