"""Which backward passes average gradients: those of what went forward through the wrapper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

__all__ = ["Passes"]


class Passes:
    """Tells a backward pass of the wrapper's outputs from others.

    What a forward pass returned says so, by hooks on its graph, whatever comes in between. A
    backward pass that goes through no output (of a loss that the module has put aside, or in a
    class of its own) counts as that of the last forward pass, once. (So does DDP with all.)
    """

    def __init__(self) -> None:
        self._expected = False
        self._told: bool | None = None  # by the outputs that the present backward pass went through
        self._tellers = {answer: self._teller(answer) for answer in (False, True)}

    def begin(self, synchronize: bool) -> None:
        """A forward pass begins, the backward pass of which is to average, or not to."""
        self._expected = synchronize
        self._told = None  # by one that an exception cut short

    def follow(self, outputs: object, synchronize: bool) -> None:
        """Take note of what it returned."""
        if torch.compiler.is_compiling():
            return
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._tellers[synchronize])

    def synchronizes(self) -> bool:
        """Whether the present backward pass averages."""
        return self._expected if self._told is None else self._told

    def averaged(self) -> None:
        """A backward pass has averaged."""
        self._expected = False

    def _teller(self, answer: bool) -> Callable[..., None]:
        def tell(*_: object) -> None:
            if self._told is None:
                Variable._execution_engine.queue_callback(self._ended)
            self._told = answer or bool(self._told)

        return tell

    def _ended(self) -> None:
        self._told = None


def _tensors(outputs: object) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    parts: Any = ()
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        parts = outputs.values()
    elif isinstance(outputs, (tuple, list)):
        parts = outputs
    elif dataclasses.is_dataclass(outputs):
        parts = (getattr(outputs, field.name) for field in dataclasses.fields(outputs))
    for part in parts:
        yield from _tensors(part)
