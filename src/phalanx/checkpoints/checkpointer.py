"""`Checkpointer`: the interface to the checkpoints in a directory, and how it saves and loads them.

To save, writers write their files, then rank 0 writes the manifest and commits. To load, a
checkpoint is verified, then parsed, and all ranks use the same one.
"""

import errno
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.checkpoints.collective_action import RankGroup, UnusableCheckpoint
from phalanx.checkpoints.directory import CheckpointDirectory
from phalanx.checkpoints.files import ContentError, read_verified, write_file
from phalanx.checkpoints.manifest import (
    File,
    Manifest,
    check_compatibility,
    flatten,
    read_manifest,
    unflatten,
    write_manifest,
)
from phalanx.checkpoints.safetensors import (
    DTYPES,
    build_header,
    read_tensors,
    tensor_bytes,
)
from phalanx.checkpoints.sharding import (
    Shard,
    TensorDescription,
    assign_shards,
    copy_overlap,
    describe_tensors,
    extract_shard,
    is_distributed,
    local_box,
    total_bytes,
)
from phalanx.errors import CheckpointError, UsageError

# Without sharding, rank 0 writes one file per `FILE_BYTES`, each in a thread of its own. The number
# is limited by `MAX_FILES` and by the cores.
FILE_BYTES = 32 * 2**20
MAX_FILES = 4

