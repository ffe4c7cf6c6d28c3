"""The distinction between backward passes that average gradients and those that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

__all__ = ["BackwardTracker"]


class BackwardTracker:
    """A tracker of the wrapper's forward passes, which decides if a backward pass averages.

    Hooks on the graph of a forward pass's outputs identify its backward pass, whatever runs in
    between. A backward pass through no known output (of a loss that the module has stored, or
    returned in a class of its own) counts as that of the last forward pass, once. DDP treats all
    backward passes like this.
    """

    def __init__(self) -> None:
        self._expected = False
        # Set by the outputs through which the current backward pass went.
        self._current: bool | None = None
        self._hooks = {synchronize: self._make_hook(synchronize) for synchronize in (False, True)}

    def begin(self, synchronize: bool) -> None:
        """Record the start of a forward pass whose backward pass averages if `synchronize`."""
        self._expected = synchronize
        self._current = None  # left by a backward pass that an exception interrupted

    def register_hooks(self, outputs: object, synchronize: bool) -> None:
        """Register hooks on the outputs of the forward pass."""
        if torch.compiler.is_compiling():
            return
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._hooks[synchronize])

    def synchronizes(self) -> bool:
        """Return whether the current backward pass averages."""
        return self._expected if self._current is None else self._current

    def mark_averaged(self) -> None:
        """Record that a backward pass has averaged."""
        self._expected = False

    def _make_hook(self, synchronize: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._current is None:
                Variable._execution_engine.queue_callback(self._reset)
            self._current = synchronize or bool(self._current)

        return hook

    def _reset(self) -> None:
        self._current = None


def _tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors in the outputs of a module."""
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
