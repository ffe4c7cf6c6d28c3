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
from phalanx.bench.timed_operation import ping_pong
from phalanx.parallel.algorithms import ALGORITHMS
from phalanx.torch_versions import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class TorchSystem:
    """A rank of a backend, called through `torch.distributed`."""

    def __init__(self, backend: str, store: str, timeout: float, kind: str) -> None:
        """Join the group.

        Args:
            backend: Name of the backend in `torch.distributed`.
            store: Path of the file for the rendezvous.
            timeout: Seconds that an operation may take.
            kind: "prepared" for prepared operations; "shared" for these on tensors in the memory
                that the ranks share; "" for plain calls on ordinary tensors.
        """
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = (
            f"phalanx {phalanx.__version__}"
            if backend == "phalanx"
            else f"torch {torch.__version__}"
        )
        self._empty: Callable[..., torch.Tensor] = (
            phalanx.empty_shared if kind == "shared" else torch.empty
        )
        self._is_prepared = bool(kind)
        self._bind: Callable[..., Any] = phalanx.prepare if kind else partial
        register()  # does nothing if torch has loaded the backend already
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=timeout),
        )

    def empty(self, count: int, dtype: str) -> tuple[torch.Tensor, NDArray[Any]]:
        """Return a tensor, and a numpy array of its memory, of dtype uint16 for bfloat16."""
        make = self._empty if count else torch.empty  # an empty tensor needs no shared memory
        tensor = make(count, dtype=getattr(torch, dtype))
        bits = tensor.view(torch.uint16) if dtype == "bfloat16" else tensor
        return tensor, bits.numpy()

    def bind(
        self,
        operation: str,
        source: torch.Tensor,
        target: torch.Tensor,
        dtype: str,  # noqa: ARG002 - the tensors have it
    ) -> Callable[[], object]:
        """Return the call of `torch.distributed` or of an algorithm on these buffers."""
        if operation in ALGORITHMS:
            return partial(ALGORITHMS[operation], target)
        if operation == "send_recv":
            peer = 1 - min(self.rank, 1)  # ranks above 1 do nothing
            return ping_pong(
                self.rank,
                self._bind(dist.send, source, peer),
                self._bind(dist.recv, target, peer),
            )
        if operation == "isend_irecv":
            return self._exchange(source, target)
        is_root, parts = self.rank == 0, list(target.chunk(self.ranks))
        sources = list(source.chunk(self.ranks))
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (dist.all_reduce, target),
            "reduce": (dist.reduce, target, 0),
            "broadcast": (dist.broadcast, target, 0),
            "gather": (dist.gather, source, parts if is_root else None, 0),
            "scatter": (dist.scatter, target, sources if is_root else None, 0),
            "all_gather": (dist.all_gather, parts, source),
            "all_gather_into_tensor": (all_gather_single, target, source),
            "reduce_scatter": (reduce_scatter_single, target, source),
            "all_to_all": (dist.all_to_all_single, target, source),
            "barrier": (dist.barrier,),
        }
        call: Callable[[], object] = self._bind(*calls[operation])
        return call

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _exchange(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        next_rank, previous_rank = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        if self._is_prepared:
            recv = phalanx.prepare(dist.recv, target, previous_rank)
            return phalanx.plan([recv, phalanx.prepare(dist.send, source, next_rank)])

        def exchange() -> None:
            works = dist.irecv(target, previous_rank), dist.isend(source, next_rank)
            for work in works:
                if work is not None:
                    work.wait()

        return exchange
