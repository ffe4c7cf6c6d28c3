"""Gradients of parameters, kept separately for each root of backward passes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.rpc.autograd.accumulation import accumulate

__all__ = ["AccumulatedParameters", "Gradients", "Root"]


class Root(NamedTuple):
    """The worker that called `backward()` and will step, and its context (0: none)."""

    worker: int
    context: int = 0


class _Sum:
    """A parameter's gradient: the sum of finished passes, and the parts of the current one.

    Parts arrive in any order. They are added in the order in which a single process would add
    them, the last node of the forward pass first, so that the sum is deterministic.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self._task = -1
        self._parts: list[tuple[tuple[int, ...], Tensor]] = []
        self._whole: Tensor | None = None

    def add(self, task: int, path: tuple[int, ...], gradient: Tensor) -> None:
        """Add a part, identified by its backward pass and the nodes on the path to it."""
        if task != self._task:
            self.whole()
            self._task = task
        self._parts.append((path, gradient))

    def whole(self) -> Tensor | None:
        """Return the sum of all parts that have arrived, or None if there are none."""
        for _, part in sorted(self._parts, key=lambda part: part[0], reverse=True):
            self._whole = accumulate(self._whole, part)
        self._parts.clear()
        return self._whole


class Gradients:
    """The gradients of this process's parameters by root, each kept until an optimizer takes it."""

    def __init__(self) -> None:
        self._roots: dict[Root, dict[int, _Sum]] = {}
        self._lock = threading.Lock()

    def add(
        self, root: Root, task: int, path: tuple[int, ...], pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Add the gradients that one part of a backward pass computed.

        Args:
            root: The root of the pass.
            task: The backward pass, as a number unique at the root's worker.
            path: The nodes on the path from that worker to here, each by its index among the nodes
                of its process.
            pairs: Pairs of a parameter and a gradient that owns its memory.
        """
        with self._lock:
            sums = self._roots.setdefault(root, {})
            for parameter, gradient in pairs:
                if id(parameter) not in sums:
                    sums[id(parameter)] = _Sum(parameter)
                sums[id(parameter)].add(task, path, gradient)

    def take(self, root: Root, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """Remove and return the gradients of these parameters; None for those without one."""
        with self._lock:
            sums = self._roots.get(root, {})
            found = [sums.pop(id(parameter), None) for parameter in parameters]
            if not sums:
                self._roots.pop(root, None)
        return [None if one is None else one.whole() for one in found]

    def peek(self, root: Root) -> dict[Tensor, Tensor]:
        """Return the gradients of a root without removing them."""
        with self._lock:
            wholes = [(one.parameter, one.whole()) for one in self._roots.get(root, {}).values()]
        return {parameter: whole for parameter, whole in wholes if whole is not None}

    def drop(self, root: Root) -> None:
        """Drop the gradients of a root that will not step any more."""
        with self._lock:
            self._roots.pop(root, None)

    def drop_contexts(self, worker: int, before: int) -> None:
        """Drop the gradients of a worker's contexts with numbers below `before`."""
        with self._lock:
            for root in [r for r in self._roots if r.worker == worker and 0 < r.context < before]:
                del self._roots[root]

    def forget(self, worker: int) -> None:
        """Drop the gradients of a worker that has died or is leaving."""
        with self._lock:
            for root in [r for r in self._roots if r.worker == worker]:
                del self._roots[root]


class AccumulatedParameters:
    """The parameters for which the gradients of all workers are accumulated in `grad`."""

    def __init__(self) -> None:
        self._parameters = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._parameters

    def mark(self, parameters: Iterable[Tensor], is_accumulated: bool) -> None:
        """Add these parameters, or remove them if `is_accumulated` is false."""
        for parameter in parameters:
            if is_accumulated:
                self._parameters[parameter] = True
            else:
                self._parameters.pop(parameter, None)  # type: ignore[no-untyped-call]

    def add(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Accumulate the gradients of these parameters in `grad`; return the remaining pairs."""
        if not self._parameters:
            return pairs
        with self._lock:
            for parameter, gradient in pairs:
                if parameter in self:
                    parameter.grad = accumulate(parameter.grad, gradient)
        return [(parameter, gradient) for parameter, gradient in pairs if parameter not in self]

    def take(self, parameter: Tensor) -> Tensor | None:
        """Take the gradient accumulated in `grad`; None if the parameter is not in this set."""
        if parameter not in self:
            return None
        with self._lock:
            gradient, parameter.grad = parameter.grad, None
        return gradient
