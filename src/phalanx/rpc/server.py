"""The server side of a worker: connections from callers, and a handler for each kind of request."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from phalanx.errors import ArgumentTypeError, RemoteError, UsageError
from phalanx.rpc.agent import Agent
from phalanx.rpc.functions import ASYNC_EXECUTION_MARK, FutureResult
from phalanx.rpc.local_connection import Acceptor, LocalConnection
from phalanx.rpc.message import ANSWERS, Frames, Kind, Malformed, Message
from phalanx.rpc.peer import Peer
from phalanx.rpc.reference_counting import OwnedValue, RefCountDelta, RRefId
from phalanx.rpc.shared_memory import DeferredCopies

if TYPE_CHECKING:
    from phalanx.rpc.remote_connection import RemoteRouter

_LOG = logging.getLogger("phalanx.rpc")


class RpcServer:
    """The server side of a worker, until the agent closes.

    Args:
        agent: The agent of this worker.
        key: The key of the job.
        address: The address at which workers on this host connect.
    """

    def __init__(self, agent: Agent, key: bytes, address: str) -> None:
        self._agent, self._reactor = agent, agent.reactor
        self._acceptor = Acceptor(
            key, address, agent.reactor, self._add_connection, self._log_rejection
        )
        self._connections: dict[int, LocalConnection] = {}
        self._receiving = threading.Lock()
        """Held while messages of the router are received and what must keep their order is done."""
        self._has_rejected = False
        agent.on_close.append(self._close)

    def open(self) -> None:
        """Accept connections and requests once the agent has started."""
        self._acceptor.open()
        if self._agent.remote is not None:
            router = self._agent.remote.router
            self._reactor.watch(router.fd, partial(self._receive, router))
            self._reactor.watch(router.monitor_fd, partial(self._check_handshakes, router))

    def _close(self) -> None:
        self._acceptor.close()
        for connection in self._connections.values():
            connection.close()

    def _log_rejection(self) -> None:
        """Log that a connection was rejected; only the first one is logged."""
        if not self._has_rejected:
            self._has_rejected = True
            _LOG.warning(
                "worker %r rejected a connection without the job's key; further rejections are not "
                "logged",
                self._agent.info.name,
            )

    def _add_connection(self, connection: LocalConnection) -> None:
        self._connections[connection.fd] = connection
        self._reactor.watch(connection.fd, partial(self._read, connection))
        self._read(connection)  # before a death of the peer that this round of events may report

    def _read(self, connection: LocalConnection) -> None:
        messages = connection.read()
        if messages is None:
            self._reactor.unwatch(connection.fd)
            del self._connections[connection.fd]
            connection.close()
            return
        answer = partial(_reply, connection)
        self._submit(self._begin((answer, (each, [])) for each in messages))

    def _receive(self, router: RemoteRouter) -> None:
        # Several threads may do this at the same time, see `_send`.
        with self._receiving:
            messages = router.receive()
            handlers = self._begin(
                (partial(self._send, router, identity), frames) for identity, frames in messages
            )
        self._submit(handlers)
        if len(messages) == router.max_messages:
            self._reactor.submit(partial(self._receive, router))

    def _send(self, router: RemoteRouter, identity: bytes, frames: Frames) -> None:
        if router.send(identity, *frames):
            self._reactor.submit(partial(self._receive, router))

    def _check_handshakes(self, router: RemoteRouter) -> None:
        if router.has_event():
            self._log_rejection()

    def _begin(
        self, requests: Iterable[tuple[Callable[[Frames], None], Frames]]
    ) -> list[tuple[Kind, Callable[[], None]]]:
        """Begin requests, each with the function that sends its answer; return what handles them.

        Threads will take them from a queue in order, and may overtake one another then. So what
        must keep the order of its sender is done here: changes in references, the first one with
        the creation of a value. It runs no code of the user.
        """
        handlers: list[tuple[Kind, Callable[[], None]]] = []
        for answer, frames in requests:
            message = self._agent.parse(frames)
            if message is None:
                continue
            created = None
            if message.kind is Kind.REMOTE:
                rref_id = RRefId(message.source, message.extra)
                created = self._agent.owned_values.begin(rref_id, message.source)
            handle = partial(self._handle, answer, message, created)
            if message.kind is Kind.REF_COUNT:
                handle()
            else:
                handlers.append((message.kind, handle))
        return handlers

    def _submit(self, handlers: list[tuple[Kind, Callable[[], None]]]) -> None:
        """Queue what handles requests.

        The announcement that a worker leaves is handled at once: if its process has died since, the
        worker must not count as dead.
        """
        for kind, handle in handlers:
            if kind is Kind.LEAVE:
                handle()
        self._reactor.submit(*(handle for kind, handle in handlers if kind is not Kind.LEAVE))

    def _handle(
        self, answer: Callable[[Frames], None], message: Message, created: OwnedValue | None
    ) -> None:
        """Handle a request and send its answer; an exception is sent back too."""
        agent = self._agent
        if message.kind in ANSWERS:
            agent.log_malformed(Malformed("an answer in place of a request"))
            return
        agent.count_activity(message.kind)
        incoming, call = agent.call_log.incoming, (message.source, message.call)
        incoming[call] = time.monotonic()
        reply = _Reply(agent, message, agent.peers[message.source], answer, created)
        try:
            _HANDLERS[message.kind](reply)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            reply.send_exception(error)
        finally:
            incoming.pop(call, None)


def _reply(connection: LocalConnection, frames: Frames) -> None:
    with contextlib.suppress(OSError):  # the caller is gone
        connection.send_answer(frames[0])


class _Reply:
    """A request and the means to answer it."""

    def __init__(
        self,
        agent: Agent,
        message: Message,
        peer: Peer,
        answer: Callable[[Frames], None],
        created: OwnedValue | None,
    ) -> None:
        self.agent, self.message, self.peer, self._answer = agent, message, peer, answer
        self.created = created
        """The value that the request creates."""
        self.grad = True
        """True if the caller records gradients."""

    def body(self) -> Any:
        """Return the content of the request, which is then no longer kept here."""
        message, self.message = (
            self.message,
            self.message._replace(descriptors=[], payload=b"", inline_data=[]),
        )
        return self.agent.codec.decode(message, self.peer)

    def send_result(self, value: object) -> None:
        if self.agent.is_closed:
            return
        with torch.set_grad_enabled(self.grad):
            copies = DeferredCopies()
            frames = self.agent.codec.encode(
                Kind.RESULT, self.peer, self.message.call, value, "the result", copies=copies
            )
            with copies:
                self._answer(frames)

    def send_exception(self, error: BaseException) -> None:
        if self.message.kind not in _SILENT and not self.agent.is_closed:
            codec = self.agent.codec
            self._answer(codec.encode_exception(error, self.peer, self.message.call))

    def answer_with(self, get: Callable[[], Any]) -> None:
        """Answer with the result of `get`, or the exception that it raises, in any thread."""
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
    value, reply.created = cast(OwnedValue, reply.created), None
    value.complete(partial(_run_function, reply))
    del value  # its creator may have released it meanwhile
    reply.send_result(None)


def _fetch(reply: _Reply) -> None:
    created_on, local_id = reply.body()
    value = reply.agent.owned_values.get_or_create(RRefId(int(created_on), int(local_id)))
    # The value keeps its callbacks: a callback that kept the value too would be a reference cycle.
    value.add_done_callback(lambda done: reply.answer_with(cast(OwnedValue, done).get))


def _apply_ref_count(reply: _Reply) -> None:
    (created_on, local_id), holder, amount = reply.body()
    # An id of anything but numbers would stay in the table forever.
    delta = RefCountDelta(RRefId(int(created_on), int(local_id)), int(holder), int(amount))
    # The end of a value may run the user's code, which must not delay what arrives.
    released = [reply.agent.owned_values.apply(delta)]
    if released[0] is not None:
        reply.agent.reactor.submit(released.clear)


def _arrive(reply: _Reply) -> None:
    if (on_arrival := reply.agent.on_arrival) is None:
        raise RuntimeError("only worker 0 has a barrier")
    on_arrival(reply.message.source, *reply.body(), reply.send_result, reply.send_exception)


def _leave(reply: _Reply) -> None:
    reply.peer.has_left = True
    reply.agent.mark_lost(reply.peer, f"{reply.peer} left RPC")


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
    Kind.HELLO: lambda reply: reply.send_result(None),
    Kind.FREE_BLOCKS: _reclaim_blocks,
}
