"""Open MPI and MPICH, through mpi4py's functions for buffers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np

# Only the main thread calls MPI, so MPI needs no locks. Must be set before MPI is imported.
mpi4py.rc.thread_level = "funneled"

from mpi4py import MPI  # noqa: E402

from phalanx.bench.operations import STORAGE  # noqa: E402
from phalanx.bench.timed_operation import UnsupportedError, ping_pong  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    # MPI has no 16-bit floats, but can move them as integers.
    "float16": MPI.UINT16_T,
    "bfloat16": MPI.UINT16_T,
}
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_ALIGNMENT = 64


class MpiSystem:
    """A rank of the MPI library that mpi4py has loaded."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()
        self.version = _version(MPI.Get_library_version())

    def empty(self, count: int, dtype: str) -> tuple[Any, NDArray[Any]]:
        """Return a buffer for mpi4py, an array with its MPI type, and the array itself.

        The array is aligned like a tensor.
        """
        storage = STORAGE[dtype]
        memory = np.empty(count * storage.itemsize + _ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % _ALIGNMENT
        array = memory[offset : offset + count * storage.itemsize].view(storage)
        return [array.view(np.uint16) if storage.itemsize == 2 else array, _TYPES[dtype]], array

    def bind(self, operation: str, source: Any, target: Any, dtype: str) -> Callable[[], object]:
        """Return the call of mpi4py on these buffers."""
        if operation in _REDUCTIONS and STORAGE[dtype].itemsize == 2:
            raise UnsupportedError(f"MPI has no {dtype} to reduce")
        world, root = self._world, self.rank == 0
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(world.Allreduce, MPI.IN_PLACE, target),
            "reduce": (
                partial(world.Reduce, MPI.IN_PLACE, target)
                if root
                else partial(world.Reduce, target, None)
            ),
            "broadcast": partial(world.Bcast, target, 0),
            "gather": partial(world.Gather, source, target if root else None, 0),
            "scatter": partial(world.Scatter, source if root else None, target, 0),
            "all_gather": partial(world.Allgather, source, target),
            "all_gather_into_tensor": partial(world.Allgather, source, target),
            "reduce_scatter": partial(world.Reduce_scatter_block, source, target),
            "all_to_all": partial(world.Alltoall, source, target),
            "send_recv": ping_pong(
                self.rank,
                partial(world.Send, source, 1 - self.rank),
                partial(world.Recv, target, 1 - self.rank),
            ),
            "isend_irecv": self._exchange(source, target),
            "barrier": world.Barrier,
        }
        return calls[operation]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._world.Barrier()

    def close(self) -> None:
        """Finalize MPI."""
        MPI.Finalize()

    def _exchange(self, source: Any, target: Any) -> Callable[[], object]:
        next_rank, previous_rank = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        isend, irecv, wait_all = self._world.Isend, self._world.Irecv, MPI.Request.Waitall

        def exchange() -> None:
            wait_all([irecv(target, previous_rank), isend(source, next_rank)])

        return exchange


def _version(text: str) -> str:
    """Return the name and version from a library's description, which may have many lines."""
    words = text.replace("\0", "").replace("Version:", "").replace(",", " ").split()
    return " ".join(words[: 3 if words[0] == "Open" else 2])
