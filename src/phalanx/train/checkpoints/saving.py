"""Saving a checkpoint: writers write their files, then rank 0 writes the manifest and commits."""

import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, UsageError
from phalanx.train.checkpoints.collective_action import Peers
from phalanx.train.checkpoints.directory import Directory
from phalanx.train.checkpoints.files import write_file
from phalanx.train.checkpoints.manifest import File, Manifest, write_manifest
from phalanx.train.checkpoints.safetensors import bytes_of, layout
from phalanx.train.checkpoints.sharding import (
    Held,
    Piece,
    bytes_in,
    cut,
    hold,
    is_distributed,
    share_out,
)
from phalanx.train.checkpoints.state_tree import flatten

__all__ = ["save"]

Value = TypeVar("Value")
# Without sharding, rank 0 writes one file per `FILE_BYTES`, each in a thread of its own. The number
# is limited by `MAX_FILES` and by the cores.
FILE_BYTES = 32 * 2**20
MAX_FILES = 4


@dataclass(frozen=True)
class _Begun:
    """The message of a rank to the others before anything is written."""

    place: str
    held: dict[str, Held]


@torch.no_grad()
def save(
    peers: Peers, directory: Directory, step: int, state: Mapping[str, Any], sharded: bool
) -> Path:
    """Save a state; see `Checkpointer.save`. Collective."""
    content: tuple[Any, dict[str, Tensor]] = (None, {})

    def begin() -> _Begun:
        nonlocal content
        _check_step(step)
        content = flatten(state)
        if not sharded:
            _check_whole(content[1])
        place = told(lambda: directory.begin(step).name) if peers.rank == 0 else ""
        return _Begun(place, hold(content[1]) if sharded or peers.rank == 0 else {})

    def told(action: Callable[[], Value]) -> Value:
        return _told(f"the checkpoint of step {step} isn't saved", directory.path, action)

    try:
        begun = peers.gather(begin)
        held = [it.held for it in begun]
        temporary = directory.path / begun[0].place
        # Every rank computes the same result or raises the same error.
        shares = share_out(held) if sharded else share_out(held[:1], _files(held[0]))
        mine = [peers.rank] if sharded else list(range(len(shares))) if peers.rank == 0 else []
        tree, tensors = content
        files = peers.gather(lambda: told(lambda: _write_all(temporary, mine, shares, tensors)))

        def finish() -> str:
            written = [file for some in files for file in some]
            whole = Manifest(step, peers.size, sharded, _versions(), written, held[0], shares, tree)
            write_manifest(temporary, whole)
            return directory.commit().name

        return directory.path / peers.on_first(lambda: told(finish))
    finally:
        directory.end()


def _told(what: str, path: Path, action: Callable[[], Value]) -> Value:
    """Run an action that writes; turn an OSError into a CheckpointError with context and advice."""
    try:
        return action()
    except OSError as error:
        advice = ": older ones are as they were"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"; make room there, or keep fewer{advice}"
        raise CheckpointError(f"{what}: {error.strerror or error} in {path}{advice}") from error


def _files(held: Mapping[str, Held]) -> int:
    """Return the number of files that rank 0 writes in parallel, each on its own core."""
    return max(1, min(MAX_FILES, len(os.sched_getaffinity(0)), bytes_in(held) // FILE_BYTES))


def _write_all(
    temporary: Path, mine: list[int], shares: list[list[Piece]], tensors: Mapping[str, Tensor]
) -> list[File]:
    """Write the files in `mine` in parallel."""

    def write(index: int) -> File:
        return _write(temporary, index, shares[index], tensors)

    if len(mine) < 2:
        return [write(index) for index in mine]
    with ThreadPoolExecutor(len(mine), "phalanx-checkpoint") as threads:
        return list(threads.map(write, mine))


@torch.no_grad()  # the setting is per thread
def _write(temporary: Path, index: int, share: list[Piece], tensors: Mapping[str, Tensor]) -> File:
    mine = {piece.key: cut(tensors[piece.name], piece) for piece in share}
    name = f"state-{index:05d}.safetensors"
    return File(name, *write_file(temporary / name, _parts(mine)))


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    head, order = layout(tensors)
    yield head
    for key in order:
        yield bytes_of(tensors[key])


@functools.cache
def _versions() -> dict[str, str]:
    return {"phalanx": version("phalanx"), "torch": str(torch.__version__)}


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step {step!r} given, expected an integer from 0 on")


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            raise UsageError(
                f"{name} is a DTensor, of which one rank has only a part: save it with "
                "Checkpointer(..., sharded=True)"
            )
