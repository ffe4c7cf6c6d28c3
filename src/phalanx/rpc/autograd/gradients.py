"""Gradients of parameters, kept separately for each root of backward passes.

A root is a worker, or one of its contexts, which separate the passes of one worker as in
`torch.distributed.autograd`.

Gradients are accumulated by the rules of PyTorch's `AccumulateGrad`. The gradient that a backward
pass computes for a parameter may share memory: `p + q` has one gradient for both, the gradient of
`p.sum()` is an expanded scalar, a hook may have kept it, and the indices of a sparse gradient are
those that the user looked up. Optimizers change gradients in place, so each gradient must own its
memory. A gradient is used without a copy only if nothing else refers to it and it has the strides
of its parameter. See `torch/csrc/autograd/functions/accumulate_grad.h`; unlike PyTorch, this module
also copies a view of another gradient's memory.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from phalanx.errors import UsageError
from phalanx.torch_versions import storage_use_count, tensor_use_count

_WORKER_SHIFT = 48
"""The position of the worker's id in a context's number, which makes it unique, as in PyTorch."""

# References to a tensor that only a list holds: the list's and the argument's.
_REFERENCES = 2
# The tensor itself (if sparse: the component and the tensor that wraps it), and the argument.
_HOLDERS_OF_DENSE = 2
_HOLDERS_OF_SPARSE = 3


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
        self._passes = itertools.count(1)

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

    def add_pass(self, root: Root, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of a backward pass that this worker began, which has no other part."""
        # Negative numbers never collide with those of passes that arrive by calls.
        self.add(root, -next(self._passes), (), pairs)

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
        self._drop_if(lambda root: root.worker == worker and 0 < root.context < before)

    def forget(self, worker: int) -> None:
        """Drop the gradients of a worker that has died or is leaving."""
        self._drop_if(lambda root: root.worker == worker)

    def _drop_if(self, is_dropped: Callable[[Root], bool]) -> None:
        with self._lock:
            for root in filter(is_dropped, list(self._roots)):
                del self._roots[root]


class GradientAttributes:
    """The `grad` attributes of parameters, each used by one thread's backward pass at a time."""

    def __init__(self) -> None:
        self._borrowers: dict[int, int] = {}
        self._condition = threading.Condition()

    @contextmanager
    def borrow(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
        """Set `grad` of these parameters to None, and restore it on exit.

        Blocks while another thread has borrowed one of them, which the timeout of that thread's
        calls bounds.

        Yields:
            A list that on exit receives the gradient which the pass left in each `grad`.
        """
        thread = threading.get_ident()
        keys = {id(parameter) for parameter in parameters}
        with self._condition:
            self._condition.wait_for(
                lambda: all(self._borrowers.get(key, thread) == thread for key in keys)
            )
            own_keys = keys - self._borrowers.keys()
            self._borrowers.update(dict.fromkeys(own_keys, thread))
        saved_gradients = [parameter.grad for parameter in parameters]
        # Data-parallel modules own the memory of `grad` and overwrite it in every pass.
        values = [_values(gradient) for gradient in saved_gradients]
        gradients: list[Tensor | None] = []
        try:
            for parameter in parameters:
                parameter.grad = None
            yield gradients
        finally:
            for parameter, gradient, saved in zip(parameters, saved_gradients, values, strict=True):
                if gradient is None or saved is None or saved is gradient:
                    gradients.append(parameter.grad)
                else:
                    gradients.append(_values(parameter.grad))
                    gradient.data.copy_(saved)
                parameter.grad = gradient
            with self._condition:
                for key in own_keys:
                    del self._borrowers[key]
                self._condition.notify_all()


def _values(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient; a sparse one is never in a buffer and is returned unchanged."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    return gradient.detach().clone()


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


class Contexts:
    """The open contexts of this worker; each thread is in one of them, or in none (0)."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._latest = worker << _WORKER_SHIFT
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._thread = _Thread()

    @property
    def root(self) -> Root:
        """The root of backward passes that begin in this thread."""
        return self.root_of(self._thread.number)

    def root_of(self, number: int) -> Root:
        """Return the root of the passes in any worker's context; 0: this worker, no context."""
        return Root(number >> _WORKER_SHIFT if number else self._worker, number)

    def is_open(self, number: int) -> bool:
        """Return whether this worker has a context of this number open."""
        with self._lock:
            return number in self._open

    @property
    def oldest_context(self) -> int:
        """The lowest number of an open context, or if none is open that of the next one."""
        with self._lock:
            return min(self._open, default=self._latest + 1)

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open a new context and enter it; yields its number.

        Raises:
            UsageError: This thread is already in a context.
        """
        if self._thread.number:
            raise UsageError(
                f"Already have an autograd context id for this thread: {self._thread.number}; "
                "contexts cannot be nested"
            )
        with self._lock:
            self._latest += 1
            number = self._latest
            self._open.add(number)
        try:
            with self.enter(number):
                yield number
        finally:
            with self._lock:
                self._open.discard(number)

    @contextmanager
    def enter(self, number: int) -> Iterator[None]:
        """Make this thread's backward passes part of a context."""
        saved, self._thread.number = self._thread.number, number
        try:
            yield
        finally:
            self._thread.number = saved


class _Thread(threading.local):
    number = 0


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
        and storage_use_count(gradient) == _HOLDERS_OF_DENSE
    ):
        return gradient
    # With the parameter's strides if they leave no gaps, otherwise contiguous.
    copy = torch.empty_like(parameter, dtype=gradient.dtype, device=gradient.device)
    return copy.detach().copy_(gradient)


def _ensure_owned_sparse(gradient: Tensor, is_alone: bool) -> Tensor:
    indices, values = (
        part
        if is_alone and part.is_contiguous() and storage_use_count(part) == _HOLDERS_OF_SPARSE
        else part.clone(memory_format=torch.contiguous_format)
        for part in (gradient._indices(), gradient._values())
    )
    return torch.sparse_coo_tensor(
        indices,
        values,
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
        device=values.device,
        dtype=values.dtype,
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
