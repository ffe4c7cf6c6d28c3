"""`Checkpointer`: the interface to the checkpoints in a directory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import CheckpointError, UsageError
from phalanx.train.checkpoints.collective_action import RankGroup
from phalanx.train.checkpoints.directory import CheckpointDirectory
from phalanx.train.checkpoints.loading import Checkpoint, load
from phalanx.train.checkpoints.saving import save

__all__ = ["Checkpointer"]


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
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        sharded: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_keep(keep)
        self._group = group
        self._rank_group = RankGroup(group)
        self._sharded = sharded
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
        """
        return save(self._current_ranks(), self._directory, step, state, self._sharded)

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
        """
        return load(self._current_ranks(), self._directory, like, map_location)

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
        if not self._sharded or ranks.size == 1:
            return
        probe = directory.path / ranks.run_on_first(directory.write_probe)
        try:
            ranks.run_on_all(lambda: _check_probe(probe, directory))
        finally:
            if ranks.rank == 0:
                probe.unlink(missing_ok=True)


def _check_keep(keep: object) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"keep {keep!r} given, expected an integer of at least 1")


def _check_probe(probe: Path, directory: CheckpointDirectory) -> None:
    if not probe.exists():
        raise CheckpointError(
            f"{probe.parent} is not the directory that rank 0 sees: sharded checkpoints need a "
            "directory that all ranks share"
        )
    directory.prepare()
