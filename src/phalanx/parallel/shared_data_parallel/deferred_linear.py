"""Gradients of linear layers, computed directly in the memory in which they are averaged.

PyTorch computes the gradient of a weight in newly allocated memory, from which it would have to be
copied. For `torch.nn.functional.linear` this module defers the product until its destination is
free and computes it there, without allocation or copy. Gradients from other uses of the weight are
computed as usual and added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.torch_versions import has_saved_tensor_hooks, is_transformed, will_execute


class Product(NamedTuple):
    """The gradient of a weight as a deferred product `output.T @ input` of 2-D tensors."""

    output: Tensor
    input: Tensor

    def compute(self) -> Tensor:
        """Compute the gradient."""
        return self.output.t() @ self.input

    def write(self, buffer: Tensor) -> None:
        """Compute the gradient in flat memory."""
        torch.mm(self.output.t(), self.input, out=buffer.view(self.output.shape[1], -1))


def is_row_major_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter may be the weight of a linear layer, in row-major order."""
    return parameter.dim() == 2 and parameter.numel() > 0 and parameter.is_contiguous()


class DeferredLinearGrad(TorchFunctionMode):
    """A mode in which the gradients of known weights of linear layers are deferred.

    Args:
        weights: The weights, each with its number, whose gradients are in row-major order.
        defer: A function that gets the number of a weight and a product that is part of its
            gradient.
    """

    def __init__(
        self, weights: Sequence[tuple[int, nn.Parameter]], defer: Callable[[int, Product], None]
    ) -> None:
        super().__init__()
        # Hold the nodes: a leaf's accumulation node, with its hooks, lives only while referenced.
        self._weights = {
            id(weight): (number, accumulation_node(weight)) for number, weight in weights
        }
        self._defer = defer

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Replace `linear` for a known weight if deferring its gradient is safe."""
        is_linear = function is nn.functional.linear and not torch.compiler.is_compiling()
        if is_linear and not keywords and 2 <= len(arguments) <= 3:
            input, weight, *bias = arguments
            entry = self._weights.get(id(weight))
            if entry is not None and _can_defer(input, weight):
                call: Any = _Linear.apply
                return call(input, weight, bias[0] if bias else None, *entry, self._defer)
        return function(*arguments, **(keywords or {}))


def _can_defer(input: Any, weight: nn.Parameter) -> bool:
    """Return whether nothing changes the product or observes the gradient."""
    return (
        type(input) is Tensor
        and weight.requires_grad
        and input.dtype == weight.dtype
        and input.dim() >= 2
        and input.numel() > 0
        and not weight.is_complex()
        and not _has_hooks(weight)
        # Activation checkpointing, which runs the forward pass again, saves tensors by hooks.
        and not has_saved_tensor_hooks()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed()
    )


class _Linear(torch.autograd.Function):
    """`linear` with a deferred weight gradient if this backward pass accumulates into `grad`."""

    @staticmethod
    def forward(
        context: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: int,
        accumulation_node: Any,
        defer: Callable[[int, Product], None],
    ) -> Tensor:
        context.save_for_backward(input, weight)
        context.has_bias = bias is not None
        context.number, context.accumulation_node, context.defer = number, accumulation_node, defer
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(context: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = context.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = context.needs_input_grad
        grad_input = output @ weight if needs_input else None
        grad_weight = grad_bias = None
        if needs_bias or needs_weight:
            rows = output.reshape(-1, output.shape[-1])
        if needs_bias and context.has_bias:
            grad_bias = rows.sum(0)
        if needs_weight:
            product = Product(rows, input.reshape(-1, input.shape[-1]))
            must_compute = torch.is_grad_enabled() or _has_hooks(weight)
            if not must_compute and _accumulates(context.accumulation_node):
                context.defer(context.number, product)
            else:
                grad_weight = product.compute()
        return grad_input, grad_weight, grad_bias, None, None, None


def _has_hooks(weight: Any) -> bool:
    """Return whether a weight has hooks, which observe its gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def accumulation_node(weight: nn.Parameter) -> Any:
    """Return the graph node that accumulates into the `grad` of a leaf."""
    with torch.enable_grad():
        return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _accumulates(node: Any) -> bool:
    """Return whether this pass accumulates into `grad`, which `torch.autograd.grad` does not."""
    try:
        return will_execute(node)
    except RuntimeError:  # raised within `torch.autograd.grad`
        return False
