"""The manifest of a checkpoint: `manifest.json`, and `SHA256SUMS`, readable by `sha256sum -c`."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.train.checkpoints.directory import step_in
from phalanx.train.checkpoints.files import ContentError, read_small, write_file
from phalanx.train.checkpoints.sharding import Box, Held, Piece
from phalanx.train.checkpoints.state_tree import unflatten

__all__ = ["File", "Manifest", "read_manifest", "write_manifest"]

FORMAT, VERSION = "phalanx-checkpoint", 1
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
_SUMS = re.compile(rb"(?:[0-9a-f]{64}  [A-Za-z0-9][A-Za-z0-9._-]*\n)+")
# Size limit in bytes, far above any real manifest, so that a foreign file is not read forever.
_LIMIT = 2**30


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
    tensors: dict[str, Held]
    pieces: list[list[Piece]]
    """The pieces in each file."""
    tree: Any


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest and the checksums of all files into the directory of a checkpoint."""
    text = _text(_said(manifest)).encode()
    _, digest = write_file(path / MANIFEST, [text])
    lines = [f"{digest}  {MANIFEST}\n"]
    lines += [f"{file.digest}  {file.name}\n" for file in manifest.files]
    write_file(path / SUMS, ["".join(lines).encode()])


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the directory of a checkpoint, verified before it is parsed.

    Raises:
        OSError: The manifest cannot be read.
        ContentError: The manifest is damaged, or in another format.
    """
    digests = _read_sums(path / SUMS)
    text = read_small(path / MANIFEST, _LIMIT)
    if MANIFEST not in digests:
        raise ContentError(f"{SUMS} has no line for {MANIFEST}")
    if hashlib.sha256(text).hexdigest() != digests.pop(MANIFEST):
        raise ContentError(f"{MANIFEST} isn't what was written: its SHA-256 differs")
    try:
        said = json.loads(text)
        if (said["format"], said["version"]) != (FORMAT, VERSION):
            raise ContentError(
                f"{MANIFEST} is of format {said['format']} version {said['version']}, expected "
                f"{FORMAT} version {VERSION}"
            )
        manifest = _parsed(said, digests)
        unflatten(manifest.tree, manifest.tensors.__getitem__)  # fails if a tensor is not described
    except ContentError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ContentError(f"{MANIFEST} isn't a manifest of this format: {error!r}") from error
    if manifest.step != step_in(path.name):
        raise ContentError(f"{MANIFEST} is of step {manifest.step}, the name says another")
    return manifest


def _read_sums(path: Path) -> dict[str, str]:
    text = read_small(path, _LIMIT)
    if not _SUMS.fullmatch(text):
        raise ContentError(f"{SUMS} isn't what was written: not a list of checksums")
    pairs = [line.split("  ") for line in text.decode().splitlines()]
    return {name: digest for digest, name in pairs}


def _text(said: dict[str, Any]) -> str:
    """Return readable JSON, with one line for each value and each tensor."""

    def lines(value: dict[str, Any], margin: str) -> str:
        return ",\n".join(
            f"{margin}{json.dumps(key)}: {json.dumps(it, allow_nan=False)}"
            for key, it in value.items()
        )

    nested = {key: said[key] for key in ("tensors", "state") if said[key]}
    inner = [f" {json.dumps(key)}: {{\n{lines(value, '  ')}\n }}" for key, value in nested.items()]
    outer = lines({key: value for key, value in said.items() if key not in nested}, " ")
    return "{\n" + ",\n".join([outer, *inner]) + "\n}\n"


def _said(manifest: Manifest) -> dict[str, Any]:
    pieces: dict[str, list[dict[str, Any]]] = {name: [] for name in manifest.tensors}
    for index, share in enumerate(manifest.pieces):
        for piece in share:
            said = {"file": index, "key": piece.key}
            if piece.box != manifest.tensors[piece.name].whole:
                said |= {"offset": piece.box.offset, "shape": piece.box.shape}
            pieces[piece.name].append(said)
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "sharded": manifest.sharded,
        "versions": manifest.versions,
        "files": [{"name": file.name, "bytes": file.length} for file in manifest.files],
        "tensors": {
            name: {"dtype": held.dtype, "shape": held.shape, "pieces": pieces[name]}
            for name, held in manifest.tensors.items()
        },
        "state": manifest.tree,
    }


def _parsed(said: dict[str, Any], digests: dict[str, str]) -> Manifest:
    names = [file["name"] for file in said["files"]]
    if sorted(names) != sorted(digests):
        raise ContentError(f"{SUMS} and {MANIFEST} name different files")
    files = [
        File(file["name"], int(file["bytes"]), digests[file["name"]]) for file in said["files"]
    ]
    tensors = {
        name: Held(it["dtype"], tuple(it["shape"]), None) for name, it in said["tensors"].items()
    }
    pieces: list[list[Piece]] = [[] for _ in files]
    for name, it in said["tensors"].items():
        whole = tensors[name].whole
        for piece in it["pieces"]:
            offset, shape = piece.get("offset", whole.offset), piece.get("shape", whole.shape)
            box = Box(tuple(offset), tuple(shape))
            pieces[piece["file"]].append(Piece(name, piece["key"], box))
    return Manifest(
        int(said["step"]),
        int(said["world_size"]),
        bool(said["sharded"]),
        dict(said["versions"]),
        files,
        tensors,
        pieces,
        said["state"],
    )
