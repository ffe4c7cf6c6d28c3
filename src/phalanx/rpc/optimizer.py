"""An optimizer of parameters that live on several workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.rpc import calls
from phalanx.rpc.autograd.gradients import Root
from phalanx.rpc.autograd.transport import graph
from phalanx.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]

# Those of several workers may be of the same parameters.
_steps = threading.Lock()


class DistributedOptimizer:
    """Any PyTorch optimizer, over parameters of this and of other workers.

    Each worker that holds some of them has an optimizer of its own, with its own state, made here
    and stepped in parallel. A step uses the gradients of the backward passes that this worker has
    called, no other's, and uses them up; for parameters of this worker those are in `grad`, as
    ever. So `zero_grad` is there to throw gradients away, and isn't needed between steps. Sparse
    gradients touch their rows only, with the optimizers that can use such.

    Workers that train the same parameters each make one, and step when they like: a step is whole,
    and calculations of others that go on meanwhile see parameters before, after, or in the midst of
    it, as with any asynchronous server. Steps don't count as changes that make others' backward
    passes invalid.

    Args:
        optimizer_class: Called on each worker as `optimizer_class(parameters, *args, **kwargs)`.
        params_rref: Parameters of this worker, and `RRef`s to parameters of any.
        args: For the class.
        kwargs: For the class.

    Raises:
        UsageError: There is no parameter, or something that is none.
        PeerLost: A worker that holds some is dead.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        own, others = _by_owner(optimizer_class, params_rref)
        coming = [
            calls.begin(owner, _made, (optimizer_class, references, args, kwargs))
            for owner, references in others.items()
        ]
        self._own = _Part(optimizer_class, own, args, kwargs) if own else None
        self._others: list[Any] = _all(coming)

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters, where they are, and use up their gradients.

        Blocks until all workers have.

        Args:
            context_id: The context whose gradients to use; None: that of this thread, if any.

        Raises:
            UsageError: The context is one of this worker's, and isn't open.
            PeerLost: A worker is dead; what the others hold is updated all the same.
        """
        root = self._root(context_id)
        coming = [calls.begin(part.owner(), _stepped, (part, root)) for part in self._others]
        try:
            if self._own is not None:
                self._own.step(root)
        finally:
            _all(coming)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - PyTorch's
        """Throw gradients of this worker's backward passes away; blocks until all workers have."""
        root = self._root(None)
        coming = [calls.begin(part.owner(), _zeroed, (part, root)) for part in self._others]
        if self._own is not None:
            self._own.take(root)
        _all(coming)

    def _root(self, context_id: int | None) -> Root:
        here = graph()
        return here.root if context_id is None else here.contexts.root(context_id)


class _Part:
    """The optimizer of parameters of one worker, on that worker.

    It knows the parameters by other tensors of the same memory: so a step, for which autograd
    counts one version up, doesn't spoil another worker's graph, and no gradient appears in `grad`.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        parameters: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        given: Sequence[object] = parameters
        for parameter in given:
            if not _is_trained(parameter):
                raise UsageError(
                    f"DistributedOptimizer got {_described(parameter)}: expected parameters, or "
                    "other leaves that require gradients"
                )
        self._parameters = list(parameters)
        self._twins = [nn.Parameter(parameter.data) for parameter in parameters]
        self._optimizer = optimizer_class(self._twins, *args, **kwargs)

    def step(self, root: Root) -> None:
        """Update parameters with the gradients of a root, and use these up."""
        with _steps:
            for parameter, twin, gradient in zip(
                self._parameters, self._twins, self.take(root), strict=True
            ):
                if twin.data_ptr() != parameter.data_ptr():  # somebody has set its `data`
                    twin.data = parameter.data
                twin.grad = gradient
            try:
                self._optimizer.step()
            finally:
                for twin in self._twins:
                    twin.grad = None

    def take(self, root: Root) -> list[Tensor | None]:
        """The gradients of a root, which are there no longer."""
        here = graph()
        taken = here.gradients.take(root, self._parameters)
        for at, parameter in enumerate(self._parameters):
            if taken[at] is None:
                taken[at] = here.mixed.take(parameter)
            if root == Root(here.root.worker) and taken[at] is None:
                taken[at], parameter.grad = parameter.grad, None
        return taken


def _by_owner(
    optimizer_class: object, given: Iterable[Any]
) -> tuple[list[Tensor], dict[int, list[Any]]]:
    if not callable(optimizer_class):
        raise UsageError(
            f"DistributedOptimizer got {_described(optimizer_class)} first: expected a class of "
            "torch.optim, such as torch.optim.SGD"
        )
    own: list[Tensor] = []
    others: defaultdict[int, list[Any]] = defaultdict(list)
    for one in given:
        if isinstance(one, Tensor):
            own.append(one)
        elif not isinstance(one, RRef):
            raise UsageError(
                f"DistributedOptimizer got {_described(one)}: expected parameters and RRefs of "
                "parameters (for groups of different options make an optimizer each)"
            )
        elif one.is_owner():
            own.append(one.local_value())
        else:
            others[one.owner().id].append(one)
    if not own and not others:
        raise UsageError("DistributedOptimizer got no parameter: expected at least one")
    return own, others


def _is_trained(what: object) -> bool:
    return isinstance(what, Tensor) and what.requires_grad and what.is_leaf


def _described(what: object) -> str:
    if isinstance(what, Tensor):
        leaf = "a leaf" if what.is_leaf else "no leaf"
        return f"a tensor of shape {tuple(what.shape)}, {leaf}, requires_grad={what.requires_grad}"
    return f"an object of type {type(what).__name__}"


def _all(coming: Sequence[Any]) -> list[Any]:
    """Wait for all of them; the first error is raised when all are there."""
    results, first = [], None
    for one in coming:
        try:
            results.append(one.wait())
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        raise first
    return results


def _made(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    references: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    parameters = [reference.local_value() for reference in references]
    return RRef(_Part(optimizer_class, parameters, args, kwargs))


def _stepped(part: Any, root: Root) -> None:
    part.local_value().step(root)


def _zeroed(part: Any, root: Root) -> None:
    part.local_value().take(root)