_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Example:
        >>> checkpoint = checkpoints.load()
        >>> if checkpoint is not None:
        ...     keys = model.load_state_dict(checkpoint.state["model"])
        ...     step = checkpoint.step
    """

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


class Checkpointer:
    """The checkpoints of a training job, in a directory that belongs to the job alone.

    Saving is atomic, even if a process is killed or the power fails: the files are first written
    and flushed to disk under another name. A checkpoint is verified before it is parsed. Nothing is
    unpickled: tensors are in safetensors files, all other values in JSON.

    All ranks of the group must create this object, with the same arguments. Without a process group
    it works for this process alone. If a group is created later, the first use in it adopts the
    group and checks the directory again.

    Args:
        directory: The directory of the checkpoints; created if it does not exist. A local disk of
            rank 0 is sufficient, unless `sharded` is True: then all ranks must see the same
            directory.
        keep: Number of checkpoints to keep, at least 1. The disk needs space for one more while a
            checkpoint is saved.
        sharded: True to have every rank write a share of the bytes, instead of rank 0 writing all.
            Required for DTensors (FSDP2, tensor parallel), which no rank has as a whole.
        group: The ranks that save and load together; the default group if None.

    Raises:
        UsageError: An argument is invalid, on this rank. From `save` and `load`: this object was
            created in a process group of several ranks that no longer exists.
        CheckpointError: The directory cannot be created or written, or `sharded` is True and the
            ranks see different directories. Every rank raises it.

    Example:
        >>> checkpoints = Checkpointer("checkpoints", keep=2)
        >>> state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        >>> path = checkpoints.save(1000, state)
        >>> checkpoints.load().step
        1000
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        sharded: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_integer("keep", keep, 1)
        self._group = group
        self._rank_group = RankGroup(group)
        self.sharded = sharded
        """True if every rank writes a share of the bytes."""
        self._directory = CheckpointDirectory(Path(directory).absolute(), keep)
        self._prepare()

    @property
    def directory(self) -> Path:
        """The absolute path of the directory."""
        return self._directory.path

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Save a state, and return the directory of its checkpoint. Collective.

        Blocks on all ranks until the checkpoint is on disk, which takes as long as the disk needs
        for the bytes. Tensors on the CPU are written from their own memory if contiguous, and
        hashed on another thread at the same time. No rank may change the tensors before this call
        returns. The timeout of the group limits how long the other ranks wait.

        The call removes the remains of killed saves, and then the oldest checkpoints beyond `keep`.
        If it fails, no partial checkpoint remains, and the older checkpoints are kept.

        Args:
            step: The step, 0 or more. It is part of the checkpoint's name, and `load` returns it.
                Checkpoints are ordered by the time of saving, not by step, because training may
                return to an earlier step.
            state: Nested dicts and lists of tensors, ints, floats, bools, strings and None; keys
                are strings or ints. Tuples are loaded as lists. Tensors may be on any device, and
                have any shape, any strides and any dtype that safetensors supports. A tensor that
                occurs several times is written once. Rank 0's state is saved; that of the other
                ranks is only checked, and may contain less. With `sharded` all ranks must give the
                same tensors, and rank 0's other values are saved.

        Raises:
            UsageError: The state contains a value that a checkpoint cannot hold, or the step is
                invalid. Every rank raises it.
            CheckpointError: A rank cannot write (for example because the disk is full), or another
                process is saving in the directory. Every rank raises it. Both errors name the rank,
                unless all ranks have the same error.
            torch.distributed.DistBackendError: A rank died or did not join the collective.

        Example:
            >>> checkpoints.save(1200, {"model": model.state_dict()}).name
            '000001-step-1200'
        """
        return _save(self._current_ranks(), self._directory, step, state, self.sharded)

    def load(
        self,
        like: Mapping[str, Any] | None = None,
        map_location: str | torch.device = "cpu",
    ) -> Checkpoint | None:
        """Return the latest usable checkpoint, or None if there is no checkpoint. Collective.

        All ranks get the same checkpoint. Each file is read once, verified against its checksum,
        and broadcast to the other ranks. A checkpoint that is damaged, incomplete or of another
        format is skipped in favour of the previous one. A warning of the logger "phalanx" names the
        file and the reason.

        Tensors of the state are views of the buffer that was read, unless `map_location` or `like`
        places them elsewhere. A reference to such a tensor keeps the whole buffer in memory.

        Args:
            like: A state that the checkpoint must fit. The checkpoint must have all its top-level
                keys, and may have more. Below the top level non-empty dicts must have the same
                keys, lists the same length, and tensors the same shape and dtype. None in it fits
                anything. Other values, empty dicts and empty lists fit anything except a tensor. A
                DTensor is loaded as a DTensor of the same mesh and placements, whatever the world
                size that saved it. If `like` is None, any checkpoint fits, and DTensors are loaded
                as whole tensors.
            map_location: The device of the tensors for which `like` has no DTensor.

        Raises:
            UsageError: The checkpoint does not fit `like`; the message lists the first ten
                differences.
            CheckpointError: There are checkpoints, and none is usable. The message gives the reason
                for each.
            torch.distributed.DistBackendError: A rank died or did not join the collective.

        Example:
            >>> checkpoint = checkpoints.load(like={"model": model.state_dict()})
            >>> if checkpoint is not None:
            ...     keys = model.load_state_dict(checkpoint.state["model"])
        """
        return _load(self._current_ranks(), self._directory, like, map_location)

    def _current_ranks(self) -> RankGroup:
        """Return the current ranks, as the group may have been created after this object."""
        previous, self._rank_group = self._rank_group, RankGroup(self._group)
        if (self._rank_group.rank, self._rank_group.size) == (previous.rank, previous.size):
            return self._rank_group
        if self._rank_group.size == 1:
            self._rank_group = previous
            raise UsageError(
                f"{self._directory.path}: this Checkpointer was created by rank {previous.rank} of "
                f"{previous.size}, whose process group no longer exists: save and load before "
                "destroy_process_group()"
            )
        self._prepare()
        return self._rank_group

    def _prepare(self) -> None:
        ranks, directory = self._rank_group, self._directory
        ranks.run_on_first(directory.prepare)
        if not self.sharded or ranks.size == 1:
            return
        probe = directory.path / ranks.run_on_first(directory.write_probe)
        try:
            ranks.run_on_all(lambda: _check_probe(probe, directory))
        finally:
            if ranks.rank == 0:
                probe.unlink(missing_ok=True)


def save_local(path: Path, step: int, state: Mapping[str, Any]) -> None:
    """Save a state of this process alone, in place of the one in a directory.

    Arguments, guarantees and errors are those of `Checkpointer.save`. Not collective.

    Example:
        >>> save_local(folder / "server", 100, {"weight": torch.ones(3)})
        >>> load_local(folder / "server", like={"weight": torch.zeros(3)})
        {'weight': tensor([1., 1., 1.])}
    """
    directory = CheckpointDirectory(path.absolute(), keep=1)
    directory.prepare()
    _save(RankGroup.alone(), directory, step, state, sharded=False)
    directory.wait_for_removals()


def load_local(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `save_local` saved in a directory. Not collective.

    Raises:
        UsageError: The state does not fit `like`; see `Checkpointer.load`.
        CheckpointError: The directory has no usable state.

    Example:
        >>> save_local(folder / "server", 100, {"step": 100})
        >>> load_local(folder / "server", like={"step": 0})
        {'step': 100}
    """
    directory = CheckpointDirectory(path.absolute(), keep=1)
    checkpoint = _load(RankGroup.alone(), directory, like, "cpu")
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint")
    return checkpoint.state


