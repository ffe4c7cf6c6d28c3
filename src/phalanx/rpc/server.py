"""The server side of a worker: authentication of callers, and a handler for each kind of request.

A thread that executes a request works on behalf of a root worker: the one that made the outermost
of the nested calls in progress.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
import types
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from phalanx.errors import ArgumentTypeError, RemoteError, UsageError
from phalanx.rpc.codec.message import ANSWERS, Kind, Malformed, Message, parse
from phalanx.rpc.functions import ASYNC_EXECUTION_MARK, FutureResult
from phalanx.rpc.reference_counting import OwnedValue, RefCountDelta, RRefId
from phalanx.rpc.shared_memory import DeferredCopies
from phalanx.rpc.transport.auth import Acceptor
from phalanx.rpc.transport.local import LocalConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.rpc.call_log import CallLog
    from phalanx.rpc.codec.message import Frames
    from phalanx.rpc.event_loop.reactor import Reactor
    from phalanx.rpc.message_codec import MessageCodec
    from phalanx.rpc.peer import Peer
    from phalanx.rpc.reference_counting import OwnedValues
    from phalanx.rpc.shared_memory import ShmSender
    from phalanx.rpc.transport.remote import RemoteRouter
    from phalanx.rpc.workers import WorkerInfo

__all__ = ["RpcServer", "ServerAgent", "clear_frames", "get_root_worker", "set_root_worker"]

_LOG = logging.getLogger("phalanx.rpc")


class ServerAgent(Protocol):
    """The part of a worker's agent that its server uses."""

    info: WorkerInfo
    id: int
    peers: list[Peer]
    codec: MessageCodec
    shm_sender: ShmSender
    owned_values: OwnedValues
    call_log: CallLog
    on_arrival: Callable[..., None] | None
    is_closed: bool

    def count_activity(self, kind: Kind) -> None:
        """Count a call that is made or executed; other kinds of messages are not counted."""
        ...

    def mark_lost(self, peer: Peer, reason: str) -> None:
        """Mark a worker as lost, so that pending and later calls fail with the reason."""
        ...


class RpcServer:
    """The server side of a worker.

    Args:
        agent: The agent of this worker.
        key: The key of the job.
        address: The address at which workers on this host connect.
        reactor: The event loop.
    """

    def __init__(self, agent: ServerAgent, key: bytes, address: str, reactor: Reactor) -> None:
        self._agent, self._reactor = agent, reactor
        self._acceptor = Acceptor(key, address, self.log_rejection)
        self._connections: dict[int, LocalConnection] = {}
        self._has_rejected = self._has_dropped = False

    def open(self, router: RemoteRouter | None) -> None:
        """Start to accept connections and requests.

        Args:
            router: The socket for workers on other hosts; None if there are none.
        """
        self._reactor.watch(self._acceptor.fd, self._accept)
        if router is not None:
            self._reactor.watch(router.fd, partial(self._receive, router))
            self._reactor.watch(router.monitor_fd, partial(self._check_handshakes, router))

    def close(self) -> None:
        """Close all connections from workers on this host."""
        self._acceptor.close()
        for connection in self._connections.values():
            connection.close()

    def log_rejection(self) -> None:
        """Log that a connection was rejected; only the first one is logged."""
        if not self._has_rejected:
            self._has_rejected = True
            _LOG.warning(
                "worker %r rejected a connection without the job's key; further rejections are not "
                "logged",
                self._agent.info.name,
            )

    def log_malformed(self, error: Malformed) -> None:
        """Log a malformed message; only the first one is logged."""
        if not self._has_dropped:
            self._has_dropped = True
            _LOG.warning(
                "worker %r dropped a malformed message: %s; further ones are not logged",
                self._agent.info.name,
                error,
            )

    def _accept(self) -> None:
        for fd in self._acceptor.accept():
            self._reactor.watch(fd, partial(self._authenticate, fd))
        for fd in self._acceptor.find_excess():
            self._reactor.unwatch(fd)
            self._acceptor.reject(fd)

    def _authenticate(self, fd: int) -> None:
        connection = self._acceptor.authenticate(fd)
        if connection is True:
            return
        self._reactor.unwatch(fd)
        if isinstance(connection, LocalConnection):
            self._connections[fd] = connection
            self._reactor.watch(fd, partial(self._read, connection))
        else:
            self._acceptor.reject(fd)

    def _read(self, connection: LocalConnection) -> None:
        messages = connection.read()
        if messages is None:
            self._reactor.unwatch(connection.fd)
            del self._connections[connection.fd]
            connection.close()
            return
        answer = partial(_reply, connection)
        self._reactor.submit(*(partial(self._handle, answer, (each, [])) for each in messages))

    def _receive(self, router: RemoteRouter) -> None:
        messages = router.receive()
        self._reactor.submit(
            *(
                partial(self._handle, partial(self._send, router, identity), frames)
                for identity, frames in messages
            )
        )
        if len(messages) == router.max_messages:
            self._reactor.submit(partial(self._receive, router))

    def _send(self, router: RemoteRouter, identity: bytes, frames: Frames) -> None:
        if router.send(identity, *frames):
            self._reactor.submit(partial(self._receive, router))

    def _check_handshakes(self, router: RemoteRouter) -> None:
        if router.has_event():
            self.log_rejection()

    def _handle(self, answer: Callable[[Frames], None], frames: Frames) -> None:
        try:
            message = parse(*frames, len(self._agent.peers))
            if message.kind in ANSWERS:
                raise Malformed("an answer in place of a request")
        except Malformed as error:
            self.log_malformed(error)
            return
        agent = self._agent
        agent.count_activity(message.kind)
        incoming, call = agent.call_log.incoming, (message.source, message.call)
        incoming[call] = time.monotonic()
        try:
            with set_root_worker(message.root):
                _handle_request(agent, message, agent.peers[message.source], answer)
        finally:
            incoming.pop(call, None)


def _reply(connection: LocalConnection, frames: Frames) -> None:
    with contextlib.suppress(OSError):  # the caller is gone
        connection.send_answer(frames[0])


def clear_frames(error: BaseException) -> BaseException:
    """Return an exception that will be kept, after clearing the frames of its traceback.

    Otherwise it would keep alive the objects that this thread worked on.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    traceback.clear_frames(error.__traceback__)
    return error


def _handle_request(
    agent: ServerAgent, message: Message, peer: Peer, answer: Callable[[Frames], None]
) -> None:
    """Handle a request and send its answer; an exception is sent back too."""
    handler = _HANDLERS[message.kind]
    reply = _Reply(agent, message, peer, answer)
    try:
        handler(reply)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        reply.send_exception(error)


class _Reply:
    """A request and the means to answer it."""

    def __init__(
        self,
        agent: ServerAgent,
        message: Message,
        peer: Peer,
        answer: Callable[[Frames], None],
    ) -> None:
        self.agent, self.codec, self.message, self.peer = agent, agent.codec, message, peer
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
            copies = DeferredCopies()
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


class _ThreadLocal(threading.local):
    root: int | None = None


_thread_local = _ThreadLocal()


def get_root_worker() -> int | None:
    """Return the id of the worker on whose behalf this thread works; None if it is this worker."""
    return _thread_local.root


@contextmanager
def set_root_worker(root: int) -> Iterator[None]:
    """Make this thread work on behalf of the worker `root` within the context."""
    saved, _thread_local.root = _thread_local.root, root
    try:
        yield
    finally:
        _thread_local.root = saved
