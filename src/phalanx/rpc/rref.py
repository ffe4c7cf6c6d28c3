"""`RRef`: a reference to a value that lives on a worker, and `remote`, which returns one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from phalanx.errors import CallTimeout, UsageError
from phalanx.rpc import autograd, calls
from phalanx.rpc.agent import UNSET, Agent, agent, agent_or_none, seconds
from phalanx.rpc.functions import ASYNC_EXECUTION_MARK, CallFuture, FutureResult
from phalanx.rpc.message import Kind
from phalanx.rpc.pickling import thread_local
from phalanx.rpc.reference_counting import RefCountDelta, RRefId
from phalanx.rpc.workers import WorkerInfo

_T = TypeVar("_T")


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef[Any]:
    """Call a function on a worker that keeps the result; return a reference to it at once.

    The arguments are those of `rpc_sync`. `func` may be a class, whose instance then lives on the
    worker.

    Returns:
        A reference to the result, which is freed when its last reference is gone. If the function
        raised, or the worker is lost, `to_here` raises that error.

    Raises:
        UsageError: As for `rpc_sync`.

    Example:
        >>> layer = rpc.remote("ps", torch.nn.Linear, args=(2, 3))
        >>> layer.rpc_sync().forward(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    own = agent()
    peer = own.peer(to)
    body, local_id = calls.make_body(func, args, kwargs), next(own.local_ids)
    future = own.call_async(
        peer, Kind.REMOTE, body, calls.describe_call(func, peer), seconds(timeout), local_id
    )
    # The worker counts this reference when it receives the call.
    return RRef._make(own, RRefId(own.id, local_id), peer.id, future)


class RRef(Generic[_T]):
    """A reference to a value that lives on one worker, its owner.

    It may be passed to any worker, in arguments and results. The value is freed when no worker has
    a reference to it any more. References of a dead worker no longer count.

    Args:
        value: The value, which this worker owns.
        type_hint: The interface of a `ScriptModule`, as in PyTorch; otherwise unused.

    Raises:
        UsageError: RPC is not initialized, or there is no type hint for a `ScriptModule`.

    Example:
        >>> steps = rpc.RRef([1, 2])
        >>> steps.rpc_sync().append(3)  # on its owner
        >>> steps.to_here()
        [1, 2, 3]
    """

    _agent: Agent | None = None
    """The agent of the worker that has this reference, which counts it; None if it is not."""
    _rref_id: RRefId
    _owner: int
    _fork_id: RRefId
    """The name of the reference itself: the worker that has it, and a number of that worker."""
    _creation: CallFuture | None

    def __init__(self, value: _T, type_hint: Any = None) -> None:
        own = agent()
        if type_hint is None and isinstance(value, torch.jit.ScriptModule):
            raise UsageError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface "
                "type hint: RRef(module, Interface)"
            )
        rref_id = RRefId(own.id, next(own.local_ids))
        own.owned_values.begin(rref_id, own.id).set_result(value)
        self._set(own, rref_id, own.id, None)

    @classmethod
    def _make(
        cls, own: Agent, rref_id: RRefId, owner: int, creation: CallFuture | None = None
    ) -> RRef[Any]:
        """Return another reference to a value; `creation` is the call that makes the value."""
        new: RRef[Any] = cls.__new__(cls)
        new._set(own, rref_id, owner, creation)
        return new

    def _set(self, own: Agent, rref_id: RRefId, owner: int, creation: CallFuture | None) -> None:
        self._rref_id, self._owner, self._creation = rref_id, owner, creation
        number = rref_id.local_id if owner == own.id else next(own.local_ids)
        self._fork_id = RRefId(own.id, number)
        if creation is None or creation.is_sent:
            self._agent = own

    def __del__(self) -> None:
        # This may run in any thread and at any point of it, so the change is only queued.
        if (own := self._agent) is not None:
            delta = RefCountDelta(self._rref_id, own.id, -1)
            own.notifier.queue(self._owner, partial(own.send_ref_count, self._owner, delta))

    def owner(self) -> WorkerInfo:
        """Return the worker on which the value lives."""
        return agent().peers[self._owner].info

    def owner_name(self) -> str:
        """Return the name of the owner."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Return whether this worker is the owner."""
        return self._owner == agent().id

    def is_on_this_host(self) -> bool:
        """Return whether the owner is on this worker's host."""
        return agent().peers[self._owner].is_local

    def owner_is_lost(self) -> bool:
        """Return whether the owner has died or left, and with it the value."""
        return bool(agent().peers[self._owner].loss_reason)

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have the value, or the error of its creation."""
        return self._creation is None or self._creation.done()

    def local_value(self) -> _T:
        """Return the value itself, not a copy, on its owner; wait until it exists.

        Raises:
            UsageError: This worker is not the owner.
            CallTimeout: The value does not exist after the timeout of `init_rpc`.
            Exception: The exception raised by the creation of the value.

        Example:
            >>> def count_rows(table):
            ...     return len(table.local_value())
            >>> table = rpc.remote("ps", torch.zeros, args=(5, 2))
            >>> rpc.rpc_sync("ps", count_rows, args=(table,))
            5
        """
        own = self._require_agent("local_value")
        if self._owner != own.id:
            raise UsageError(
                f"For UserRRef(rref_id={self._rref_id}, "
                f"fork_id={self._fork_id}), can't call localValue() on user {own.info}. "
                f"Call it on owner {self.owner()}; to_here() copies the value, rpc_sync() calls "
                "its methods"
            )
        result: _T = used_value(self._rref_id)
        return result

    def to_here(self, timeout: float = UNSET) -> _T:
        """Return a copy of the value, or on its owner the value itself; block until it exists.

        Args:
            timeout: The timeout in seconds; 0 means no limit; by default that of `init_rpc`.

        Raises:
            PeerLost: The owner has died or left.
            CallTimeout: The value is not there in time.
            Exception: The exception raised by the creation of the value.

        Example:
            >>> rpc.remote("ps", torch.zeros, args=(2,)).to_here()
            tensor([0., 0.])
        """
        own = self._require_agent("to_here")
        if self._owner == own.id:
            value: _T = used_value(self._rref_id, limit=seconds(timeout))
            return value
        if self._creation is not None and not self._creation.is_sent:
            self._creation.value()  # raises: the owner never received the call
        peer = own.peers[self._owner]
        description = f"to_here of {self!r}"
        call = own.begin(peer, Kind.FETCH, tuple(self._rref_id), description, seconds(timeout))
        result: _T = call.wait()
        return result

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a tensor of one element, wherever it lives.

        Args:
            dist_autograd_ctx_id: The id of a `phalanx.rpc.autograd.context`. Gradients of local
                parameters go into that context; with -1, into `grad`, as by `to_here().backward()`.
            retain_graph: True if there will be a second pass through the same graph.

        Raises:
            UsageError: The value is not a tensor, or a backward pass cannot begin with it.
            PeerLost: A worker that takes part is dead.

        Example:
            >>> weight = torch.ones(2, requires_grad=True)
            >>> rpc.remote("ps", torch.sum, args=(weight,)).backward()
            >>> weight.grad
            tensor([1., 1.])
        """
        value: object = self.to_here()
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                "RRef should contain a tensor for .backward(), and this one contains an object of "
                f"type {type(value).__name__}"
            )
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            autograd.backward(dist_autograd_ctx_id, [value], retain_graph)

    def _require_agent(self, method: str) -> Agent:
        """Return this worker's agent; raise if this worker has left RPC."""
        if (own := agent_or_none()) is None:
            raise UsageError(
                f"{self!r} was deleted when this process left RPC by shutdown(). Cannot call "
                f"{method}() on it after deletion."
            )
        return own

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        """Return a proxy: `rref.rpc_sync().method(x)` calls the value's method on its owner."""
        return _Proxy(self, calls.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        """Return such a proxy whose methods return a future.

        Example:
            >>> table = rpc.remote("ps", torch.zeros, args=(2,))
            >>> table.rpc_async().numel().wait()
            2
        """
        return _Proxy(self, calls.rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        """Return such a proxy whose methods return an `RRef` of their results.

        Example:
            >>> table = rpc.remote("ps", torch.zeros, args=(2, 3))
            >>> table.remote().sum(0).to_here()
            tensor([0., 0., 0.])
        """
        return _Proxy(self, remote, timeout)

    def begin(self, timeout: float = UNSET) -> Any:
        """Return such a proxy for internal calls, whose results this thread waits for later."""
        return _Proxy(self, calls.begin, timeout)

    def __repr__(self) -> str:
        if self._owner == self._fork_id.created_on:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork_id})"

    def __reduce__(self) -> Any:
        pickle_context = thread_local.pickle_context
        if pickle_context is None:
            raise UsageError(
                f"Can not pickle rref in python pickler, rref can only be pickled when using RPC, "
                f"which counts references; got {self!r}"
            )
        own, peer = agent(), pickle_context.peer.id
        # A reference sent to its owner in a request is not counted: the caller keeps its arguments
        # alive until the answer arrives.
        is_counted = self._owner != peer or pickle_context.is_answer
        if is_counted:
            delta = RefCountDelta(self._rref_id, peer, 1)
            own.send_ref_count(self._owner, delta)
            pickle_context.undo.append(
                partial(own.send_ref_count, self._owner, delta._replace(amount=-1))
            )
        return _unpickle, (*self._rref_id, self._owner, is_counted)


