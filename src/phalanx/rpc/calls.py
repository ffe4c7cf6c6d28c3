"""Calling functions on other workers.

Every call names a worker, a function and its arguments. Arguments and results are copied: what the
function changes in them stays with it. Functions go by reference where the other worker can import
them (those of the main program, where it runs the same one), by value otherwise. Tensors, on the
CPU, go through shared memory on a host; views of one storage don't share it any more when they
arrive, and a parameter that is itself an argument arrives as a tensor.

Nested calls, to any worker, don't block one another: whatever waits, another thread serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import UsageError
from phalanx.rpc import shipping
from phalanx.rpc.rref import RRef
from phalanx.rpc.seam import Graph, on_behalf_of, set_graph, when_lost
from phalanx.rpc.state import UNSET, agent, agent_or_none, seconds
from phalanx.rpc.values import Name
from phalanx.rpc.wire import Kind
from phalanx.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.rpc.asked import Asked

__all__ = [
    "Graph",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "is_available",
    "on_behalf_of",
    "remote",
    "root",
    "rpc_async",
    "rpc_sync",
    "set_graph",
    "when_lost",
]

To = "str | int | WorkerInfo"


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
    """Call a function on a worker and wait for its result.

    Args:
        to: The worker: its name, its id or what `get_worker_info` returned. It may be this one.
        func: The function, method or class.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds that this may take; 0: any; by default what `init_rpc` was given, or 60.

    Returns:
        What the function returned, as a copy.

    Raises:
        UsageError: There is no such worker, RPC isn't initialised (any more), or the function or an
            argument can't be sent. The worker wasn't touched.
        PeerLost: The worker has died or has left; it is named.
        CallTimeout: There was no result in time. The function may still be executed.
        RemoteError: The function raised an exception that can't be sent.
        Exception: What the function raised, with the remote traceback as its cause.
    """
    return begin(to, func, args, kwargs, timeout).wait()


def begin(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Asked:
    """Call a function on a worker; this thread waits for the result later.

    For this package's own calls: cheaper than `rpc_async`, but there is no future.
    """
    own = agent()
    peer = own.peer(to)
    what = _call(func, args, kwargs)
    return own.begin(peer, Kind.CALL, what, _said(func, peer), seconds(timeout))


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> torch.futures.Future[Any]:
    """Call a function on a worker, and return at once.

    Arguments as for `rpc_sync`. Tensors are copied before this returns.

    Returns:
        A future: `wait()` returns the result, or raises what `rpc_sync` would.

    Raises:
        UsageError: As for `rpc_sync`.
        PeerLost: The worker had died or left already.
    """
    own = agent()
    peer = own.peer(to)
    what = _call(func, args, kwargs)
    return own.post(peer, Kind.CALL, what, _said(func, peer), seconds(timeout))


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef[Any]:
    """Call a function on a worker, which keeps the result; returns at once.

    Arguments as for `rpc_sync`. `func` may be a class: its instance then lives on the worker.

    Returns:
        A reference to the result. It is freed when the last reference to it is gone. If the
        function raised, `to_here` raises it.

    Raises:
        UsageError: As for `rpc_sync`.
        PeerLost: The worker had died or left already.
    """
    own = agent()
    peer = own.peer(to)
    what, number = _call(func, args, kwargs), own.number()
    made = own.post(peer, Kind.REMOTE, what, _said(func, peer), seconds(timeout), number)
    # The worker counts this reference when it hears of the call.
    return RRef._of(own.hold(Name(own.id, number), peer.id), made)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of a worker; by default this one.

    Raises:
        UsageError: There is none of that name, or RPC isn't initialised.
    """
    own = agent()
    return own.info if worker_name is None else own.peer(worker_name).info


def get_worker_infos() -> list[WorkerInfo]:
    """Names and ids of all workers, by id.

    Raises:
        UsageError: RPC isn't initialised.
    """
    return [peer.info for peer in agent().peers]


def root() -> int:
    """The id of the worker on whose behalf this thread works.

    That of the worker where the outermost of the calls was made that are being executed here, this
    one included; this worker's, where none is.

    Raises:
        UsageError: RPC isn't initialised.
    """
    return agent().root()


def get_rpc_timeout() -> float:
    """Seconds that a call may take, unless it says otherwise; 0: any.

    Raises:
        UsageError: RPC isn't initialised.
    """
    return agent().timeout


def is_available() -> bool:
    """Always; PyTorch's RPC may be left out where PyTorch is built."""
    return True


def is_initialized() -> bool:
    """Whether this process is a worker: between `init_rpc` and `shutdown`."""
    return agent_or_none() is not None


def _call(func: object, args: Any, kwargs: Any) -> tuple[Any, ...]:
    if not callable(func):
        raise UsageError(f"func={func!r}: expected a function, a method or a class")
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise UsageError(
            f"args of type {type(args).__name__} and kwargs of type {type(kwargs).__name__}: "
            "expected a tuple and a dict; one argument alone is args=(x,)"
        )
    # Without gradients here, none are needed there.
    return func, shipping.by_value(tuple(args)), kwargs, torch.is_grad_enabled()


def _said(func: Any, peer: object) -> str:
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return f"{name} on {peer}"
