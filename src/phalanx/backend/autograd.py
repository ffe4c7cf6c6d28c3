"""Warnings of backward passes through operations, as from the operators of PyTorch's own groups.

An operator without a derivative of its own gets one from PyTorch: a backward pass through it warns
that gradients end there. Groups in Python are called without the dispatcher. So operators without
an effect stand in for them here, with the same outputs and inputs, if autograd follows a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.backend.instrumentation import EVENT_NAMES, OperatorCall

# The methods whose operators have a list of tensors for outputs and one for inputs. A backward pass
# through others is not seen by PyTorch either.
_METHODS = (
    "all_gather_single",
    "allreduce",
    "alltoall",
    "broadcast",
    "reduce_scatter_single",
)
_LIBRARY = torch.library.Library("phalanx", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(method: str) -> Any:
    name = EVENT_NAMES[method].removeprefix("c10d::")
    _LIBRARY.define(f"{name}(Tensor[] outputs, Tensor[] inputs) -> Tensor[]")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, lambda outputs, _: outputs, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.phalanx, name).default


_OPERATORS = {method: _define(method) for method in _METHODS}


def is_followed(operator: OperatorCall) -> bool:
    """Return whether autograd follows a tensor of an operation in this thread."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in _tensors(operator[2:]))


def warn_of_backward(operator: OperatorCall) -> None:
    """Have a backward pass through an operation warn, as through PyTorch's own."""
    if (stand_in := _OPERATORS.get(operator[1])) is not None:
        stand_in(_tensors(operator[2:3]), _tensors(operator[3:]))


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, which may be in lists, and lists of lists."""
    found = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list):
            found += _tensors(each)
    return found
