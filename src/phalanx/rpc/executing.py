"""What a worker does for another: one function for each kind of request."""

from __future__ import annotations

import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.rpc import seam
from phalanx.rpc.arena import Copies
from phalanx.rpc.shipping import by_value
from phalanx.rpc.values import Change, Name, Value
from phalanx.rpc.wire import Kind, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.agent import Agent
    from phalanx.rpc.freight import Frames, Freight
    from phalanx.rpc.peer import Peer

__all__ = ["DEFERRED", "Deferred", "execute", "without_frames"]

DEFERRED = "_wrapped_async_rpc_function"
"""The mark of a function that returns a future of its result; PyTorch's, so that its own work."""


class Deferred:
    """A result that is still in a future."""

    def __init__(self, future: Any, what: object) -> None:
        if not isinstance(future, torch._C.Future):  # `then` returns the base class
            raise TypeError(
                f"{what} is marked with async_execution and returned {type(future).__name__}: "
                "expected a torch.futures.Future"
            )
        self.future: Any = future


def without_frames(error: BaseException) -> BaseException:
    """An exception that will be kept, and keeps nothing of what this thread worked on."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    traceback.clear_frames(error.__traceback__)
    return error


def execute(
    agent: Agent, freight: Freight, message: Message, peer: Peer, answer: Callable[[Frames], None]
) -> None:
    """Do what a message asks for, and answer it; an exception goes back too."""
    how = _HOW[message.kind]
    reply = _Reply(agent, freight, message, peer, answer)
    try:
        how(reply)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        reply.fail(error)


class _Reply:
    """A request, and the way back."""

    def __init__(
        self,
        agent: Agent,
        freight: Freight,
        message: Message,
        peer: Peer,
        answer: Callable[[Frames], None],
    ) -> None:
        self.agent, self.freight, self.message, self.peer = agent, freight, message, peer
        self._answer = answer
        self.grad = True
        """Whether who asked records what gradients need."""

    def content(self) -> Any:
        """What came with it."""
        message, self.message = self.message, self.message._replace(rows=[], payload=b"", here=[])
        return self.freight.unload(message, self.peer)

    def give(self, value: object) -> None:
        if self.agent.over:
            return
        head = self.agent.id, self.message.root, self.message.call
        with torch.set_grad_enabled(self.grad):
            (value,) = by_value((value,))
            later = Copies(self.agent.arena)
            frames = self.freight.load(
                Kind.RESULT, self.peer, *head, value, "the result", later=later
            )
            with later:
                self._answer(frames)

    def fail(self, error: BaseException) -> None:
        if self.message.kind in _SILENT or self.agent.over:
            return
        head = self.agent.id, self.message.root, self.message.call
        self._answer(self.freight.failure(error, self.peer, *head))

    def settle(self, get: Callable[[], Any]) -> None:
        """Answer with what a function returns or raises, in any thread."""
        with seam.on_behalf_of(self.message.root):
            try:
                self.give(get())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self.fail(error)


def _result(reply: _Reply) -> Any:
    """Call the function that came; nothing of its arguments is kept here."""
    function, args, kwargs, reply.grad = reply.content()
    with torch.set_grad_enabled(reply.grad):
        result = function(*args, **kwargs)
    if hasattr(function, DEFERRED):
        return Deferred(result, function)
    return result


def _call(reply: _Reply) -> None:
    result = _result(reply)
    if isinstance(result, Deferred):
        result.future.add_done_callback(lambda future: reply.settle(future.value))
    else:
        reply.give(result)


def _remote(reply: _Reply) -> None:
    name = Name(reply.message.source, reply.message.extra)
    value = reply.agent.values.at(name)
    reply.agent.values.count(Change(name, reply.message.source, 1))
    try:
        result = _result(reply)
    except BaseException as error:  # noqa: BLE001 - who asks for the value raises it
        value.settle(error=without_frames(error))
    else:
        if isinstance(result, Deferred):
            result.future.add_done_callback(partial(_settle_later, value))
        else:
            value.settle(result)
    reply.give(None)


def _settle_later(value: Value, future: torch.futures.Future[Any]) -> None:
    try:
        result = future.value()
    except BaseException as error:  # noqa: BLE001 - who asks for the value raises it
        value.settle(error=without_frames(error))
    else:
        value.settle(result)


def _fetch(reply: _Reply) -> None:
    creator, number = reply.content()
    value = reply.agent.values.at(Name(int(creator), int(number)))
    value.then(lambda: reply.settle(value.get))


def _count(reply: _Reply) -> None:
    (creator, number), holder, more = reply.content()
    # What isn't a number would stay in the table for ever.
    change = Change(Name(int(creator), int(number)), int(holder), int(more))
    reply.agent.values.count(change)


def _arrive(reply: _Reply) -> None:
    if (arrivals := reply.agent.arrivals) is None:
        raise RuntimeError("only worker 0 gathers the others")
    arrivals(reply.message.source, *reply.content(), reply.give, reply.fail)


def _leave(reply: _Reply) -> None:
    reply.peer.has_left = True
    reply.agent.lose(reply.peer, f"{reply.peer} has left RPC")


def _hello(reply: _Reply) -> None:
    reply.give(None)


def _return(reply: _Reply) -> None:
    for segment, block in reply.content():
        reply.agent.arena.take_back(int(segment), int(block), reply.message.source)


_SILENT = frozenset((Kind.COUNT, Kind.LEAVE, Kind.RETURN))
_HOW: dict[Kind, Callable[[_Reply], None]] = {
    Kind.CALL: _call,
    Kind.REMOTE: _remote,
    Kind.FETCH: _fetch,
    Kind.COUNT: _count,
    Kind.ARRIVE: _arrive,
    Kind.LEAVE: _leave,
    Kind.HELLO: _hello,
    Kind.RETURN: _return,
}
