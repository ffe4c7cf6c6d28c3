"""Gradients of linear layers, computed straight into the memory in which they are averaged.

PyTorch computes the gradient of a weight into memory of its own, from where it would have to be
copied. For `torch.nn.functional.linear` the product is put off until its place is free, and made
there: nothing is allocated, nothing copied. All else that a weight is used for keeps its own way,
and is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Product", "StraightLinear", "accumulator", "by_rows"]


class Product(NamedTuple):
    """The gradient of a weight, as the product that it is: `output.T @ input`, both of 2 dims."""

    output: Tensor
    input: Tensor

    def make(self) -> Tensor:
        """The gradient itself."""
        return self.output.t() @ self.input

    def write(self, room: Tensor) -> None:
        """Write the gradient to flat memory."""
        torch.mm(self.output.t(), self.input, out=room.view(self.output.shape[1], -1))


def by_rows(parameter: Tensor) -> bool:
    """Whether it may be the weight of a linear layer, whose rows lie one after another."""
    return parameter.dim() == 2 and parameter.numel() > 0 and parameter.is_contiguous()


class StraightLinear(TorchFunctionMode):
    """While it is active, products with the weights that it knows are put off.

    Args:
        weights: Those whose gradient lies in memory row by row.
        put_off: Takes the number of a weight and a product that is part of its gradient.
    """

    def __init__(
        self, weights: Sequence[tuple[int, nn.Parameter]], put_off: Callable[[int, Product], None]
    ) -> None:
        super().__init__()
        # The node of a leaf lives as long as something holds it, and with it what is hooked on it.
        self._known = {id(weight): (number, accumulator(weight)) for number, weight in weights}
        self._put_off = put_off

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Stand in for `linear` of a weight that is known, where nothing speaks against it."""
        simple = function is nn.functional.linear and not torch.compiler.is_compiling()
        if simple and not keywords and 2 <= len(arguments) <= 3:
            input, weight, *bias = arguments
            known = self._known.get(id(weight))
            if known is not None and _simple(input, weight):
                call: Any = _Linear.apply
                return call(input, weight, bias[0] if bias else None, *known, self._put_off)
        return function(*arguments, **(keywords or {}))


def _simple(input: Any, weight: nn.Parameter) -> bool:
    """Whether nothing here changes what the product is, or wants to see the gradient."""
    # Checkpointing, which runs the forward pass again, saves tensors by hooks.
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
    """`linear`, the gradient of whose weight is put off if somebody will come for it."""

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
    """Whether somebody wants to see its gradient."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def accumulator(weight: nn.Parameter) -> Any:
    """The node of the graph that adds to the `grad` of a leaf."""
    with torch.enable_grad():
        return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _accumulates(node: Any) -> bool:
    """Whether this backward pass adds to `grad`; `torch.autograd.grad` doesn't."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # its way to say that this is `torch.autograd.grad`
        return False
