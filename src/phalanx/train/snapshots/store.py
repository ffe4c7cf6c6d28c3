"""`Snapshots`: the snapshots of a training, in a directory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import SnapshotError, UsageError
from phalanx.train.snapshots.directory import Directory
from phalanx.train.snapshots.loading import Snapshot, load
from phalanx.train.snapshots.peers import Peers
from phalanx.train.snapshots.saving import save

__all__ = ["Snapshots"]


class Snapshots:
    """The snapshots of a training, in a directory that belongs to one job.

    A snapshot is there whole or not at all, whenever a process is killed or the power fails: its
    files are written and flushed to the disk under another name first. It is verified before a byte
    of it is parsed, and nothing is unpickled: tensors are in safetensors files, all else in JSON.

    All ranks of the group make it, with the same arguments. Without a process group it works for
    the process alone. Made before there is a group, it takes the group up when it is first used in
    it, and checks the directory on all ranks then.

    Args:
        directory: Where snapshots are; made if it isn't there. Rank 0's disk is enough, unless
            `sharded`: then all ranks must see the same directory.
        keep: How many snapshots stay, at least 1. While one is saved there is one more, for which
            the disk needs room.
        sharded: Every rank writes a share of the bytes, rather than rank 0 all of them. Needed
            for DTensors (FSDP2, tensor parallel), of which no rank has all.
        group: The ranks that save and load together; the default group if None.

    Raises:
        UsageError: A wrong argument, on this rank. From `save` and `load`: the process group of
            several ranks that made it is gone.
        SnapshotError: The directory can't be made or written, or `sharded` ranks see different
            ones: on all ranks.
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
        self._peers = Peers(group)
        self._sharded = sharded
        self._directory = Directory(Path(directory).absolute(), keep)
        self._prepare()

    @property
    def directory(self) -> Path:
        """Where the snapshots are."""
        return self._directory.path

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Save a state, and return the directory of its snapshot. Collective.

        Blocks on all ranks until the disk has it, which takes as long as the disk needs for the
        bytes: tensors are written from where they are, and hashed meanwhile on another thread. No
        rank may change the tensors before it returns, and none does that waits. The wait of the
        other ranks is bounded by the timeout of the group.

        What a killed save left behind is removed, then the oldest snapshots beyond `keep`. Where
        it fails nothing is left of it, and the older snapshots stay.

        Args:
            step: What the snapshot is called after, from 0 on; with `load` it comes back. Order
                follows the saves, not the steps: training may go back to an earlier step.
            state: Nested dicts and lists of tensors, ints, floats, bools, strings and None; keys
                are strings or ints. Tuples come back as lists. Tensors may be on any device, of any
                shape, strides and dtype that safetensors knows; the same tensor in several places
                is written once. Rank 0's counts; the others' is only checked, and may be less. With
                `sharded` all ranks give the same tensors, and rank 0's values of all else count.

        Raises:
            UsageError: Something in the state that a snapshot can't hold, or a wrong step.
            SnapshotError: A rank couldn't write (a full disk, for one), or another process saves
                in the directory. Like `UsageError` it is raised on all ranks, and names the rank.
            torch.distributed.DistBackendError: A rank died or didn't come.
        """
        return save(self._ranks(), self._directory, step, state, self._sharded)

    def load(
        self,
        like: Mapping[str, Any] | None = None,
        map_location: str | torch.device = "cpu",
    ) -> Snapshot | None:
        """Return the latest snapshot that is good, None where there is none. Collective.

        All ranks get the same one. It is read once, verified against its checksums, and goes to
        the others by broadcast. One that is damaged, incomplete or foreign is passed over in favour
        of the one saved before; a warning of the logger "phalanx" says which file and why.

        Tensors of the state are views of the buffer that was read, unless `map_location` or `like`
        places them elsewhere: what you keep of them keeps the buffer.

        Args:
            like: A state that the snapshot must fit. What is there at the top must be in the
                snapshot, which may have more; inside of that, non-empty dicts must have the same
                keys, lists the same length, tensors the same shape and dtype; other values, empty
                dicts and lists fit anything. A DTensor in it asks for one of the same
                mesh and placements, whatever the world size that saved it. None: anything fits,
                and DTensors come whole.
            map_location: Device of the tensors for which `like` has no DTensor.

        Raises:
            UsageError: The snapshot doesn't fit `like`; all differences are listed.
            SnapshotError: There are snapshots, and none can be used. It tells of each.
            torch.distributed.DistBackendError: A rank died or didn't come.
        """
        return load(self._ranks(), self._directory, like, map_location)

    def _ranks(self) -> Peers:
        """The ranks as they are now: the group may have been made since."""
        before, self._peers = self._peers, Peers(self._group)
        if (self._peers.rank, self._peers.size) == (before.rank, before.size):
            return self._peers
        if self._peers.size == 1:
            self._peers = before
            raise UsageError(
                f"{self._directory.path}: rank {before.rank} of {before.size} made this Snapshots, "
                "and their process group is gone: save and load before destroy_process_group()"
            )
        self._prepare()
        return self._peers

    def _prepare(self) -> None:
        peers, directory = self._peers, self._directory
        peers.on_first(directory.prepare)
        if not self._sharded or peers.size == 1:
            return
        probe = directory.path / peers.on_first(directory.leave_probe)
        try:
            peers.together(lambda: _see(probe, directory))
        finally:
            if peers.rank == 0:
                probe.unlink(missing_ok=True)


def _check_keep(keep: object) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"keep {keep!r} given, expected an integer from 1 on")


def _see(probe: Path, directory: Directory) -> None:
    if not probe.exists():
        raise SnapshotError(
            f"{probe.parent} isn't the directory that rank 0 sees: sharded snapshots need one that "
            "all ranks share"
        )
    directory.prepare()
