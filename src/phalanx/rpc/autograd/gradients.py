"""Gradients of served parameters, kept apart by the backward pass for which they were made."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Gradients", "Mixed", "Root"]


class Root(NamedTuple):
    """On whose behalf gradients are made: of a worker, in a context of its (0: in none).

    It is the worker that called `backward()`, and that is going to step.
    """

    worker: int
    context: int = 0


class _Sum:
    """A parameter's gradient: of passes that are over, and the parts that the present one made.

    Parts come in any order, as calls do. They are added in the order in which one process would,
    the last node of the forward pass first, so that the sum is the same at every run.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self._task = -1
        self._parts: list[tuple[tuple[int, ...], Tensor]] = []
        self._whole: Tensor | None = None

    def add(self, task: int, path: tuple[int, ...], gradient: Tensor) -> None:
        """A part, by the backward pass and the nodes on the way to it."""
        if task != self._task:
            self.whole()
            self._task = task
        self._parts.append((path, gradient))

    def whole(self) -> Tensor | None:
        """The sum of all that has come."""
        for _, part in sorted(self._parts, key=lambda part: part[0], reverse=True):
            self._whole = part if self._whole is None else _sum(self._whole, part)
        self._parts.clear()
        return self._whole


class Gradients:
    """Of this process's parameters, by root; each is there until its root's optimizer takes it."""

    def __init__(self) -> None:
        self._roots: dict[Root, dict[int, _Sum]] = {}
        self._lock = threading.Lock()

    def add(
        self, root: Root, task: int, path: tuple[int, ...], made: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Add what a node's part of a backward pass made, as pairs of parameter and gradient.

        Args:
            root: For whom.
            task: The backward pass, by a number of the root's worker.
            path: The nodes on the way, from that worker to here, by their place in its forward
                pass.
            made: Parameters with their gradients.
        """
        with self._lock:
            sums = self._roots.setdefault(root, {})
            for parameter, gradient in made:
                if id(parameter) not in sums:
                    sums[id(parameter)] = _Sum(parameter)
                sums[id(parameter)].add(task, path, gradient)

    def take(self, root: Root, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """The gradients of these parameters, which are kept no longer; None where none was made."""
        with self._lock:
            sums = self._roots.get(root, {})
            found = [sums.pop(id(parameter), None) for parameter in parameters]
            if not sums:
                self._roots.pop(root, None)
        return [None if one is None else one.whole() for one in found]

    def seen(self, root: Root) -> dict[Tensor, Tensor]:
        """The gradients of a root, which stay."""
        with self._lock:
            wholes = [(one.parameter, one.whole()) for one in self._roots.get(root, {}).values()]
        return {parameter: whole for parameter, whole in wholes if whole is not None}

    def drop(self, root: Root) -> None:
        """A root steps no more."""
        with self._lock:
            self._roots.pop(root, None)

    def drop_contexts(self, worker: int, before: int) -> None:
        """A worker has left its contexts of numbers below this."""
        with self._lock:
            for root in [r for r in self._roots if r.worker == worker and 0 < r.context < before]:
                del self._roots[root]

    def forget(self, worker: int) -> None:
        """A worker is dead, or leaves."""
        with self._lock:
            for root in [r for r in self._roots if r.worker == worker]:
                del self._roots[root]


class Mixed:
    """Parameters whose gradients are not kept apart: those of all workers add up in `grad`."""

    def __init__(self) -> None:
        self._parameters = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._parameters

    def mark(self, parameters: Iterable[Tensor], mixed: bool) -> None:
        """From now on these are, or are not, such parameters."""
        for parameter in parameters:
            if mixed:
                self._parameters[parameter] = True
            else:
                self._parameters.pop(parameter, None)  # type: ignore[no-untyped-call]

    def add(self, made: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Add gradients to `grad` of these; returns the other pairs of parameter and gradient."""
        if not self._parameters:
            return made
        with self._lock:
            for parameter, gradient in made:
                if parameter in self:
                    before = parameter.grad
                    parameter.grad = gradient if before is None else _sum(before, gradient)
        return [(parameter, gradient) for parameter, gradient in made if parameter not in self]

    def take(self, parameter: Tensor) -> Tensor | None:
        """The sum of all that has come since it was last taken, if it is such a parameter."""
        if parameter not in self:
            return None
        with self._lock:
            gradient, parameter.grad = parameter.grad, None
        return gradient


def _sum(one: Tensor, other: Tensor) -> Tensor:
    if one.is_sparse and other.is_sparse:
        both = one + other
        # Otherwise gradients that nobody takes would grow with every pass.
        return both.coalesce() if both._nnz() > both.shape[0] else both
    return other + one if one.is_sparse else one + other