class _Proxy:
    """A proxy whose methods are those of a value, called on its owner."""

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._invoke, method)

    def _invoke(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref
        return self._call(rref.owner(), _Method(rref, method), args, kwargs, self._timeout)


class _Method:
    """A method of a value, sent to the owner by name; it needs no reference."""

    def __init__(self, rref: RRef[Any], method: str) -> None:
        self._rref, self._method = rref, method
        self.__qualname__ = f"{method} of {rref!r}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_method(self._method, self._rref._rref_id, *args, **kwargs)

    def __reduce__(self) -> Any:
        return partial, (_call_method, self._method, tuple(self._rref._rref_id))


class IdOf:
    """An argument of an internal call to the owner of a value, where it arrives as an `RRefId`.

    It costs less than an `RRef`, since the owner needs no reference of its own: the caller keeps
    its arguments alive until the answer arrives.

    Args:
        rref: A reference to the value.
    """

    def __init__(self, rref: RRef[Any]) -> None:
        self._rref = rref

    def __reduce__(self) -> Any:
        return RRefId, tuple(self._rref._rref_id)


def _call_method(method: str, rref_id: tuple[int, int], /, *args: Any, **kwargs: Any) -> Any:
    bound = getattr(used_value(RRefId(*rref_id), method, args, kwargs), method)
    result = bound(*args, **kwargs)
    return FutureResult(result, bound) if hasattr(bound, ASYNC_EXECUTION_MARK) else result


def local_value(rref: RRef[_T]) -> _T:
    """Return the value of a reference on its owner, to RPC itself; wait until it exists."""
    value: _T = owned_value(rref._rref_id)
    return value


def used_value(
    rref_id: RRefId,
    method: str = "",
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    limit: float | None = None,
) -> Any:
    """Return a value that this worker owns to code of the user; see `OwnedValue.on_use`."""
    value, own = owned_value(rref_id, limit), agent()
    if (on_use := own.owned_values.get_or_create(rref_id).on_use) is not None:
        on_use(method, args, kwargs or {})
    return value


def owned_value(rref_id: RRefId, limit: float | None = None) -> Any:
    """Return a value that this worker owns, to RPC itself; wait until it exists.

    Args:
        rref_id: The id of the reference.
        limit: The time to wait, in seconds; 0 means no limit; None the timeout of `init_rpc`.

    Raises:
        CallTimeout: The value does not exist in time.
        Exception: The exception raised by the creation of the value.
    """
    own = agent()
    value = own.owned_values.get_or_create(rref_id)
    if not value.done():
        own.promote_follower()
        limit = own.timeout if limit is None else limit
        if not wait([value], limit or None).done:
            raise CallTimeout(
                f"RRef({rref_id.created_on}.{rref_id.local_id}, on worker {own.id}) did not exist "
                f"after {limit:g} s",
                ranks=[own.id],
                seconds=limit,
            )
    return value.get()


def _unpickle(created_on: int, local_id: int, owner: int, is_counted: bool) -> RRef[Any]:
    own, rref_id = agent(), RRefId(created_on, local_id)
    if not is_counted:
        own.owned_values.apply(RefCountDelta(rref_id, own.id, 1))
    return RRef._make(own, rref_id, owner)
