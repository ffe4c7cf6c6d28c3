"""The description of a checkpoint's contents, and its comparison with an existing state.

`flatten` converts a nested state to a JSON tree and named tensors; `unflatten` is its inverse. A
`Manifest` has the tree and describes the tensors and files. `manifest.json` contains it, and
`SHA256SUMS`, readable by `sha256sum -c`, has the checksums of all files. `check_compatibility`
compares a manifest with a state before any tensor is read.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoints.directory import parse_step
from phalanx.checkpoints.files import ContentError, read_small, write_file
from phalanx.checkpoints.safetensors import DTYPES
from phalanx.checkpoints.sharding import Box, Shard, TensorDescription, is_distributed
from phalanx.errors import UsageError

FORMAT, VERSION = "phalanx-checkpoint", 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
# A dict with one of these as its only key represents a value that JSON cannot represent.
TENSOR, FLOAT, ITEMS = "$tensor", "$float", "$items"

_CHECKSUM_LINES = re.compile(rb"(?:[0-9a-f]{64}  [A-Za-z0-9][A-Za-z0-9._-]*\n)+")
# Number of differences that an error message lists.
_MAX_LISTED = 10
_KeyPath = tuple[str | int, ...]
_MAX_DEPTH = 100
"""The maximum number of dicts and lists around a value."""


def flatten(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON tree of a state, and its tensors by name.

    A tensor that occurs several times (tied weights) gets one name. Names are paths such as
    "model.layer.weight".

    Raises:
        UsageError: A value is neither a tensor nor a JSON value, or is nested in too many levels;
            the message has its path.
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


def _format_path(path: _KeyPath) -> str:
    """Return a path as Python code, such as `state["model"]["weight"]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Flattening:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}
        self._ancestors: set[int] = set()

    def encode(self, value: Any, path: _KeyPath) -> Any:
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
            f"{_format_path(path)} is a {type(value).__module__}.{type(value).__qualname__}, "
            "expected a tensor, an int, float, bool, str or None, or dicts and lists of these: a "
            "checkpoint contains no other objects, because loading must not unpickle anything"
        )

    def _encode_nested(self, value: Any, path: _KeyPath) -> Any:
        if id(value) in self._ancestors:
            raise UsageError(f"{_format_path(path)} contains itself, expected a tree")
        if len(path) >= _MAX_DEPTH:
            raise UsageError(
                f"{_format_path(path[:3])}... is nested in more than {_MAX_DEPTH} levels, expected "
                "fewer: readers of JSON have limits, too"
            )
        self._ancestors.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._encode_dict(value, path)
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        finally:
            self._ancestors.remove(id(value))

    def _encode_dict(self, value: Mapping[Any, Any], path: _KeyPath) -> Any:
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise UsageError(
                    f"{_format_path(path)} has the key {key!r}, a {type(key).__name__}, expected "
                    "str or int"
                )
        pairs = [(key, self.encode(item, (*path, key))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {ITEMS: [list(pair) for pair in pairs]}

    def _tensor_name(self, tensor: Tensor, path: _KeyPath) -> str:
        identity = _identity(tensor, path)
        if identity not in self._names:
            name = base = ".".join(str(key) for key in path)
            number = 2
            while name in self.tensors or name == "__metadata__":
                name, number = f"{base}#{number}", number + 1
            self._names[identity] = name
            self.tensors[name] = tensor
        return self._names[identity]


def _identity(tensor: Tensor, path: _KeyPath) -> object:
    """Return a key that is equal for tensors that are the same view of the same memory.

    Raises:
        UsageError: A checkpoint cannot hold such a tensor.
    """
    local = getattr(tensor, "_local_tensor", tensor)  # the local shard of a DTensor
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        kind = "meta" if local.device.type == "meta" else str(local.layout).removeprefix("torch.")
        kind = "quantized" if local.is_quantized else kind
        raise UsageError(
            f"{_format_path(path)} is a {kind} tensor, expected a dense tensor with data"
        )
    if local.dtype not in DTYPES:
        raise UsageError(
            f"{_format_path(path)} is a tensor of {local.dtype}, which safetensors does not "
            "support: convert it first"
        )
    if local is not tensor or local.numel() == 0:
        return id(tensor)
    storage = (local.device, local.data_ptr(), local.dtype, local.is_conj(), local.is_neg())
    return (*storage, local.shape, local.stride())


@dataclass(frozen=True)
class File:
    """A file of tensors: its name, its length in bytes, and its SHA-256 in hexadecimal."""

    name: str
    length: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint's contents."""

    step: int
    world_size: int
    sharded: bool
    versions: dict[str, str]
    files: list[File]
    tensors: dict[str, TensorDescription]
    shards: list[list[Shard]]
    """The shards in each file."""
    tree: Any


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest and the checksums of all files into the directory of a checkpoint."""
    text = _format_json(_to_json(manifest)).encode()
    _, digest = write_file(path / MANIFEST, [text])
    lines = [f"{digest}  {MANIFEST}\n"]
    lines += [f"{file.digest}  {file.name}\n" for file in manifest.files]
    write_file(path / CHECKSUMS, ["".join(lines).encode()])


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the directory of a checkpoint, verified before it is parsed.

    Raises:
        OSError: The manifest cannot be read.
        ContentError: The manifest is damaged, or in another format.
    """
    digests = _read_checksums(path / CHECKSUMS)
    text = read_small(path / MANIFEST)
    if MANIFEST not in digests:
        raise ContentError(f"{CHECKSUMS} has no line for {MANIFEST}")
    if hashlib.sha256(text).hexdigest() != digests.pop(MANIFEST):
        raise ContentError(f"{MANIFEST} is damaged: its SHA-256 differs")
    try:
        content = json.loads(text)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ContentError(
                f"{MANIFEST} is of format {content['format']} version {content['version']}, "
                f"expected {FORMAT} version {VERSION}"
            )
        manifest = _from_json(content, digests)
        unflatten(manifest.tree, manifest.tensors.__getitem__)  # fails if a tensor is not described
    except ContentError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ContentError(f"{MANIFEST} is not a manifest of this format: {error!r}") from error
    if manifest.step != parse_step(path.name):
        raise ContentError(
            f"{MANIFEST} is of step {manifest.step}, which is not the step in the directory's name"
        )
    return manifest


def _read_checksums(path: Path) -> dict[str, str]:
    text = read_small(path)
    if not _CHECKSUM_LINES.fullmatch(text):
        raise ContentError(f"{CHECKSUMS} is damaged: not a list of checksums")
    pairs = [line.split("  ") for line in text.decode().splitlines()]
    return {name: digest for digest, name in pairs}


def _format_json(content: dict[str, Any]) -> str:
    """Return readable JSON, with one line for each value and each tensor."""

    def lines(value: dict[str, Any], margin: str) -> str:
        return ",\n".join(
            f"{margin}{json.dumps(key)}: {json.dumps(item, allow_nan=False)}"
            for key, item in value.items()
        )

    nested = {key: content[key] for key in ("tensors", "state") if content[key]}
    inner = [f" {json.dumps(key)}: {{\n{lines(value, '  ')}\n }}" for key, value in nested.items()]
    outer = lines({key: value for key, value in content.items() if key not in nested}, " ")
    return "{\n" + ",\n".join([outer, *inner]) + "\n}\n"


def _to_json(manifest: Manifest) -> dict[str, Any]:
    shards: dict[str, list[dict[str, Any]]] = {name: [] for name in manifest.tensors}
    for index, file_shards in enumerate(manifest.shards):
        for shard in file_shards:
            shards[shard.name].append({"file": index, "key": shard.key, **vars(shard.box)})
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "sharded": manifest.sharded,
        "versions": manifest.versions,
        "files": [{"name": file.name, "bytes": file.length} for file in manifest.files],
        "tensors": {
            name: {"dtype": description.dtype, "shape": description.shape, "shards": shards[name]}
            for name, description in manifest.tensors.items()
        },
        "state": manifest.tree,
    }


def _from_json(content: dict[str, Any], digests: dict[str, str]) -> Manifest:
    if sorted(file["name"] for file in content["files"]) != sorted(digests):
        raise ContentError(f"{CHECKSUMS} and {MANIFEST} list different files")
    tensors: dict[str, TensorDescription] = {}
    shards: list[list[Shard]] = [[] for _ in content["files"]]
    for name, tensor in content["tensors"].items():
        tensors[name] = TensorDescription(tensor["dtype"], tuple(tensor["shape"]), None)
        for shard in tensor["shards"]:
            box = Box(tuple(shard["offset"]), tuple(shard["shape"]))
            shards[shard["file"]].append(Shard(name, shard["key"], box))
    return Manifest(
        int(content["step"]),
        int(content["world_size"]),
        bool(content["sharded"]),
        dict(content["versions"]),
        [File(it["name"], int(it["bytes"]), digests[it["name"]]) for it in content["files"]],
        tensors,
        shards,
        content["state"],
    )


def check_compatibility(manifest: Manifest, like: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the DTensors of `like`, by the name of the corresponding tensor in the checkpoint.

    Raises:
        UsageError: Keys, shapes or dtypes differ; the message lists the first ten differences.
    """
    if like is None:
        return {}
    saved = unflatten(manifest.tree, lambda name: _SavedTensor(name, manifest.tensors[name]))
    distributed: dict[str, Tensor] = {}
    differences = [
        f"{_format_path(path)}: {difference}"
        for path, difference in _differences(saved, like, (), distributed)
    ]
    if differences:
        more = len(differences) - _MAX_LISTED
        listed = [*differences[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
        raise UsageError(
            f"the checkpoint of step {manifest.step} does not match this state:\n  "
            + "\n  ".join(listed)
            + "\nLoad it into the model and optimizer that saved it, or without like= to see "
            "its contents"
        )
    return distributed


class _SavedTensor(NamedTuple):
    """A placeholder for a tensor in the state of a checkpoint."""

    name: str
    description: TensorDescription


def _differences(
    saved: Any, like: Any, path: _KeyPath, distributed: dict[str, Tensor]
) -> Iterator[tuple[_KeyPath, str]]:
    """Yield the path and a description of each difference, and collect DTensors."""
    is_tensor = isinstance(saved, _SavedTensor)
    if isinstance(like, Tensor):
        expected = f"{DTYPES.get(like.dtype, like.dtype)}{list(like.shape)}"
        actual = str(saved.description) if is_tensor else f"a {type(saved).__name__}"
        if actual != expected:
            yield path, f"{actual} in the checkpoint, {expected} here"
        elif is_distributed(like):
            distributed[saved.name] = like
    elif is_tensor:
        if like is not None:
            yield path, f"a tensor in the checkpoint, a {type(like).__name__} here"
    elif isinstance(like, (Mapping, list, tuple)) and like:
        kind = dict if isinstance(like, Mapping) else list
        if not isinstance(saved, kind):
            yield path, f"a {type(saved).__name__} in the checkpoint, a {kind.__name__} here"
        elif kind is list and len(saved) != len(like):
            yield path, f"{len(saved)} items in the checkpoint, {len(like)} here"
        else:
            yield from _item_differences(_items(saved), _items(like), path, distributed)


def _items(value: Any) -> dict[str | int, Any]:
    return dict(value if isinstance(value, Mapping) else enumerate(value))


def _item_differences(
    saved: dict[str | int, Any],
    like: dict[str | int, Any],
    path: _KeyPath,
    distributed: dict[str, Tensor],
) -> Iterator[tuple[_KeyPath, str]]:
    yield from (((*path, key), "missing in the checkpoint") for key in like if key not in saved)
    if path:  # at the top level the checkpoint may have more keys
        yield from (((*path, key), "in the checkpoint only") for key in saved if key not in like)
    for key, item in like.items():
        if key in saved:
            yield from _differences(saved[key], item, (*path, key), distributed)
