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
from phalanx.train.checkpoints.collective_action import RankGroup
from phalanx.train.checkpoints.directory import CheckpointDirectory
from phalanx.train.checkpoints.files import write_file
from phalanx.train.checkpoints.manifest import File, Manifest, write_manifest
from phalanx.train.checkpoints.safetensors import build_header, tensor_bytes
from phalanx.train.checkpoints.sharding import (
    Shard,
    TensorDescription,
    assign_shards,
    describe_tensors,
    extract_shard,
    is_distributed,
    total_bytes,
)
from phalanx.train.checkpoints.state_tree import flatten

__all__ = ["save"]

Value = TypeVar("Value")
# Without sharding, rank 0 writes one file per `FILE_BYTES`, each in a thread of its own. The number
# is limited by `MAX_FILES` and by the cores.
FILE_BYTES = 32 * 2**20
MAX_FILES = 4


@dataclass(frozen=True)
class _LocalPlan:
    """The part of a rank in a save, which it announces to the others before anything is written."""

    directory_name: str
    descriptions: dict[str, TensorDescription]


@torch.no_grad()
def save(
    ranks: RankGroup,
    directory: CheckpointDirectory,
    step: int,
    state: Mapping[str, Any],
    sharded: bool,
) -> Path:
    """Save a state; see `Checkpointer.save`. Collective."""
    content: tuple[Any, dict[str, Tensor]] = (None, {})

    def plan() -> _LocalPlan:
        nonlocal content
        _check_step(step)
        content = flatten(state)
        if not sharded:
            _check_not_distributed(content[1])
        directory_name = (
            convert_errors(lambda: directory.begin(step).name) if ranks.rank == 0 else ""
        )
        return _LocalPlan(
            directory_name, describe_tensors(content[1]) if sharded or ranks.rank == 0 else {}
        )

    def convert_errors(action: Callable[[], Value]) -> Value:
        return _convert_errors(
            f"the checkpoint of step {step} was not saved", directory.path, action
        )

    try:
        plans = ranks.run_and_gather(plan)
        descriptions = [each.descriptions for each in plans]
        temporary = directory.path / plans[0].directory_name
        # Every rank computes the same result or raises the same error.
        shares = (
            assign_shards(descriptions)
            if sharded
            else assign_shards(descriptions[:1], _file_count(descriptions[0]))
        )
        own_files = [ranks.rank] if sharded else list(range(len(shares))) if ranks.rank == 0 else []
        tree, tensors = content
        files = ranks.run_and_gather(
            lambda: convert_errors(lambda: _write_files(temporary, own_files, shares, tensors))
        )

        def finish() -> str:
            written = [file for rank_files in files for file in rank_files]
            manifest = Manifest(
                step, ranks.size, sharded, _versions(), written, descriptions[0], shares, tree
            )
            write_manifest(temporary, manifest)
            return directory.commit().name

        return directory.path / ranks.run_on_first(lambda: convert_errors(finish))
    finally:
        directory.end()


def _convert_errors(message: str, path: Path, action: Callable[[], Value]) -> Value:
    """Run an action that writes; turn an OSError into a CheckpointError with context and advice."""
    try:
        return action()
    except OSError as error:
        advice = ": older checkpoints are unchanged"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"; free disk space, or keep fewer checkpoints{advice}"
        raise CheckpointError(f"{message}: {error.strerror or error} in {path}{advice}") from error


def _file_count(descriptions: Mapping[str, TensorDescription]) -> int:
    """Return the number of files that rank 0 writes in parallel, each on its own core."""
    return max(
        1, min(MAX_FILES, len(os.sched_getaffinity(0)), total_bytes(descriptions) // FILE_BYTES)
    )


def _write_files(
    temporary: Path, own_files: list[int], shares: list[list[Shard]], tensors: Mapping[str, Tensor]
) -> list[File]:
    """Write the files in `own_files` in parallel."""

    def write(index: int) -> File:
        return _write(temporary, index, shares[index], tensors)

    if len(own_files) < 2:
        return [write(index) for index in own_files]
    with ThreadPoolExecutor(len(own_files), "phalanx-checkpoint") as threads:
        return list(threads.map(write, own_files))


@torch.no_grad()  # the setting is per thread
def _write(
    temporary: Path, index: int, file_shards: list[Shard], tensors: Mapping[str, Tensor]
) -> File:
    shards = {shard.key: extract_shard(tensors[shard.name], shard) for shard in file_shards}
    name = f"state-{index:05d}.safetensors"
    return File(name, *write_file(temporary / name, _file_parts(shards)))


def _file_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header, order = build_header(tensors)
    yield header
    for key in order:
        yield tensor_bytes(tensors[key])


@functools.cache
def _versions() -> dict[str, str]:
    return {"phalanx": version("phalanx"), "torch": str(torch.__version__)}


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step {step!r} given, expected an integer of at least 0")


def _check_not_distributed(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            raise UsageError(
                f"{name} is a DTensor, of which a rank has only a shard: save it with "
                "Checkpointer(..., sharded=True)"
            )
