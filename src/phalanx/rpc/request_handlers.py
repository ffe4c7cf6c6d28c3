"""Request handlers: one function for each kind of request."""

from __future__ import annotations

import logging
import traceback
import types
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import ArgumentTypeError, RemoteError, UsageError
from phalanx.rpc.codec.message import Kind, Message
from phalanx.rpc.owned_values import OwnedValue, RefCountDelta, RRefId
from phalanx.rpc.root_worker import set_root_worker
from phalanx.rpc.shared_memory.sender import DeferredCopies

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.rpc.agent import Agent
    from phalanx.rpc.codec.message_codec import Frames, MessageCodec
    from phalanx.rpc.peer import Peer

_LOG = logging.getLogger("phalanx.rpc")

__all__ = ["ASYNC_EXECUTION_MARK", "FutureResult", "clear_frames", "handle_request"]

ASYNC_EXECUTION_MARK = "_wrapped_async_rpc_function"
"""The mark of a function that returns a future of its result.

It is PyTorch's, so that functions which PyTorch's decorator has marked work too.
"""


class FutureResult:
    """A result that a future will hold."""

    def __init__(self, future: Any, function: object) -> None:
        if not isinstance(future, torch._C.Future):  # `then` returns the base class
            expected = "Functions decorated with @rpc.async_function must return a "
            if isinstance(getattr(function, ASYNC_EXECUTION_MARK, None), torch.jit.ScriptFunction):
                expected = "Async functions must return an IValue of Future type, but got "
            else:
                expected += "torch.futures.Future object, but got "
            raise ArgumentTypeError(f"{expected}{type(future).__name__} from {function}")
        self.future: Any = future


def clear_frames(error: BaseException) -> BaseException:
    """Return an exception that will be kept, after clearing the frames of its traceback.

    Otherwise it would keep alive the objects that this thread worked on.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    traceback.clear_frames(error.__traceback__)
    return error


def handle_request(
    agent: Agent,
    codec: MessageCodec,
    message: Message,
    peer: Peer,
    answer: Callable[[Frames], None],
) -> None:
    """Handle a request and send its answer; an exception is sent back too."""
    handler = _HANDLERS[message.kind]
    reply = _Reply(agent, codec, message, peer, answer)
    try:
        handler(reply)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        reply.send_exception(error)


class _Reply:
    """A request and the means to answer it."""

    def __init__(
        self,
        agent: Agent,
        codec: MessageCodec,
        message: Message,
        peer: Peer,
        answer: Callable[[Frames], None],
    ) -> None:
        self.agent, self.codec, self.message, self.peer = agent, codec, message, peer
        self._answer = answer
        self.grad = True
        """True if the caller records gradients."""

    def body(self) -> Any:
        """Return the content of the request, which is then no longer kept here."""
        message, self.message = (
            self.message,
            self.message._replace(descriptors=[], payload=b"", inline_data=[]),
        )
        return self.codec.decode(message, self.peer)

    def send_result(self, value: object) -> None:
        if self.agent.is_closed:
            return
        head = self.agent.id, self.message.root, self.message.call
        with torch.set_grad_enabled(self.grad):
            copies = DeferredCopies(self.agent.shm_sender)
            frames = self.codec.encode(
                Kind.RESULT, self.peer, *head, value, "the result", copies=copies
            )
            with copies:
                self._answer(frames)

    def send_exception(self, error: BaseException) -> None:
        if self.message.kind in _SILENT or self.agent.is_closed:
            return
        head = self.agent.id, self.message.root, self.message.call
        self._answer(self.codec.encode_exception(error, self.peer, *head))

    def answer_with(self, get: Callable[[], Any]) -> None:
        """Answer with the result of `get`, or the exception that it raises, in any thread."""
        with set_root_worker(self.message.root):
            try:
                self.send_result(get())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                self.send_exception(error)


def _run_function(reply: _Reply) -> Any:
    """Call the requested function; none of its arguments are kept here."""
    try:
        function, args, kwargs, reply.grad = reply.body()
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"the call cannot be loaded on {reply.agent.info}: {error}. RPC pickler does not "
            "serialize the code of importable functions and classes: ensure that their modules are "
            "the same on both workers"
        ) from error
    try:
        with torch.set_grad_enabled(reply.grad):
            result = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        # The caller may never look at the exception.
        _LOG.warning("On %s: a call of %s raised", reply.agent.info, reply.peer, exc_info=True)
        raise _to_torch_error(error, function) from None
    if hasattr(function, ASYNC_EXECUTION_MARK):
        return FutureResult(result, function)
    return result


def _to_torch_error(error: Exception, function: object) -> Exception:
    """Return the exception for the caller, of the type that PyTorch's RPC gives it."""
    if isinstance(error, torch.jit.Error):
        return RemoteError(str(error)).with_traceback(error.__traceback__)
    if isinstance(error, TypeError) and isinstance(function, types.BuiltinFunctionType):
        function_name = function.__name__
        if vars(torch).get(function_name) is function:
            text = "Overloaded torch operator invoked from Python failed to match any schema"
            wrapped = ArgumentTypeError(f"{text}: torch.{function_name}: {error}")
            return wrapped.with_traceback(error.__traceback__)
    return error


