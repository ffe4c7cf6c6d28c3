"""The manifest of a checkpoint: `manifest.json`, and `SHA256SUMS`, readable by `sha256sum -c`."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.train.checkpoints.directory import parse_step
from phalanx.train.checkpoints.files import ContentError, read_small, write_file
from phalanx.train.checkpoints.sharding import Box, Shard, TensorDescription
from phalanx.train.checkpoints.state_tree import unflatten

__all__ = ["File", "Manifest", "read_manifest", "write_manifest"]

FORMAT, VERSION = "phalanx-checkpoint", 1
MANIFEST, CHECKSUMS = "manifest.json", "SHA256SUMS"
_CHECKSUM_LINES = re.compile(rb"(?:[0-9a-f]{64}  [A-Za-z0-9][A-Za-z0-9._-]*\n)+")
# Size limit in bytes, far above any real manifest, so that a foreign file is not read forever.
_MAX_BYTES = 2**30


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
    text = read_small(path / MANIFEST, _MAX_BYTES)
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
    text = read_small(path, _MAX_BYTES)
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
            entry = {"file": index, "key": shard.key}
            if shard.box != manifest.tensors[shard.name].whole:
                entry |= {"offset": shard.box.offset, "shape": shard.box.shape}
            shards[shard.name].append(entry)
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
    names = [file["name"] for file in content["files"]]
    if sorted(names) != sorted(digests):
        raise ContentError(f"{CHECKSUMS} and {MANIFEST} list different files")
    files = [
        File(file["name"], int(file["bytes"]), digests[file["name"]]) for file in content["files"]
    ]
    tensors = {
        name: TensorDescription(tensor["dtype"], tuple(tensor["shape"]), None)
        for name, tensor in content["tensors"].items()
    }
    shards: list[list[Shard]] = [[] for _ in files]
    for name, tensor in content["tensors"].items():
        whole = tensors[name].whole
        for shard in tensor["shards"]:
            offset, shape = shard.get("offset", whole.offset), shard.get("shape", whole.shape)
            box = Box(tuple(offset), tuple(shape))
            shards[shard["file"]].append(Shard(name, shard["key"], box))
    return Manifest(
        int(content["step"]),
        int(content["world_size"]),
        bool(content["sharded"]),
        dict(content["versions"]),
        files,
        tensors,
        shards,
        content["state"],
    )
