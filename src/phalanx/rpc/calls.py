"""Calls of functions on other workers.

Each call names a worker, a function and its arguments. Arguments and results are copied, so the
caller does not see changes that the function makes to them. Functions are sent by reference if the
other worker can import them (those of the main program, if it runs the same one), and by value
otherwise. Tensors must be on the CPU and keep their strides; on one host they go through shared
memory. Views of one storage no longer share it when they arrive. A parameter that is an argument or
a result, by itself or in a tuple, list or dict, arrives as a tensor of the graph.

Nested calls, to any worker, do not block one another: while a thread waits, another one serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.errors import UsageError
from phalanx.rpc.agent import UNSET, PendingCall, agent, agent_or_none, seconds
from phalanx.rpc.message import Kind
from phalanx.rpc.workers import WorkerInfo


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
    """Call a function on a worker and wait for its result.

    Args:
        to: The worker: a name, an id or a `WorkerInfo`. It may be this worker.
        func: The function, method or class.
        args: The positional arguments.
        kwargs: The keyword arguments.
        timeout: The timeout in seconds; 0 means no limit. By default the timeout given to
            `init_rpc`, or 60.

    Returns:
        A copy of the function's result.

    Raises:
        UsageError: There is no such worker, RPC is not initialized (any more), or the function or
            an argument cannot be sent. Nothing was sent to the worker.
        PeerLost: The worker has died or left; the message names it.
        CallTimeout: There was no result in time. The function may still be executed.
        RemoteError: The function raised an exception that cannot be sent.
        Exception: The exception that the function raised, with the remote traceback as its cause.

    Example:
        >>> rpc.rpc_sync("ps", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    return begin(to, func, args, kwargs, timeout).wait()


def begin(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> PendingCall:
    """Call a function on a worker; this thread waits for the result later.

    For internal use: cheaper than `rpc_async`, but there is no future.
    """
    own = agent()
    peer = own.peer(to)
    body = make_body(func, args, kwargs)
    return own.begin(peer, Kind.CALL, body, describe_call(func, peer), seconds(timeout))


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> torch.futures.Future[Any]:
    """Call a function on a worker and return a future of its result at once.

    The arguments are those of `rpc_sync`. Tensors are copied before this returns.

    Returns:
        A future whose `wait()` returns the result, or raises the error that `rpc_sync` would raise.
        `wait_all` and `collect_all` of `torch.futures` end at the first failure of such futures.

    Raises:
        UsageError: As for `rpc_sync`.

    Example:
        >>> futures = [rpc.rpc_async("ps", torch.add, args=(torch.ones(2), n)) for n in range(2)]
        >>> [future.wait() for future in futures]
        [tensor([1., 1.]), tensor([2., 2.])]
    """
    own = agent()
    peer = own.peer(to)
    body = make_body(func, args, kwargs)
    return own.call_async(peer, Kind.CALL, body, describe_call(func, peer), seconds(timeout))


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and id of a worker, by default of this one.

    Raises:
        UsageError: No worker has that name, or RPC is not initialized.

    Example:
        >>> rpc.get_worker_info("ps").id
        0
    """
    own = agent()
    return own.info if worker_name is None else own.peer(worker_name).info


def get_worker_infos() -> list[WorkerInfo]:
    """Return the names and ids of all workers, ordered by id.

    In a group without a fixed size these are the workers that are known to be there; others may
    just be joining.

    Raises:
        UsageError: RPC is not initialized.

    Example:
        >>> [worker.name for worker in rpc.get_worker_infos()]
        ['ps']
    """
    peers = agent().peers
    infos = [peer.info for peer in peers if not (peers.may_grow and peer.loss_reason)]
    return sorted(infos, key=lambda info: info.id)


def get_rpc_timeout() -> float:
    """Return the default timeout of a call in seconds; 0 means no limit.

    Raises:
        UsageError: RPC is not initialized.

    Example:
        >>> rpc.get_rpc_timeout()
        60.0
    """
    return agent().timeout


def is_available() -> bool:
    """Return True; unlike PyTorch's RPC, this one is part of every build.

    Example:
        >>> rpc.is_available()
        True
    """
    return True


def is_initialized() -> bool:
    """Return whether this process is a worker, that is, between `init_rpc` and `shutdown`.

    Example:
        >>> if rpc.is_initialized():
        ...     rpc.shutdown()
    """
    return agent_or_none() is not None


def make_body(func: object, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the body of a request to call a function.

    Raises:
        UsageError: The function is not callable, or the arguments have the wrong types.
    """
    if type(func) is torch.jit.ScriptFunction:
        _check_count(func, args, kwargs)
    if not callable(func):
        raise UsageError(f"func={func!r}: expected a function, a method or a class")
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise UsageError(
            f"args of type {type(args).__name__} and kwargs of type {type(kwargs).__name__}: "
            "expected a tuple and a dict; pass a single argument as args=(x,)"
        )
    # The callee records gradients only if the caller does.
    return func, tuple(args), kwargs, torch.is_grad_enabled()


def _check_count(func: Any, args: Any, kwargs: Any) -> None:
    expected, given = len(func.schema.arguments), len(args or ()) + len(kwargs or ())
    if given > expected:
        raise UsageError(
            f"{func.name}() expected at most {expected} argument(s) but received {given} "
            "argument(s)"
        )


def describe_call(func: Any, peer: object) -> str:
    """Return a description of a call, for messages."""
    if type(func) is torch.jit.ScriptFunction:
        return f"{func.name} on {peer}"
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return f"{name} on {peer}"
