"""The norm of all gradients, and scaling by it, in which each rank handles its slices."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.gradients import Gradients
from phalanx.parallel.shared_data_parallel.layout import Layout
from phalanx.parallel.shared_data_parallel.slice_owners import Places

__all__ = ["clip"]


@torch.no_grad()
def clip(
    layout: Layout, gradients: Gradients, places: Places, max_norm: float, norm_type: float
) -> Tensor:
    """Clip the gradients by their norm, as documented in `SharedDataParallel.clip_grad_norm_`."""
    if not max_norm > 0 or not norm_type > 0:
        raise UsageError(
            f"clip_grad_norm_: max_norm {max_norm} and norm_type {norm_type} given, expected "
            "numbers above 0"
        )
    memory = gradients.memory
    gradients.adopt()
    places.meet()  # no rank reads what others are about to publish
    if places.owns:
        for cut in layout.slices(places.local_rank):
            memory.publish(cut.start, cut.end)  # gradients that this rank has changed itself
    mine = [
        memory.common(piece.start, piece.end, layout.dtypes[piece.parameter])
        for piece in (layout.pieces(places.local_rank) if places.owns else [])
        if gradients.has(piece.parameter)
    ]
    norm = _norm(mine, places, norm_type)
    # As in torch.nn.utils.clip_grad_norm_: a norm of NaN makes all gradients NaN.
    scale = min(max_norm / (float(norm) + 1e-6), 1.0) if not norm.isnan() else math.nan
    if scale != 1.0:
        for part in mine:
            part.mul_(scale)
    places.meet()
    memory.drop()
    return norm


def _norm(mine: list[Tensor], places: Places, norm_type: float) -> Tensor:
    norms = [torch.linalg.vector_norm(part, norm_type, dtype=_wide(part)) for part in mine]
    every = torch.stack([*norms, torch.zeros((), dtype=torch.float64)])
    largest = math.isinf(norm_type)
    total = every.max() if largest else every.pow(norm_type).sum()
    if places.host is not None:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op=op, group=places.host)
    return total if largest else total.pow(1.0 / norm_type)


def _wide(part: Tensor) -> torch.dtype:
    return torch.complex128 if part.is_complex() else torch.float64