def _call(reply: _Reply) -> None:
    result = _run_function(reply)
    if isinstance(result, FutureResult):
        result.future.add_done_callback(lambda future: reply.answer_with(future.value))
    else:
        reply.send_result(result)


def _remote(reply: _Reply) -> None:
    rref_id = RRefId(reply.message.source, reply.message.extra)
    value = reply.agent.owned_values.get_or_create(rref_id)
    reply.agent.owned_values.apply(RefCountDelta(rref_id, reply.message.source, 1))
    try:
        result = _run_function(reply)
    except BaseException as error:  # noqa: BLE001 - raised when the value is fetched
        value.complete(error=clear_frames(error))
    else:
        if isinstance(result, FutureResult):
            result.future.add_done_callback(partial(_complete_later, value))
        else:
            value.complete(result)
    reply.send_result(None)


def _complete_later(value: OwnedValue, future: torch.futures.Future[Any]) -> None:
    try:
        result = future.value()
    except BaseException as error:  # noqa: BLE001 - raised when the value is fetched
        value.complete(error=clear_frames(error))
    else:
        value.complete(result)


def _fetch(reply: _Reply) -> None:
    created_on, local_id = reply.body()
    value = reply.agent.owned_values.get_or_create(RRefId(int(created_on), int(local_id)))
    value.then(lambda: reply.answer_with(value.get))


def _apply_ref_count(reply: _Reply) -> None:
    (created_on, local_id), holder, amount = reply.body()
    # An id of anything but numbers would stay in the table forever.
    delta = RefCountDelta(RRefId(int(created_on), int(local_id)), int(holder), int(amount))
    reply.agent.owned_values.apply(delta)


def _arrive(reply: _Reply) -> None:
    if (on_arrival := reply.agent.on_arrival) is None:
        raise RuntimeError("only worker 0 has a barrier")
    on_arrival(reply.message.source, *reply.body(), reply.send_result, reply.send_exception)


def _leave(reply: _Reply) -> None:
    reply.peer.has_left = True
    reply.agent.mark_lost(reply.peer, f"{reply.peer} left RPC")


def _hello(reply: _Reply) -> None:
    reply.send_result(None)


def _reclaim_blocks(reply: _Reply) -> None:
    for segment, block in reply.body():
        reply.agent.shm_sender.reclaim(int(segment), int(block), reply.message.source)


_SILENT = frozenset((Kind.REF_COUNT, Kind.LEAVE, Kind.FREE_BLOCKS))
_HANDLERS: dict[Kind, Callable[[_Reply], None]] = {
    Kind.CALL: _call,
    Kind.REMOTE: _remote,
    Kind.FETCH: _fetch,
    Kind.REF_COUNT: _apply_ref_count,
    Kind.ARRIVE: _arrive,
    Kind.LEAVE: _leave,
    Kind.HELLO: _hello,
    Kind.FREE_BLOCKS: _reclaim_blocks,
}
