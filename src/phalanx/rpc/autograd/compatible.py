"""What `torch.distributed.autograd` offers, by its names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.rpc.autograd.transport import graph
from phalanx.rpc.autograd.walk import leaves

__all__ = ["backward", "context", "get_gradients", "is_available", "mix_gradients", "scalars"]

_passes = itertools.count(1)


@contextmanager
def context() -> Iterator[int]:
    """A context of its own for this thread's backward passes, as PyTorch's; nobody needs one.

    Without any, gradients are kept apart by worker; two threads of one worker that train at the
    same time keep theirs apart by contexts. When it is left, gradients of it that no optimizer has
    taken are dropped: at once here, with the next backward pass on other workers.

    Yields:
        Its number, for `backward`, `get_gradients` and `DistributedOptimizer.step`.

    Raises:
        UsageError: This process is no worker.
    """
    here = graph()
    with here.contexts.opened() as number:
        try:
            yield number
        finally:
            here.gradients.drop(here.root)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """A backward pass from scalars; gradients of local parameters go into the context, not `grad`.

    Blocks until it has gone through all workers, each call within the timeout of calls.

    Args:
        context_id: What `context` gave.
        roots: Tensors of one element.
        retain_graph: Whether there will be a second one through the same graph.

    Raises:
        UsageError: There is nothing to begin with, or it is no scalar; the context isn't open.
        PeerLost: A worker on the way is dead.
    """
    here = graph()
    whose = here.contexts.root(context_id)
    roots = scalars(roots)
    parameters = leaves(roots, ())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with here.contexts.entered(context_id):
            torch.autograd.backward(list(roots), retain_graph=retain_graph)
        made = [(p, p.grad) for p in parameters if p.grad is not None]
        # Numbers below zero are never those of passes that come in by calls.
        task = -next(_passes)
        here.gradients.add(whose, task, (), made)
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def scalars(roots: Sequence[object]) -> list[Tensor]:
    """What a backward pass may begin with.

    Raises:
        UsageError: It is something else.
    """
    found = [root for root in roots if isinstance(root, Tensor)]
    if not roots or len(found) < len(roots):
        said = ", ".join(type(root).__name__ for root in roots) or "nothing"
        raise UsageError(f"a backward pass from {said}: expected at least one tensor, and no other")
    for root in found:
        if root.numel() != 1 or not root.requires_grad:
            raise UsageError(
                f"a backward pass from a tensor of shape {tuple(root.shape)} with "
                f"requires_grad={root.requires_grad}: expected tensors of one element that "
                "require gradients"
            )
    return found


def is_available() -> bool:
    """Always; PyTorch's may be built without."""
    return True


def get_gradients(context_id: int = 0) -> dict[Tensor, Tensor]:
    """The gradients of this process's parameters that were made in a context so far.

    Args:
        context_id: What `context` gave, to this or to another worker; 0: those that this worker
            made in no context, which are in `grad` instead.

    Returns:
        Gradients by parameter; they stay for the optimizer.

    Raises:
        UsageError: The context is one of this worker's, and isn't open.
    """
    here = graph()
    return here.gradients.seen(here.contexts.root(context_id))


def mix_gradients(parameters: Iterable[Tensor], mixed: bool = True) -> None:
    """Have all workers' gradients of some of this process's parameters add up in their `grad`.

    For a server that steps by itself, when the gradients of all trainers are there. Otherwise each
    worker's are kept apart until its own optimizer steps.

    Args:
        parameters: Parameters that this process holds.
        mixed: False: keep them apart again.
    """
    graph().mixed.mark(parameters, mixed)
