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

__all__ = ["Product", "StraightLinear", "accumulator", "by_rows"]


class Product(NamedTuple):
    """The gradient of a weight as a deferred product `output.T @ input` of 2-D tensors."""

    output: Tensor
    input: Tensor

    def make(self) -> Tensor:
        """Compute the gradient."""
        return self.output.t() @ self.input

    def write(self, room: Tensor) -> None:
        """Compute the gradient in flat memory."""
        torch.mm(self.output.t(), self.input, out=room.view(self.output.shape[1], -1))


def by_rows(parameter: Tensor) -> bool:
    """Return whether a parameter may be the weight of a linear layer, in row-major order."""
    return parameter.dim() == 2 and parameter.numel() > 0 and parameter.is_contiguous()


class StraightLinear(TorchFunctionMode):
    """A mode in which the gradients of known weights of linear layers are deferred.

    Args:
        weights: The weights, each with its number, whose gradients are in row-major order.
        put_off: A function that gets the number of a weight and a product that is part of its
            gradient.
    """

    def __init__(
        self, weights: Sequence[tuple[int, nn.Parameter]], put_off: Callable[[int, Product], None]
    ) -> None:
        super().__init__()
        # Hold the nodes: a leaf's accumulation node, with its hooks, lives only while referenced.
        self._known = {id(weight): (number, accumulator(weight)) for number, weight in weights}
        self._put_off = put_off

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Replace `linear` for a known weight if deferring its gradient is safe."""
        simple = function is nn.functional.linear and not torch.compiler.is_compiling()
        if simple and not keywords and 2 <= len(arguments) <= 3:
            input, weight, *bias = arguments
            known = self._known.get(id(weight))
            if known is not None and _simple(input, weight):
                call: Any = _Linear.apply
                return call(input, weight, bias[0] if bias else None, *known, self._put_off)
        return function(*arguments, **(keywords or {}))


def _simple(input: Any, weight: nn.Parameter) -> bool:
    """Return whether nothing changes the product or observes the gradient."""
    # Activation checkpointing, which runs the forward pass again, saves tensors by hooks.
    saving: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        type(input) is Tensor
        and weight.requires_grad
        and input.dtype == weight.dtype
        and input.dim() >= 2
        and input.numel() > 0
        and not weight.is_complex()
        and not _hooked(weight)
        and saving is None
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
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
        accumulator: Any,
        put_off: Callable[[int, Product], None],
    ) -> Tensor:
        context.save_for_backward(input, weight)
        context.has_bias = bias is not None
        context.number, context.accumulator, context.put_off = number, accumulator, put_off
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(context: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = context.saved_tensors
        wants_input, wants_weight, wants_bias, *_ = context.needs_input_grad
        by_input = output @ weight if wants_input else None
        by_weight = by_bias = None
        if wants_bias or wants_weight:
            rows = output.reshape(-1, output.shape[-1])
        if wants_bias and context.has_bias:
            by_bias = rows.sum(0)
        if wants_weight:
            product = Product(rows, input.reshape(-1, input.shape[-1]))
            plain = torch.is_grad_enabled() or _hooked(weight)
            if not plain and _accumulates(context.accumulator):
                context.put_off(context.number, product)
            else:
                by_weight = product.make()
        return by_input, by_weight, by_bias, None, None, None


def _hooked(weight: Any) -> bool:
    """Return whether a weight has hooks, which observe its gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def accumulator(weight: nn.Parameter) -> Any:
    """Return the graph node that accumulates into the `grad` of a leaf."""
    with torch.enable_grad():
        return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _accumulates(node: Any) -> bool:
    """Return whether this pass accumulates into `grad`, which `torch.autograd.grad` does not."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised within `torch.autograd.grad`
        return False
