"""The check that a checkpoint fits an existing state, made before its tensors are read."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.checkpoints.manifest import Manifest
from phalanx.train.checkpoints.safetensors import DTYPES
from phalanx.train.checkpoints.sharding import Held, is_distributed
from phalanx.train.checkpoints.state_tree import Name, Path, names_in, show

__all__ = ["compare"]

# Number of differences that an error message lists.
_SHOWN = 10


def compare(manifest: Manifest, like: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the DTensors of `like`, by the name of the corresponding tensor in the checkpoint.

    Raises:
        UsageError: Keys, shapes or dtypes differ; the message lists the first ten differences.
    """
    if like is None:
        return {}
    distributed: dict[str, Tensor] = {}
    found = list(_differences(names_in(manifest.tree), manifest.tensors, like, (), distributed))
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise UsageError(
            f"the checkpoint of step {manifest.step} doesn't fit this state:\n  "
            + "\n  ".join(found[:_SHOWN] + more)
            + "\nLoad it into the model and optimizer that saved it, or without like= to see what "
            "is in it"
        )
    return distributed


def _differences(
    saved: Any, tensors: Mapping[str, Held], like: Any, path: Path, distributed: dict[str, Tensor]
) -> Iterator[str]:
    if isinstance(like, Tensor):
        yield from _tensor_differences(saved, tensors, like, path, distributed)
    elif isinstance(saved, Name):
        if like is not None:
            yield f"{show(path)}: a tensor in the checkpoint, a {type(like).__name__} here"
    elif isinstance(like, (Mapping, list, tuple)) and like:
        pairs, found = _pairs(saved, like, path)
        yield from found
        for key, one, other in pairs:
            yield from _differences(one, tensors, other, (*path, key), distributed)


def _pairs(saved: Any, like: Any, path: Path) -> tuple[list[tuple[str | int, Any, Any]], list[str]]:
    """Return the common items as (key, saved, like), and a description of each difference."""
    kind = dict if isinstance(like, Mapping) else list
    if not isinstance(saved, kind):
        there = type(saved).__name__
        return [], [f"{show(path)}: a {there} in the checkpoint, a {kind.__name__} here"]
    if not isinstance(like, Mapping):
        if len(saved) != len(like):
            words = f"{len(saved)} items in the checkpoint, {len(like)} here"
            return [], [f"{show(path)}: {words}"]
        return [(index, *both) for index, both in enumerate(zip(saved, like, strict=True))], []
    found = [f"{show((*path, key))}: missing in the checkpoint" for key in like if key not in saved]
    if path:  # at the top level the checkpoint may have more keys
        found += [
            f"{show((*path, key))}: in the checkpoint only" for key in saved if key not in like
        ]
    return [(key, saved[key], like[key]) for key in like if key in saved], found


def _tensor_differences(
    saved: Any,
    tensors: Mapping[str, Held],
    like: Tensor,
    path: Path,
    distributed: dict[str, Tensor],
) -> Iterator[str]:
    here = f"{DTYPES.get(like.dtype, like.dtype)}{list(like.shape)}"
    if not isinstance(saved, Name):
        yield f"{show(path)}: a {type(saved).__name__} in the checkpoint, {here} here"
        return
    held = tensors[saved]
    there = f"{held.dtype}{list(held.shape)}"
    if here != there:
        yield f"{show(path)}: {there} in the checkpoint, {here} here"
    elif is_distributed(like):
        distributed[saved] = like
