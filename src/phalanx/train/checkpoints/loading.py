"""Loading a checkpoint: verify it, then parse it, with all ranks using the same one."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.train.checkpoints.collective_action import RankGroup, UnusableCheckpoint
from phalanx.train.checkpoints.compatibility import check_compatibility
from phalanx.train.checkpoints.directory import CheckpointDirectory
from phalanx.train.checkpoints.files import ContentError, read_verified
from phalanx.train.checkpoints.manifest import Manifest, read_manifest
from phalanx.train.checkpoints.safetensors import DTYPES, FormatError, parse, read_tensor
from phalanx.train.checkpoints.sharding import Shard, copy_overlap, local_box
from phalanx.train.checkpoints.state_tree import unflatten

__all__ = ["Checkpoint", "load"]

_log = logging.getLogger("phalanx")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    step: int
    """The step at which it was saved."""
    state: dict[str, Any]
    """The saved state, with tuples as lists."""
    path: Path
    """The directory of the checkpoint."""
    world_size: int
    """Number of ranks that saved it."""
    versions: dict[str, str]
    """The versions of `phalanx` and `torch` that saved it."""


def load(
    ranks: RankGroup,
    directory: CheckpointDirectory,
    like: Mapping[str, Any] | None,
    map_location: Any,
) -> Checkpoint | None:
    """Load the latest usable checkpoint; see `Checkpointer.load`. Collective."""
    errors: list[str] = []
    for name in ranks.run_on_first(directory.names):
        path = directory.path / name
        try:
            return _load(ranks, path, like, map_location)
        except UnusableCheckpoint as error:
            errors.append(f"{path}: {error}")
            directory.unusable_names.add(name)
            if ranks.rank == 0:
                _log.warning("skipping an unusable checkpoint: %s", errors[-1])
    if errors:
        listing = "\n  ".join(errors)
        raise CheckpointError(
            f"none of {len(errors)} checkpoints is usable:\n  {listing}\n"
            "Move them away to start from scratch, or give another directory"
        )
    return None


def _load(
    ranks: RankGroup, path: Path, like: Mapping[str, Any] | None, map_location: Any
) -> Checkpoint:
    def convert_errors(action: Callable[[], Value]) -> Value:
        return _convert_errors(path, action)

    manifest = ranks.run_on_first(lambda: convert_errors(lambda: read_manifest(path)))
    assembly = ranks.run_on_all(
        lambda: _Assembly(manifest, check_compatibility(manifest, like), torch.device(map_location))
    )
    for index in range(len(manifest.files)):
        buffer = _fetch(ranks, path, manifest, index)
        ranks.run_on_all(
            functools.partial(convert_errors, functools.partial(assembly.add_file, index, buffer))
        )
    tensors = ranks.run_on_all(lambda: convert_errors(assembly.finish))
    state = unflatten(manifest.tree, tensors.__getitem__)
    return Checkpoint(manifest.step, state, path, manifest.world_size, manifest.versions)


def _fetch(ranks: RankGroup, path: Path, manifest: Manifest, index: int) -> Tensor:
    """Return the content of a file on all ranks, after one rank has read and verified it."""
    file = manifest.files[index]
    source = index % ranks.size if manifest.sharded else 0
    content: Tensor | None = None

    def read() -> None:
        nonlocal content
        if ranks.rank == source:
            content = read_verified(path / file.name, file.length, file.digest)

    ranks.run_on_all(lambda: _convert_errors(path, read))
    return ranks.broadcast(content, file.length, source)


def _convert_errors(path: Path, action: Callable[[], Value]) -> Value:
    """Run an action that reads a checkpoint; turn errors of the file into UnusableCheckpoint."""
    try:
        return action()
    except (ContentError, FormatError) as error:
        raise UnusableCheckpoint(str(error)) from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else path.name
        raise UnusableCheckpoint(f"{name}: {error.strerror or error}") from error


class _Assembly:
    """The tensors of a checkpoint, assembled file by file."""

    def __init__(
        self, manifest: Manifest, like: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._manifest = manifest
        self._like = like
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._boxes = {name: description.whole for name, description in manifest.tensors.items()}
        self._boxes |= {name: local_box(tensor, name) for name, tensor in like.items()}

    def add_file(self, index: int, buffer: Tensor) -> None:
        """Copy or reference the needed shards of a verified file."""
        entries = parse(buffer)
        for shard in self._manifest.shards[index]:
            entry = entries.get(shard.key)
            description = self._manifest.tensors[shard.name]
            if entry is None or (DTYPES[entry.dtype], entry.shape) != (
                description.dtype,
                shard.box.shape,
            ):
                raise ContentError(
                    f"{self._manifest.files[index].name} has no {shard.key} of the shape and dtype "
                    "that the manifest lists"
                )
            self._copy_shard(shard, read_tensor(buffer, entry))

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors, each on its device and as a DTensor if `like` has one.

        Raises:
            ContentError: The files lack a shard of a tensor.
        """
        for name in self._boxes:
            if name not in self._tensors or self._missing.get(name):
                raise ContentError(f"a part of {name} is missing from the files")
        return {name: self._finish_tensor(name, tensor) for name, tensor in self._tensors.items()}

    def _copy_shard(self, shard: Shard, source: Tensor) -> None:
        target_box = self._boxes[shard.name]
        if shard.box == target_box and shard.name not in self._like:
            self._tensors[shard.name] = source.to(self._device)
            return
        if shard.name not in self._tensors:
            self._tensors[shard.name] = torch.empty(target_box.shape, dtype=source.dtype)
            self._missing[shard.name] = target_box.size
        self._missing[shard.name] -= copy_overlap(
            self._tensors[shard.name], target_box, source, shard.box
        )

    def _finish_tensor(self, name: str, tensor: Tensor) -> Tensor:
        like: Any = self._like.get(name)
        if like is None:
            return tensor.to(self._device)
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            tensor.to(like.to_local().device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
