"""How a snapshot is saved: each writer its file, then rank 0 the manifest and the name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.train.snapshots.directory import Directory
from phalanx.train.snapshots.files import write_file
from phalanx.train.snapshots.manifest import File, Manifest, write_manifest
from phalanx.train.snapshots.peers import Peers
from phalanx.train.snapshots.pieces import Held, Piece, cut, hold, is_distributed, share_out
from phalanx.train.snapshots.safetensors import bytes_of, layout
from phalanx.train.snapshots.tree import flatten

__all__ = ["save"]


@dataclass(frozen=True)
class _Begun:
    """What a rank tells the others before anything is written."""

    place: str
    held: dict[str, Held]


@torch.no_grad()
def save(
    peers: Peers, directory: Directory, step: int, state: Mapping[str, Any], sharded: bool
) -> Path:
    """Save a state; see `Snapshots.save`. Collective."""
    content: tuple[Any, dict[str, Tensor]] = (None, {})

    def begin() -> _Begun:
        nonlocal content
        _check_step(step)
        content = flatten(state)
        if not sharded:
            _check_whole(content[1])
        place = directory.begin(step).name if peers.rank == 0 else ""
        return _Begun(place, hold(content[1]) if sharded or peers.rank == 0 else {})

    try:
        begun = peers.gather(begin)
        held = [it.held for it in begun]
        temporary = directory.path / begun[0].place
        shares = peers.gather(lambda: share_out(held if sharded else held[:1]))[0]
        tree, tensors = content
        files = peers.gather(lambda: _write(temporary, peers.rank, shares, tensors))

        def finish() -> str:
            versions = {"phalanx": version("phalanx"), "torch": torch.__version__}
            written = [file for file in files if file is not None]
            manifest = Manifest(step, peers.size, sharded, versions, written, held[0], shares, tree)
            write_manifest(temporary, manifest)
            return directory.commit().name

        return directory.path / peers.on_first(finish)
    finally:
        directory.end()


def _write(
    temporary: Path, rank: int, shares: list[list[Piece]], tensors: Mapping[str, Tensor]
) -> File | None:
    if rank >= len(shares):
        return None
    mine = {piece.key: cut(tensors[piece.name], piece) for piece in shares[rank]}
    name = f"state-{rank:05d}.safetensors"
    return File(name, *write_file(temporary / name, _parts(mine)))


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    head, order = layout(tensors)
    yield head
    for key in order:
        yield bytes_of(tensors[key])


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step {step!r} given, expected an integer from 0 on")


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            raise UsageError(
                f"{name} is a DTensor, of which one rank has only a part: save it with "
                "Snapshots(..., sharded=True)"
            )
