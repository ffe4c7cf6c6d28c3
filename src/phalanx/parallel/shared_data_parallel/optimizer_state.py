"""The state of a sharded optimizer: assembly from the pieces of all ranks, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.layout import Piece
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.parallel.shared_data_parallel.views import shaped_like

if TYPE_CHECKING:
    from phalanx.parallel.shared_data_parallel.module import SharedDataParallel

__all__ = ["NAMING", "check", "collect"]

#: The keys of a parameter group that are not options.
NAMING = ("params", "param_names")

_ALIGNED = 64


class _Summary(NamedTuple):
    """A rank's description of the state of a parameter of which it has a piece."""

    tensors: dict[str, torch.dtype]
    """The dtypes of the tensors that have an element for each element of the parameter."""
    scalars: dict[str, Any]
    """All other values."""


def collect(
    pieces: Sequence[tuple[Piece, dict[str, Any]]],
    parameters: Sequence[nn.Parameter],
    model: SharedDataParallel,
) -> dict[int, dict[str, Any]]:
    """Return the whole state of each parameter, by its number; all ranks of the host must call it.

    Args:
        pieces: This rank's pieces, each with its state.
        parameters: All parameters that are trained.
        model: The model of the parameters.
    """
    summaries = _exchange({piece.parameter: _summary(state) for piece, state in pieces}, model)
    spots: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
    size = 0
    for number, summary in sorted(summaries.items()):
        for key, dtype in sorted(summary.tensors.items()):
            spots[number, key] = size, dtype
            size += -(-parameters[number].numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
    memory = HostMemory(size, model._places)
    for piece, state in pieces:
        for key, value in state.items():
            if (piece.parameter, key) in spots:
                _write(memory, value, piece, spots[piece.parameter, key], model)
    model._places.meet()
    whole = {number: dict(summary.scalars) for number, summary in summaries.items()}
    for (number, key), (start, dtype) in spots.items():
        owner = parameters[number]
        part = memory.own(start, start + owner.numel() * dtype.itemsize, dtype)
        whole[number][key] = shaped_like(part, owner)
    return whole


def _summary(state: dict[str, Any]) -> _Summary:
    tensors: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            tensors[key] = value.dtype
        else:
            scalars[key] = value.clone() if isinstance(value, Tensor) else value
    return _Summary(tensors, scalars)


def _exchange(own: dict[int, _Summary], model: SharedDataParallel) -> dict[int, _Summary]:
    """Return a summary of each parameter with a state, from the first rank with a piece of it."""
    places = model._places
    all_of: list[dict[int, _Summary]] = [own]
    if places.host is not None:
        all_of = [{}] * places.local_size
        dist.all_gather_object(all_of, own, group=places.host)
    merged: dict[int, _Summary] = {}
    for summaries in all_of:
        for number, summary in summaries.items():
            if summary.tensors or summary.scalars:
                merged.setdefault(number, summary)
    return merged


def _write(
    memory: HostMemory,
    value: Tensor,
    piece: Piece,
    spot: tuple[int, torch.dtype],
    model: SharedDataParallel,
) -> None:
    start, dtype = spot
    layout = model._layout
    skipped = piece.start - layout.spots[piece.parameter].start
    first = start + skipped // layout.dtypes[piece.parameter].itemsize * dtype.itemsize
    memory.common(first, first + value.numel() * dtype.itemsize, dtype).copy_(value)


def check(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Check that a state fits these groups of parameters.

    Raises:
        UsageError: The number of parameters or the shape of a tensor differs.
    """
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group["params"]) for group in groups]
    if saved != expected:
        raise UsageError(
            f"load_state_dict: a state for groups of {saved} parameters given, expected {expected}:"
            " is it of another model?"
        )
    owners = [owner for group in groups for owner in group["params"]]
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            shape = owners[int(index)].shape
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise UsageError(
                    f"load_state_dict: {key} of parameter {index} is {list(value.shape)}, expected "
                    f"{list(shape)}: is it of another model?"
                )
