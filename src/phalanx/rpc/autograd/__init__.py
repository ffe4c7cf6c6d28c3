"""Backward passes across remote calls, and the API of `torch.distributed.autograd`.

- `nodes`: the graph nodes of tensors that are sent and received, their metadata in messages, and
  traversal of this process's graph.
- `gradients`: gradients of parameters, kept separately for each worker that calls `backward()`.
- `graph`: the graph of this worker, and the calls that connect it to those of other workers.

`loss.backward()` works across calls without this module. Scripts that were written for PyTorch use
`import phalanx.rpc.autograd as dist_autograd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.errors import ArgumentTypeError, PhalanxError, RemoteError, UsageError
from phalanx.rpc.autograd.gradients import ensure_owned
from phalanx.rpc.autograd.graph import graph
from phalanx.rpc.autograd.nodes import leaves

__all__ = ["backward", "context", "get_gradients", "is_available", "mix_gradients"]


@contextmanager
def context() -> Iterator[int]:
    """Open a context for this thread's backward passes, as in PyTorch; contexts are optional.

    Without a context, gradients are kept separately for each worker. Contexts separate the
    gradients of two threads of one worker that train at the same time. On exit, gradients of the
    context that no optimizer has taken are dropped: immediately in this process, and with the next
    backward pass on other workers.

    Yields:
        The context's number, for `backward`, `get_gradients` and `DistributedOptimizer.step`.

    Raises:
        UsageError: This process is not a worker, or this thread is already in a context.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with rpc.autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("ps", torch.sum, args=(weight,))
        ...     rpc.autograd.backward(context_id, [loss])
        ...     gradients = rpc.autograd.get_gradients(context_id)
        >>> gradients[weight]
        tensor([1., 1.])
    """
    own_graph = graph()
    with own_graph.contexts.open() as number:
        try:
            yield number
        finally:
            own_graph.gradients.drop(own_graph.root)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Run a backward pass from scalars.

    Gradients of local parameters go into the context, not into `grad`. Blocks until the pass has
    finished on all workers; each call is bounded by the timeout of calls.

    Args:
        context_id: The number that `context` yielded.
        roots: A list of tensors of one element, each the result of operations on tensors that
            require gradients.
        retain_graph: Whether to keep the graph for a second backward pass.

    Raises:
        UsageError: The list is empty, a root is not such a tensor, or no worker has such a context
            open.
        RemoteError: The backward pass failed, on this or on another worker.
        PeerLost: A worker that takes part in the pass is dead.

    Example:
        >>> module = rpc.RemoteModule("ps", torch.nn.Linear, args=(2, 3))
        >>> with rpc.autograd.context() as context_id:
        ...     rpc.autograd.backward(context_id, [module(torch.ones(4, 2)).sum()])
    """
    own_graph = graph()
    _check_roots(context_id, roots)
    root = own_graph.root_of(context_id)
    parameters = leaves(roots, ())
    with own_graph.attributes.borrow(parameters) as gradients, own_graph.contexts.enter(context_id):
        try:
            torch.autograd.backward(list(roots), retain_graph=retain_graph)
        except (PhalanxError, UsageError):
            raise
        except Exception as error:
            raise RemoteError(f"Error on Node {own_graph.root.worker}: {error}") from error
    own_graph.gradients.add_pass(root, ensure_owned(parameters, gradients))


def _check_roots(context_id: object, roots: Sequence[object]) -> None:
    is_list = isinstance(roots, (list, tuple)) and all(isinstance(each, Tensor) for each in roots)
    if not is_list or not isinstance(context_id, int):
        raise ArgumentTypeError(
            "backward(): incompatible function arguments: expected the number of a context and a "
            f"list of tensors, got {context_id!r} and {roots!r}"
        )
    if not roots:
        raise UsageError("No tensors provided for gradient computation: `roots` is empty")
    for at, root in enumerate(roots):
        given = f"root {at}, a tensor of shape {list(root.shape)},"  # type: ignore[attr-defined]
        if not root.requires_grad:  # type: ignore[attr-defined]
            raise UsageError(f"requires_grad not set on {given[:-1]}")
        if root.numel() != 1:  # type: ignore[attr-defined]
            raise UsageError(f"{given} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:  # type: ignore[attr-defined]
            raise UsageError(f"{given} does not have a valid gradient function: it is a leaf")


def is_available() -> bool:
    """Return True: unlike in PyTorch, this module is always part of the build.

    Example:
        >>> rpc.autograd.is_available()
        True
    """
    return True


def get_gradients(context_id: int = 0) -> dict[Tensor, Tensor]:
    """Return the gradients of this process's parameters accumulated in a context so far.

    If another worker opened the context, blocks until that worker has confirmed that it is still
    open.

    Args:
        context_id: The number that `context` yielded on this or on another worker. 0 means the
            backward passes of this worker outside any context.

    Returns:
        The gradients by parameter; they remain available to the optimizer.

    Raises:
        UsageError: No worker has such a context open.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with rpc.autograd.context() as context_id:
        ...     rpc.autograd.backward(context_id, [weight.sum()])
        ...     rpc.autograd.get_gradients(context_id)[weight]
        tensor([1., 1.])
    """
    own_graph = graph()
    return own_graph.gradients.peek(own_graph.root_of(context_id))


def mix_gradients(parameters: Iterable[Tensor], mixed: bool = True) -> None:
    """Accumulate the gradients of all workers in the `grad` of some of this process's parameters.

    This serves a parameter server that steps by itself, once the gradients of all trainers have
    arrived. By default, each worker's gradients are kept separately until its own optimizer steps.

    Args:
        parameters: Parameters that this process holds.
        mixed: Whether to accumulate in `grad`; False restores the default.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> rpc.autograd.mix_gradients(model.parameters())
    """
    graph().accumulated_parameters.mark(parameters, mixed)
