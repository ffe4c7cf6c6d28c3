"""The state of a sharded optimizer: assembly from the fragments of all ranks, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.shared_data_parallel.layout import ParameterFragment
from phalanx.parallel.shared_data_parallel.memory import HostMemory
from phalanx.parallel.shared_data_parallel.views import shaped_like

if TYPE_CHECKING:
    from phalanx.parallel.shared_data_parallel.module import SharedDataParallel

__all__ = ["NON_OPTION_KEYS", "check", "collect"]

#: The keys of a parameter group that are not options.
NON_OPTION_KEYS = ("params", "param_names")

_ALIGNMENT = 64


class _Summary(NamedTuple):
    """A rank's description of the state of a parameter of which it has a fragment."""

    tensors: dict[str, torch.dtype]
    """The dtypes of the tensors that have an element for each element of the parameter."""
    scalars: dict[str, Any]
    """All other values."""


def collect(
    fragments: Sequence[tuple[ParameterFragment, dict[str, Any]]],
    parameters: Sequence[nn.Parameter],
    model: SharedDataParallel,
) -> dict[int, dict[str, Any]]:
    """Return the whole state of each parameter, by its number; all ranks of the host must call it.

    Args:
        fragments: This rank's fragments, each with its state.
        parameters: All parameters that are trained.
        model: The model of the parameters.
    """
    summaries = _exchange_summaries(
        {fragment.parameter: _summary(state) for fragment, state in fragments}, model
    )
    offsets: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
    size = 0
    for number, summary in sorted(summaries.items()):
        for key, dtype in sorted(summary.tensors.items()):
            offsets[number, key] = size, dtype
            size += -(-parameters[number].numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = HostMemory(size, model._topology)
    for fragment, state in fragments:
        for key, value in state.items():
            if (fragment.parameter, key) in offsets:
                _write_fragment(memory, value, fragment, offsets[fragment.parameter, key], model)
    model._topology.barrier()
    states = {number: dict(summary.scalars) for number, summary in summaries.items()}
    for (number, key), (start, dtype) in offsets.items():
        parameter = parameters[number]
        part = memory.replica(start, start + parameter.numel() * dtype.itemsize, dtype)
        states[number][key] = shaped_like(part, parameter)
    return states


def _summary(state: dict[str, Any]) -> _Summary:
    tensors: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            tensors[key] = value.dtype
        else:
            scalars[key] = value.clone() if isinstance(value, Tensor) else value
    return _Summary(tensors, scalars)


def _exchange_summaries(own: dict[int, _Summary], model: SharedDataParallel) -> dict[int, _Summary]:
    """Return a summary of each parameter with a state, from the first rank that has a fragment."""
    topology = model._topology
    by_rank: list[dict[int, _Summary]] = [own]
    if topology.host_group is not None:
        by_rank = [{}] * topology.local_size
        dist.all_gather_object(by_rank, own, group=topology.host_group)
    merged: dict[int, _Summary] = {}
    for summaries in by_rank:
        for number, summary in summaries.items():
            if summary.tensors or summary.scalars:
                merged.setdefault(number, summary)
    return merged


def _write_fragment(
    memory: HostMemory,
    value: Tensor,
    fragment: ParameterFragment,
    location: tuple[int, torch.dtype],
    model: SharedDataParallel,
) -> None:
    start, dtype = location
    layout = model._layout
    offset_in_parameter = fragment.start - layout.slots[fragment.parameter].start
    first = (
        start + offset_in_parameter // layout.dtypes[fragment.parameter].itemsize * dtype.itemsize
    )
    memory.shared(first, first + value.numel() * dtype.itemsize, dtype).copy_(value)


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
            " is it the state of a different model?"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            shape = parameters[int(index)].shape
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise UsageError(
                    f"load_state_dict: {key} of parameter {index} is {list(value.shape)}, expected "
                    f"{list(shape)}: is it the state of a different model?"
                )
