"""The norm of all gradients, and scaling by it, in which each rank handles its slices."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.gradients import Gradients
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.slice_owners import RankTopology

__all__ = ["clip"]


@torch.no_grad()
def clip(
    layout: Layout, gradients: Gradients, topology: RankTopology, max_norm: float, norm_type: float
) -> Tensor:
    """Clip the gradients by their norm, as documented in `SharedDataParallel.clip_grad_norm_`."""
    if not max_norm > 0 or not norm_type > 0:
        raise UsageError(
            f"clip_grad_norm_: max_norm {max_norm} and norm_type {norm_type} given, expected "
            "numbers above 0"
        )
    memory = gradients.memory
    gradients.copy_assigned()
    topology.barrier()  # no rank reads what others are about to publish
    if topology.is_owner:
        for bucket in layout.slices(topology.local_rank):
            memory.publish(bucket.start, bucket.end)  # gradients that this rank has changed itself
    own_slices = [
        memory.shared(fragment.start, fragment.end, layout.dtypes[fragment.parameter])
        for fragment in (layout.fragments(topology.local_rank) if topology.is_owner else [])
        if gradients.has(fragment.parameter)
    ]
    norm = _norm(own_slices, topology, norm_type)
    # As in torch.nn.utils.clip_grad_norm_: a norm of NaN makes all gradients NaN.
    scale = min(max_norm / (float(norm) + 1e-6), 1.0) if not norm.isnan() else math.nan
    if scale != 1.0:
        for part in own_slices:
            part.mul_(scale)
    topology.barrier()
    memory.discard()
    return norm


def _norm(own_slices: list[Tensor], topology: RankTopology, norm_type: float) -> Tensor:
    norms = [
        torch.linalg.vector_norm(part, norm_type, dtype=_accumulation_dtype(part))
        for part in own_slices
    ]
    stacked = torch.stack([*norms, torch.zeros((), dtype=torch.float64)])
    is_max_norm = math.isinf(norm_type)
    total = stacked.max() if is_max_norm else stacked.pow(norm_type).sum()
    if topology.host_group is not None:
        op = dist.ReduceOp.MAX if is_max_norm else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=topology.host_group)
    return total if is_max_norm else total.pow(1.0 / norm_type)


def _accumulation_dtype(part: Tensor) -> torch.dtype:
    return torch.complex128 if part.is_complex() else torch.float64