def _check_integer(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name} {value!r} given, expected an integer of at least {minimum}")


def _check_probe(probe: Path, directory: CheckpointDirectory) -> None:
    if not probe.exists():
        raise CheckpointError(
            f"{probe.parent} is not the directory that rank 0 sees: sharded checkpoints need a "
            "directory that all ranks share"
        )
    directory.prepare()


@torch.no_grad()
def _save(
    ranks: RankGroup,
    directory: CheckpointDirectory,
    step: int,
    state: Mapping[str, Any],
    sharded: bool,
) -> Path:
    """Save a state; see `Checkpointer.save`. Collective."""
    convert_errors = _convert_write_errors(step, directory.path)
    tree: Any = None
    tensors: dict[str, Tensor] = {}

    @convert_errors
    def plan() -> tuple[str, dict[str, TensorDescription]]:
        nonlocal tree, tensors
        _check_integer("step", step, 0)
        tree, tensors = flatten(state)
        if not sharded:
            _check_not_distributed(tensors)
        name = directory.begin(step).name if ranks.rank == 0 else ""
        return (name, describe_tensors(tensors) if sharded or ranks.rank == 0 else {})

    try:
        names, descriptions = zip(*ranks.run_and_gather(plan), strict=True)
        temporary = directory.path / names[0]
        # Every rank computes the same result or raises the same error.
        if sharded:
            shares = assign_shards(descriptions)
            own_files = range(ranks.rank, ranks.rank + 1)
        else:
            shares = assign_shards(descriptions[:1], _file_count(descriptions[0]))
            own_files = range(len(shares)) if ranks.rank == 0 else range(0)

        @convert_errors
        def write() -> list[File]:
            return _write_files(temporary, own_files, shares, tensors)

        files = ranks.run_and_gather(write)

        @convert_errors
        def finish() -> str:
            written = [file for rank_files in files for file in rank_files]
            manifest = Manifest(
                step, ranks.size, sharded, _versions(), written, descriptions[0], shares, tree
            )
            write_manifest(temporary, manifest)
            return directory.commit().name

        return directory.path / ranks.run_on_first(finish)
    finally:
        directory.end()


@contextmanager
def _convert_write_errors(step: int, path: Path) -> Iterator[None]:
    """Turn an OSError of a save into a CheckpointError with context and advice."""
    try:
        yield
    except OSError as error:
        advice = ": older checkpoints are unchanged"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"; free disk space, or keep fewer checkpoints{advice}"
        elif error.errno == errno.EFBIG:
            advice = f"; raise the limit of file sizes (`ulimit -f`){advice}"
        raise CheckpointError(
            f"the checkpoint of step {step} was not saved: {error.strerror or error} in {path}"
            f"{advice}"
        ) from error


