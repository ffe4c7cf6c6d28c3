"""`RRef`: a reference to a value that lives on a worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from phalanx.errors import CallTimeout, UsageError
from phalanx.rpc.executing import DEFERRED, Deferred
from phalanx.rpc.shipping import context
from phalanx.rpc.state import UNSET, agent, seconds
from phalanx.rpc.values import Change, Hold, Name
from phalanx.rpc.wire import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.workers import WorkerInfo

__all__ = ["RRef"]

_T = TypeVar("_T")


class RRef(Generic[_T]):
    """A reference to a value that lives on one worker, its owner.

    It may be passed to any worker, in arguments and results. The value is freed when no worker has
    a reference to it any more; what a worker had that has died counts no longer.

    Args:
        value: What to refer to; this worker owns it.
        type_hint: As in PyTorch; not used.

    Raises:
        UsageError: RPC isn't initialised.
    """

    _hold: Hold
    _made: torch.futures.Future[Any] | None

    def __init__(self, value: _T, type_hint: Any = None) -> None:  # noqa: ARG002 - PyTorch's
        own = agent()
        name = Name(own.id, own.number())
        own.values.count(Change(name, own.id, 1))
        own.values.at(name).settle(value)
        self._hold, self._made = own.hold(name, own.id), None

    @classmethod
    def _of(cls, hold: Hold, made: torch.futures.Future[Any] | None = None) -> RRef[Any]:
        new: RRef[Any] = cls.__new__(cls)
        new._hold, new._made = hold, made
        return new

    def owner(self) -> WorkerInfo:
        """The worker where the value lives."""
        return agent().peers[self._hold.owner].info

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker is the owner."""
        return self._hold.owner == agent().id

    def is_near(self) -> bool:
        """Whether the owner shares this worker's host."""
        return agent().peers[self._hold.owner].is_near

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to have the value, or what making it raised."""
        return self._made is None or self._made.done()

    def local_value(self) -> _T:
        """The value itself, no copy, on its owner; waits until it is there.

        Raises:
            UsageError: This worker isn't the owner.
            CallTimeout: It isn't there after the timeout of `init_rpc`.
            Exception: What making it raised.
        """
        own = agent()
        if self._hold.owner != own.id:
            raise UsageError(
                f"local_value() of {self!r} on worker {own.info.name!r}: only its owner has the "
                "value; to_here() copies it, rpc_sync() calls its methods"
            )
        result: _T = _value(self._hold.name)
        return result

    def to_here(self, timeout: float = UNSET) -> _T:
        """A copy of the value; on the owner the value itself. Blocks until it is there.

        Args:
            timeout: Seconds; 0: any; by default that of `init_rpc`.

        Raises:
            PeerLost: The owner has died or left.
            CallTimeout: It isn't there in time.
            Exception: What making it raised.
        """
        own = agent()
        if self._hold.owner == own.id:
            return self.local_value()
        peer = own.peers[self._hold.owner]
        said = f"to_here of {self!r}"
        result: _T = own.ask(peer, Kind.FETCH, tuple(self._hold.name), said, seconds(timeout))
        return result

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """A backward pass from the value, a tensor of one element, wherever it lives.

        Args:
            dist_autograd_ctx_id: What `phalanx.rpc.autograd.context` gave: gradients of local
                parameters then go into that context; -1: into `grad`, as `to_here().backward()`.
            retain_graph: Whether there will be a second one through the same graph.

        Raises:
            UsageError: The value is no tensor of one element that requires gradients.
            PeerLost: A worker on the way is dead.
        """
        from phalanx.rpc.autograd.compatible import backward, scalars

        (value,) = scalars([self.to_here()])
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            backward(dist_autograd_ctx_id, [value], retain_graph)

    def rpc_sync(self, timeout: float = UNSET) -> Any:
        """A proxy: `rref.rpc_sync().method(x)` calls the value's method where it lives."""
        from phalanx.rpc.calls import rpc_sync

        return _Proxy(self, rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET) -> Any:
        """The same, whose methods return a future."""
        from phalanx.rpc.calls import rpc_async

        return _Proxy(self, rpc_async, timeout)

    def remote(self, timeout: float = UNSET) -> Any:
        """The same, whose methods return an `RRef` of their results."""
        from phalanx.rpc.calls import remote

        return _Proxy(self, remote, timeout)

    def begin(self, timeout: float = UNSET) -> Any:
        """The same for this package's own calls, whose results this thread waits for later."""
        from phalanx.rpc.calls import begin

        return _Proxy(self, begin, timeout)

    def __repr__(self) -> str:
        return _said(self._hold.name, self._hold.owner)

    def __reduce__(self) -> Any:
        shipment = context.shipment
        if shipment is None:
            raise UsageError(
                f"{self!r} can only be sent by calls of phalanx.rpc, which count references; it "
                "can't be pickled or copied otherwise"
            )
        own, hold, peer = agent(), self._hold, shipment.peer.id
        # The caller keeps its arguments until the answer is there: that is enough for the owner.
        counted = hold.owner != peer or shipment.is_answer
        if counted:
            change = Change(hold.name, peer, 1)
            own.count(hold.owner, change)
            shipment.undo.append(partial(own.count, hold.owner, change._replace(more=-1)))
        return _arrived, (*hold.name, hold.owner, counted)


class _Proxy:
    """Methods of a value, called where it lives."""

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: float) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._invoke, method)

    def _invoke(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref
        return self._call(rref.owner(), _Method(rref, method), args, kwargs, self._timeout)


class _Method:
    """A method of a value, for a call to its owner: it travels by name, and needs no reference."""

    def __init__(self, rref: RRef[Any], method: str) -> None:
        self._rref, self._method = rref, method
        self.__qualname__ = f"{method} of {rref!r}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _called(self._method, self._rref._hold.name, *args, **kwargs)

    def __reduce__(self) -> Any:
        return partial, (_called, self._method, tuple(self._rref._hold.name))


def _called(method: str, name: tuple[int, int], /, *args: Any, **kwargs: Any) -> Any:
    bound = getattr(_value(Name(*name)), method)
    result = bound(*args, **kwargs)
    return Deferred(result, bound) if hasattr(bound, DEFERRED) else result


def _value(name: Name) -> Any:
    """A value that this worker owns; waits until it is there."""
    own = agent()
    value = own.values.at(name)
    if not value.is_ready:
        own.hand_over()
        if not value.wait(own.timeout or None):
            raise CallTimeout(f"{_said(name, own.id)} wasn't there after {own.timeout:g} s")
    return value.get()


def _said(name: Name, owner: int) -> str:
    return f"RRef({name.creator}.{name.number}, on worker {owner})"


def _arrived(creator: int, number: int, owner: int, counted: bool) -> RRef[Any]:
    own, name = agent(), Name(creator, number)
    if not counted:
        own.values.count(Change(name, own.id, 1))
    return RRef._of(own.hold(name, owner))
