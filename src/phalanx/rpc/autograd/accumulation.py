"""Accumulation of gradients, by the rules of PyTorch's `AccumulateGrad`.

The gradient that a backward pass computes for a parameter may share memory: `p + q` has one
gradient for both, the gradient of `p.sum()` is an expanded scalar, a hook may have kept it, and the
indices of a sparse gradient are those that the user looked up. Optimizers change gradients in
place, so each gradient must own its memory. A gradient is used without a copy only if nothing else
refers to it and it has the strides of its parameter. See
`torch/csrc/autograd/functions/accumulate_grad.h`; unlike PyTorch, this module also copies a view of
another gradient's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.torch_versions import tensor_use_count

__all__ = ["accumulate", "ensure_owned"]

# References to a tensor that only a list holds: the list's and the argument's.
_REFERENCES = 2
# The tensor itself (if sparse: the component and the tensor that wraps it), and the argument.
_HOLDERS_OF_DENSE = 2
_HOLDERS_OF_SPARSE = 3


def ensure_owned(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Pair parameters with gradients that own their memory and have the parameters' strides.

    Args:
        parameters: The parameters.
        gradients: For each parameter a gradient or None. The caller must hold no other reference
            to these tensors.

    Returns:
        The parameters that have a gradient, with their gradients.
    """
    return [
        (parameter, _ensure_owned(gradients, at, parameter))
        for at, parameter in enumerate(parameters)
        if gradients[at] is not None
    ]


def accumulate(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Add a gradient to a sum, in place if the sum is dense, and return the new sum.

    Args:
        total: The sum so far, or None if this is the first gradient.
        gradient: A gradient that owns its memory.
    """
    if total is None:
        return gradient
    with torch.no_grad():
        if total.layout is torch.strided:
            return total.add_(gradient)
        if total.is_sparse and gradient.is_sparse:
            total_sum = total + gradient
            # Without this, a gradient that no optimizer takes would grow with every pass.
            return total_sum.coalesce() if total_sum._nnz() > total_sum.shape[0] else total_sum
        return gradient + total


def _ensure_owned(gradients: Sequence[Any], at: int, parameter: Tensor) -> Tensor:
    is_alone = _is_alone(gradients, at)
    gradient: Tensor = gradients[at]
    if gradient.layout is torch.sparse_coo:
        return _ensure_owned_sparse(gradient, is_alone)
    if gradient.layout is not torch.strided or type(gradient) is not Tensor:
        return gradient.clone()
    if (
        is_alone
        and _is_laid_out_as(gradient, parameter)
        and _holders(gradient) == _HOLDERS_OF_DENSE
    ):
        return gradient
    # With the parameter's strides if they leave no gaps, otherwise contiguous.
    copy = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device)
    return copy.detach().copy_(gradient)


def _ensure_owned_sparse(gradient: Tensor, is_alone: bool) -> Tensor:
    indices, values = (
        part
        if is_alone and part.is_contiguous() and _holders(part) == _HOLDERS_OF_SPARSE
        else part.clone(memory_format=torch.contiguous_format)
        for part in (gradient._indices(), gradient._values())
    )
    return torch.sparse_coo_tensor(
        indices,
        values,
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    )


def _is_laid_out_as(gradient: Tensor, parameter: Tensor) -> bool:
    return gradient.stride() == parameter.stride() and (
        0 not in gradient.stride() or gradient.is_contiguous()
    )


def _is_alone(tensors: Sequence[Any], at: int) -> bool:
    """Return whether a list holds the only reference to a tensor, counting references of C++."""
    # If PyTorch cannot count the references of C++, every gradient is copied.
    return (
        tensor_use_count is not None
        and sys.getrefcount(tensors[at]) == _REFERENCES
        and tensor_use_count(tensors[at]) == 1
    )


def _holders(tensor: Tensor) -> int:
    """Return the use count of a tensor's storage."""
    holders: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return holders