def _file_count(descriptions: Mapping[str, TensorDescription]) -> int:
    """Return the number of files that rank 0 writes in parallel, each on its own core."""
    return max(
        1, min(MAX_FILES, len(os.sched_getaffinity(0)), total_bytes(descriptions) // FILE_BYTES)
    )


def _write_files(
    temporary: Path, own_files: range, shares: list[list[Shard]], tensors: Mapping[str, Tensor]
) -> list[File]:
    """Write the files in `own_files` in parallel."""

    @torch.no_grad()  # the setting is per thread
    def write(index: int) -> File:
        shards = {shard.key: extract_shard(tensors[shard.name], shard) for shard in shares[index]}
        name = f"state-{index:05d}.safetensors"
        return File(name, *write_file(temporary / name, _file_parts(shards)))

    if len(own_files) < 2:
        return [write(index) for index in own_files]
    with ThreadPoolExecutor(len(own_files), "phalanx-checkpoint") as threads:
        return list(threads.map(write, own_files))


def _file_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    header, order = build_header(tensors)
    yield header
    for key in order:
        yield tensor_bytes(tensors[key])


@functools.cache
def _versions() -> dict[str, str]:
    return {"phalanx": version("phalanx"), "torch": str(torch.__version__)}


def _check_not_distributed(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_distributed(tensor):
            raise UsageError(
                f"{name} is a DTensor, of which a rank has only a shard: save it with "
                "Checkpointer(..., sharded=True)"
            )


def _load(
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
            return _load_checkpoint(ranks, path, like, map_location)
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


def _load_checkpoint(
    ranks: RankGroup, path: Path, like: Mapping[str, Any] | None, map_location: Any
) -> Checkpoint:
    """Load a checkpoint; see `Checkpointer.load`. Collective.

    Raises:
        UnusableCheckpoint: The checkpoint is damaged, incomplete or of another format.
    """
    convert_errors = _convert_read_errors(path)
    manifest = ranks.run_on_first(convert_errors(lambda: read_manifest(path)))
    assembly = ranks.run_on_all(
        lambda: _Assembly(manifest, check_compatibility(manifest, like), torch.device(map_location))
    )
    for index, file in enumerate(manifest.files):
        source = index % ranks.size if manifest.sharded else 0
        content: Tensor | None = None

        @convert_errors
        def read(file: File = file, source: int = source) -> None:
            nonlocal content
            if ranks.rank == source:
                content = read_verified(path / file.name, file.length, file.digest)

        ranks.run_on_all(read)
        buffer = ranks.broadcast(content, file.length, source)
        ranks.run_on_all(convert_errors(functools.partial(assembly.add_file, index, buffer)))
    tensors = ranks.run_on_all(convert_errors(assembly.finish))
    state = unflatten(manifest.tree, tensors.__getitem__)
    return Checkpoint(manifest.step, state, path, manifest.world_size, manifest.versions)


@contextmanager
def _convert_read_errors(path: Path) -> Iterator[None]:
    """Turn errors of a file of a checkpoint into UnusableCheckpoint."""
    try:
        yield
    except ContentError as error:
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
        tensors = read_tensors(buffer)
        for shard in self._manifest.shards[index]:
            tensor, dtype = tensors.get(shard.key), self._manifest.tensors[shard.name].dtype
            if tensor is None or (DTYPES[tensor.dtype], tensor.shape) != (dtype, shard.box.shape):
                raise ContentError(
                    f"{self._manifest.files[index].name} has no {shard.key} of the shape and dtype "
                    "that the manifest lists"
                )
            self._copy_shard(shard, tensor)

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
            self._tensors[shard.name] = torch.empty(
                target_box.shape, dtype=source.dtype, device="cpu"
            )
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
