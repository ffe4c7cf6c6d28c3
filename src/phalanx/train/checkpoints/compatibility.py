"""The check that a checkpoint fits an existing state, made before its tensors are read."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.checkpoints.manifest import Manifest
from phalanx.train.checkpoints.safetensors import DTYPES
from phalanx.train.checkpoints.sharding import TensorDescription, is_distributed
from phalanx.train.checkpoints.state_tree import KeyPath, TensorName, format_path, unflatten_names

__all__ = ["check_compatibility"]

# Number of differences that an error message lists.
_MAX_LISTED = 10


def check_compatibility(manifest: Manifest, like: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the DTensors of `like`, by the name of the corresponding tensor in the checkpoint.

    Raises:
        UsageError: Keys, shapes or dtypes differ; the message lists the first ten differences.
    """
    if like is None:
        return {}
    distributed: dict[str, Tensor] = {}
    differences = list(
        _differences(unflatten_names(manifest.tree), manifest.tensors, like, (), distributed)
    )
    if differences:
        more = (
            [f"and {len(differences) - _MAX_LISTED} more"] if len(differences) > _MAX_LISTED else []
        )
        raise UsageError(
            f"the checkpoint of step {manifest.step} does not match this state:\n  "
            + "\n  ".join(differences[:_MAX_LISTED] + more)
            + "\nLoad it into the model and optimizer that saved it, or without like= to see "
            "its contents"
        )
    return distributed


def _differences(
    saved: Any,
    tensors: Mapping[str, TensorDescription],
    like: Any,
    path: KeyPath,
    distributed: dict[str, Tensor],
) -> Iterator[str]:
    if isinstance(like, Tensor):
        yield from _tensor_differences(saved, tensors, like, path, distributed)
    elif isinstance(saved, TensorName):
        if like is not None:
            yield f"{format_path(path)}: a tensor in the checkpoint, a {type(like).__name__} here"
    elif isinstance(like, (Mapping, list, tuple)) and like:
        pairs, differences = _pairs(saved, like, path)
        yield from differences
        for key, saved_item, like_item in pairs:
            yield from _differences(saved_item, tensors, like_item, (*path, key), distributed)


def _pairs(
    saved: Any, like: Any, path: KeyPath
) -> tuple[list[tuple[str | int, Any, Any]], list[str]]:
    """Return the common items as (key, saved, like), and a description of each difference."""
    kind = dict if isinstance(like, Mapping) else list
    if not isinstance(saved, kind):
        actual = type(saved).__name__
        return [], [f"{format_path(path)}: a {actual} in the checkpoint, a {kind.__name__} here"]
    if not isinstance(like, Mapping):
        if len(saved) != len(like):
            lengths = f"{len(saved)} items in the checkpoint, {len(like)} here"
            return [], [f"{format_path(path)}: {lengths}"]
        return [(index, *both) for index, both in enumerate(zip(saved, like, strict=True))], []
    differences = [
        f"{format_path((*path, key))}: missing in the checkpoint"
        for key in like
        if key not in saved
    ]
    if path:  # at the top level the checkpoint may have more keys
        differences += [
            f"{format_path((*path, key))}: in the checkpoint only"
            for key in saved
            if key not in like
        ]
    return [(key, saved[key], like[key]) for key in like if key in saved], differences


def _tensor_differences(
    saved: Any,
    tensors: Mapping[str, TensorDescription],
    like: Tensor,
    path: KeyPath,
    distributed: dict[str, Tensor],
) -> Iterator[str]:
    expected = f"{DTYPES.get(like.dtype, like.dtype)}{list(like.shape)}"
    if not isinstance(saved, TensorName):
        yield f"{format_path(path)}: a {type(saved).__name__} in the checkpoint, {expected} here"
        return
    description = tensors[saved]
    actual = f"{description.dtype}{list(description.shape)}"
    if expected != actual:
        yield f"{format_path(path)}: {actual} in the checkpoint, {expected} here"
    elif is_distributed(like):
        distributed[saved] = like
