"""Memory that the ranks of a host share, as tensors."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.parallel.shared_data_parallel.layout import PAGE
from phalanx.parallel.shared_data_parallel.slice_owners import Places

__all__ = ["HostMemory"]


class HostMemory:
    """Zeroed memory of a host, of which each rank sees a replica of its own.

    Only the rank itself sees what it writes to a tensor made by `own`: the kernel copies the page
    (copy on write). All ranks see what it writes to a tensor made by `common`, except in pages of
    which they have such a copy. Reading makes no copy. All ranks of the host must construct it
    together, and block until all have.

    Args:
        size: The size in bytes, which is rounded up to whole pages.
        places: The ranks of this host.

    Raises:
        PhalanxError: There is not enough memory (raised on all ranks of the host), or this rank
            cannot map it.
    """

    def __init__(self, size: int, places: Places) -> None:
        self._size = -(-max(size, 1) // PAGE) * PAGE
        made, problem = None, ""
        if places.local_rank == 0:
            try:
                made = _native.CowMemory.create(self._size)
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
        self._memory = made

    def _opened(
        self, pid: int, descriptor: int
    ) -> tuple[_native.CowMemory | None, PhalanxError | None]:
        try:
            return _native.CowMemory.open(pid, descriptor, self._size), None
        except OSError as error:
            return None, PhalanxError(
                f"the memory of a model, which process {pid} of this host has made, can't be "
                f"mapped: {os.strerror(error.errno or 0)}"
            )

    def own(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return this rank's replica of bytes `start` to `end`, a 1-D tensor with own storage."""
        if start == end:
            return torch.empty(0, dtype=dtype)
        return from_dlpack(self._memory.private_view(start, end - start)).view(dtype)

    def common(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return bytes `start` to `end`, common to all ranks of the host, as a 1-D tensor."""
        if start == end:
            return torch.empty(0, dtype=dtype)
        return from_dlpack(self._memory.shared_view(start, end - start)).view(dtype)

    def publish(self, start: int, end: int) -> int:
        """Make this rank's writes to its replica common to all ranks.

        Args:
            start: The first byte; a multiple of the page size.
            end: The byte after the last one; a multiple of the page size.

        Returns:
            The number of pages that this rank had written.
        """
        return self._memory.publish(start, end - start)

    def drop(self) -> int:
        """Drop this rank's writes to its replica; return the number of pages that it had."""
        return self._memory.drop(0, self._size)
