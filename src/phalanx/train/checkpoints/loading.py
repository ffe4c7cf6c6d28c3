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
from phalanx.train.checkpoints.collective_action import BadCheckpoint, Peers
from phalanx.train.checkpoints.compatibility import compare
from phalanx.train.checkpoints.directory import Directory
from phalanx.train.checkpoints.files import ContentError, read_checked
from phalanx.train.checkpoints.manifest import Manifest, read_manifest
from phalanx.train.checkpoints.safetensors import DTYPES, FormatError, parse, tensor_in
from phalanx.train.checkpoints.sharding import Piece, box_of, overlap
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
    peers: Peers, directory: Directory, like: Mapping[str, Any] | None, map_location: Any
) -> Checkpoint | None:
    """Load the latest usable checkpoint; see `Checkpointer.load`. Collective."""
    troubles: list[str] = []
    for name in peers.on_first(directory.names):
        path = directory.path / name
        try:
            return _load(peers, path, like, map_location)
        except BadCheckpoint as error:
            troubles.append(f"{path}: {error}")
            directory.bad.add(name)
            if peers.rank == 0:
                _log.warning("a checkpoint can't be used, trying the one before: %s", troubles[-1])
    if troubles:
        listed = "\n  ".join(troubles)
        raise CheckpointError(
            f"none of {len(troubles)} checkpoints can be used:\n  {listed}\n"
            "Move them away to begin anew, or give another directory"
        )
    return None


def _load(
    peers: Peers, path: Path, like: Mapping[str, Any] | None, map_location: Any
) -> Checkpoint:
    def blamed(action: Callable[[], Value]) -> Value:
        return _blame(path, action)

    manifest = peers.on_first(lambda: blamed(lambda: read_manifest(path)))
    assembly = peers.together(
        lambda: _Assembly(manifest, compare(manifest, like), torch.device(map_location))
    )
    for index in range(len(manifest.files)):
        buffer = _fetch(peers, path, manifest, index)
        peers.together(functools.partial(blamed, functools.partial(assembly.take, index, buffer)))
    tensors = peers.together(lambda: blamed(assembly.finish))
    state = unflatten(manifest.tree, tensors.__getitem__)
    return Checkpoint(manifest.step, state, path, manifest.world_size, manifest.versions)


def _fetch(peers: Peers, path: Path, manifest: Manifest, index: int) -> Tensor:
    """Return the content of a file on all ranks, after one rank has read and verified it."""
    file = manifest.files[index]
    source = index % peers.size if manifest.sharded else 0
    content: Tensor | None = None

    def read() -> None:
        nonlocal content
        if peers.rank == source:
            content = read_checked(path / file.name, file.length, file.digest)

    peers.together(lambda: _blame(path, read))
    return peers.share(content, file.length, source)


def _blame(path: Path, action: Callable[[], Value]) -> Value:
    """Run an action that reads a checkpoint; turn errors of the file into BadCheckpoint."""
    try:
        return action()
    except (ContentError, FormatError) as error:
        raise BadCheckpoint(str(error)) from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else path.name
        raise BadCheckpoint(f"{name}: {error.strerror or error}") from error


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
        self._boxes = {name: held.whole for name, held in manifest.tensors.items()}
        self._boxes |= {name: box_of(tensor, name) for name, tensor in like.items()}

    def take(self, index: int, buffer: Tensor) -> None:
        """Copy or reference the needed pieces of a verified file."""
        entries = parse(buffer)
        for piece in self._manifest.pieces[index]:
            entry = entries.get(piece.key)
            held = self._manifest.tensors[piece.name]
            if entry is None or (DTYPES[entry.dtype], entry.shape) != (held.dtype, piece.box.shape):
                raise ContentError(
                    f"{self._manifest.files[index].name} has no {piece.key} of the shape and dtype "
                    "that the manifest says"
                )
            self._put(piece, tensor_in(buffer, entry))

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors, each on its device and as a DTensor if `like` has one.

        Raises:
            ContentError: The files lack a piece of a tensor.
        """
        for name in self._boxes:
            if name not in self._tensors or self._missing.get(name):
                raise ContentError(f"a part of {name} is in no file")
        return {name: self._placed(name, tensor) for name, tensor in self._tensors.items()}

    def _put(self, piece: Piece, part: Tensor) -> None:
        place = self._boxes[piece.name]
        if piece.box == place and piece.name not in self._like:
            self._tensors[piece.name] = part.to(self._device)
            return
        if piece.name not in self._tensors:
            self._tensors[piece.name] = torch.empty(place.shape, dtype=part.dtype)
            self._missing[piece.name] = place.size
        self._missing[piece.name] -= overlap(self._tensors[piece.name], place, part, piece.box)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
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
