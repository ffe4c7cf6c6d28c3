"""Systems that are backends of `torch.distributed`: Phalanx and Gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import phalanx
from phalanx._autoload import register
from phalanx.bench.work import UnsupportedError
from phalanx.parallel.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["TorchSystem"]

# PyTorch 2.13 renamed these, and warns at every call of the older names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TorchSystem:
    """One rank of a backend, called as every script calls it: through `torch.distributed`."""

    def __init__(self, backend: str, store: str, timeout: float, *, shared: bool) -> None:
        """Join the group.

        Args:
            backend: its name for `torch.distributed`.
            store: path of the file in which the ranks meet.
            timeout: seconds that an operation may take.
            shared: tensors live in the memory that the ranks share.
        """
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = (
            f"phalanx {phalanx.__version__}"
            if backend == "phalanx"
            else f"torch {torch.__version__}"
        )
        self._empty: Callable[..., torch.Tensor] = torch.empty
        if shared:
            self._empty = _empty_shared()
        register()  # does nothing where torch has loaded it already
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=timeout),
        )

    def empty(self, count: int, dtype: str) -> tuple[torch.Tensor, NDArray[Any]]:
        """A tensor, and its memory; a bfloat16 is a uint16 there."""
        make = self._empty if count else torch.empty  # what has no element needs no shared memory
        tensor = make(count, dtype=getattr(torch, dtype))
        bits = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
        return tensor, bits.numpy()

    def bind(
        self,
        operation: str,
        source: torch.Tensor,
        target: torch.Tensor,
        dtype: str,  # noqa: ARG002 - a tensor knows it
    ) -> Callable[[], object]:
        """The call of `torch.distributed`."""
        if operation in ALGORITHMS:
            return partial(ALGORITHMS[operation], target)
        root = self.rank == 0
        calls: dict[str, Callable[[], Callable[[], object]]] = {
            "all_reduce": lambda: partial(dist.all_reduce, target),
            "reduce": lambda: partial(dist.reduce, target, 0),
            "broadcast": lambda: partial(dist.broadcast, target, 0),
            "gather": lambda: partial(
                dist.gather, source, self._parts(target) if root else None, 0
            ),
            "scatter": lambda: partial(
                dist.scatter, target, self._parts(source) if root else None, 0
            ),
            "all_gather": lambda: partial(dist.all_gather, self._parts(target), source),
            "all_gather_into_tensor": lambda: partial(_all_gather_single, target, source),
            "reduce_scatter": lambda: partial(_reduce_scatter_single, target, source),
            "all_to_all": lambda: partial(dist.all_to_all_single, target, source),
            "send_recv": lambda: self._ping_pong(source, target),
            "isend_irecv": lambda: self._exchange(source, target),
            "barrier": lambda: dist.barrier,
        }
        return calls[operation]()

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.chunk(self.ranks))

    def _ping_pong(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        def serve() -> None:
            dist.send(source, 1)
            dist.recv(target, 1)

        def answer() -> None:
            dist.recv(target, 0)
            dist.send(source, 0)

        return (serve, answer)[self.rank] if self.rank < 2 else _nothing

    def _exchange(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        following, previous = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        def exchange() -> None:
            works = dist.irecv(target, previous), dist.isend(source, following)
            for work in works:
                if work is not None:
                    work.wait()

        return exchange


def _nothing() -> None:
    """A rank that has no part in an operation."""


def _empty_shared() -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] | None = getattr(phalanx, "empty_shared", None)
    if function is None:
        raise UnsupportedError(f"Phalanx {phalanx.__version__} has no phalanx.empty_shared")
    return function
