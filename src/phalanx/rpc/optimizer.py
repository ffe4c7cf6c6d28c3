"""An optimizer of parameters on several workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.rpc import calls
from phalanx.rpc.agent import PendingCall
from phalanx.rpc.autograd.gradients import Root
from phalanx.rpc.autograd.graph import graph
from phalanx.rpc.reference_counting import RRefId
from phalanx.rpc.rref import IdOf, RRef, local_value, owned_value

# Steps of several workers may update the same parameters.
_steps = threading.Lock()


class DistributedOptimizer:
    """A PyTorch optimizer of parameters of this and other workers.

    Each worker that holds some of the parameters has an optimizer of its own, with its own state.
    It is created here, and all are stepped in parallel. A step uses the gradients of the backward
    passes that this worker has called, and no others, and uses them up. For parameters of this
    worker these are in `grad`, as usual. So `zero_grad` only discards gradients, and is not needed
    between steps. Sparse gradients update only their rows, with optimizers that support them.

    Workers that train the same parameters each create an optimizer, and step independently. On
    each worker, steps do not interleave. A concurrent computation of another worker sees parameters
    before, during or after a step, as with any asynchronous server. Steps do not count as changes
    that invalidate the backward passes of other workers.

    Args:
        optimizer_class: Called on each worker as `optimizer_class(parameters, *args, **kwargs)`.
        params_rref: Parameters of this worker, and `RRef`s to parameters of any worker.
        args: Further positional arguments of the class.
        kwargs: Keyword arguments of the class.

    Raises:
        UsageError: There is no parameter, or an element is not a parameter.
        PeerLost: A worker that holds parameters is dead.

    Example:
        >>> module = rpc.RemoteModule("ps", torch.nn.Linear, args=(2, 3))
        >>> parameters = module.remote_parameters()
        >>> optimizer = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        >>> module(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        own, others = _by_owner(optimizer_class, params_rref)
        pending = [
            calls.begin(owner, _create_part, (optimizer_class, ids, args, kwargs))
            for owner, ids in others.items()
        ]
        self._own = _Part(optimizer_class, own, args, kwargs) if own else None
        self._others: list[Any] = _wait_all(pending)

    def step(self, context_id: int | None = None) -> None:
        """Update all parameters on their workers, and use up their gradients.

        Blocks until all workers are done.

        Args:
            context_id: The context whose gradients to use; None for that of this thread, if any.

        Raises:
            UsageError: No worker has such a context open.
            PeerLost: A worker is dead; the parameters of the others are updated all the same.
        """
        root = self._root(context_id)
        pending = self._begin(_step_part, root)
        try:
            if self._own is not None:
                self._own.step(root)
        finally:
            _wait_all(pending)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - as in PyTorch
        """Discard the gradients of this worker's backward passes; block until all workers have."""
        root = self._root(None)
        pending = self._begin(_zero_part, root)
        if self._own is not None:
            self._own.take(root)
        _wait_all(pending)

    def _begin(self, function: Callable[[RRefId, int, int], None], root: Root) -> list[PendingCall]:
        return [calls.begin(part.owner(), function, (IdOf(part), *root)) for part in self._others]

    def _root(self, context_id: int | None) -> Root:
        own_graph = graph()
        return own_graph.root if context_id is None else own_graph.root_of(context_id)


class _Part:
    """The optimizer of one worker's parameters, on that worker.

    It updates the parameters through other tensors with the same memory. So a step, which autograd
    counts as a new version, does not invalidate another worker's graph, and no gradient appears in
    `grad`.
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
            if not (isinstance(parameter, Tensor) and parameter.is_leaf):
                raise UsageError(
                    f"DistributedOptimizer got {_describe(parameter)}: expected parameters or "
                    "other leaf tensors; those that require no gradients are not updated"
                )
        self._parameters = list(parameters)
        self._aliases = [nn.Parameter(each.data, each.requires_grad) for each in parameters]
        self._optimizer = optimizer_class(self._aliases, *args, **kwargs)

    def step(self, root: Root) -> None:
        """Update the parameters with the gradients of a root, and use these up."""
        with _steps:
            for parameter, alias, gradient in zip(
                self._parameters, self._aliases, self.take(root), strict=True
            ):
                if not alias.is_set_to(parameter):  # its `data` was set to another tensor
                    alias.data = parameter.data
                alias.grad = gradient
            try:
                self._optimizer.step()
            finally:
                for alias in self._aliases:
                    alias.grad = None

    def take(self, root: Root) -> list[Tensor | None]:
        """Remove the gradients of a root and return them, one per parameter."""
        own_graph = graph()
        taken = own_graph.gradients.take(root, self._parameters)
        for at, parameter in enumerate(self._parameters):
            if taken[at] is None:
                taken[at] = own_graph.accumulated_parameters.take(parameter)
            if root == Root(own_graph.root.worker) and taken[at] is None:
                taken[at], parameter.grad = parameter.grad, None
        return taken


def _by_owner(
    optimizer_class: object, given: Iterable[Any]
) -> tuple[list[Tensor], dict[int, list[IdOf]]]:
    if not callable(optimizer_class):
        raise UsageError(
            f"DistributedOptimizer got {_describe(optimizer_class)} first: expected a class of "
            "torch.optim, such as torch.optim.SGD"
        )
    own: list[Tensor] = []
    others: defaultdict[int, list[IdOf]] = defaultdict(list)
    for one in given:
        if isinstance(one, Tensor):
            own.append(one)
        elif not isinstance(one, RRef):
            raise UsageError(
                f"DistributedOptimizer got {_describe(one)}: expected parameters and RRefs of "
                "parameters (for groups with different options, create one optimizer per group)"
            )
        elif one.is_owner():
            own.append(local_value(one))
        else:
            others[one.owner().id].append(IdOf(one))
    if not own and not others:
        raise UsageError("DistributedOptimizer got no parameter: expected at least one")
    return own, others


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        leaf = "a leaf" if value.is_leaf else "not a leaf"
        return (
            f"a tensor of shape {tuple(value.shape)}, {leaf}, requires_grad={value.requires_grad}"
        )
    return f"an object of type {type(value).__name__}"


def _wait_all(pending: Sequence[Any]) -> list[Any]:
    """Wait for all calls, then return their results or raise the first error."""
    results, first = [], None
    for one in pending:
        try:
            results.append(one.wait())
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    if first is not None:
        raise first
    return results


def _create_part(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    ids: Sequence[RRefId],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    parameters = [owned_value(each) for each in ids]
    return RRef(_Part(optimizer_class, parameters, args, kwargs))


def _step_part(part_id: RRefId, worker: int, context: int) -> None:
    owned_value(part_id).step(Root(worker, context))


def _zero_part(part_id: RRefId, worker: int, context: int) -> None:
    owned_value(part_id).take(Root(worker, context))
