"""Memory that the ranks of a host hold once, as tensors."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.parallel.data_parallel.layout import PAGE
from phalanx.parallel.data_parallel.places import Places

__all__ = ["HostMemory"]


class HostMemory:
    """Memory of a host, zeroed, that each of its ranks sees as if it had a replica of its own.

    What a rank writes to a tensor made by `own` only it sees: the kernel copies the page (copy on
    write). What it writes to one made by `common` all see, except where they have such a copy.
    Reading costs no copy. The ranks of a host make it together, and block until all have.

    Args:
        size: In bytes.
        places: Who is on this host.

    Raises:
        PhalanxError: There is not so much memory; on all ranks of the host.
    """

    def __init__(self, size: int, places: Places) -> None:
        self._size = -(-max(size, 1) // PAGE) * PAGE
        made, problem = None, ""
        if places.local_rank == 0:
            try:
                made = _native.Commons.create(self._size)
            except OSError as error:
                problem = os.strerror(error.errno or 0)
        if places.host is not None:
            told = [(os.getpid(), made.descriptor if made else -1, problem)]
            dist.broadcast_object_list(told, group=places.host, group_src=0)
            pid, descriptor, problem = told[0]
            failure = None
            if not problem and places.local_rank:
                made, failure = self._opened(pid, descriptor)
            places.meet()
            if failure is not None:
                raise failure
        if made is None:
            raise PhalanxError(
                f"no shared memory for {self._size} bytes of a model ({problem}): free memory, or "
                "use DistributedDataParallel"
            )
        made.close_descriptor()
        self._commons = made

    def _opened(
        self, pid: int, descriptor: int
    ) -> tuple[_native.Commons | None, PhalanxError | None]:
        try:
            return _native.Commons.open(pid, descriptor, self._size), None
        except OSError as error:
            return None, PhalanxError(
                f"the memory of a model, which process {pid} of this host has made, can't be "
                f"mapped: {os.strerror(error.errno or 0)}"
            )

    def own(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """This rank's replica of bytes `start` to `end`, flat: a storage of its own."""
        if start == end:
            return torch.empty(0, dtype=dtype)
        return from_dlpack(self._commons.own(start, end - start)).view(dtype)

    def common(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """What all ranks of the host see of bytes `start` to `end`, flat."""
        if start == end:
            return torch.empty(0, dtype=dtype)
        return from_dlpack(self._commons.common(start, end - start)).view(dtype)

    def publish(self, start: int, end: int) -> int:
        """Make what this rank has written to its replica common; `start` and `end` are of pages.

        Returns how many pages those were.
        """
        return self._commons.publish(start, end - start)

    def drop(self) -> int:
        """Drop all that this rank has written to its replica; returns how many pages it was."""
        return self._commons.drop(0, self._size)
