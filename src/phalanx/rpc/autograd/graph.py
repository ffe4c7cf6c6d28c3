"""The autograd graph of this worker, and the calls between the graphs of workers."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from phalanx.errors import PhalanxError, RemoteError, UsageError
from phalanx.rpc import calls
from phalanx.rpc.agent import PendingCall, agent, agent_or_none
from phalanx.rpc.autograd.gradients import (
    AccumulatedParameters,
    Contexts,
    GradientAttributes,
    Gradients,
    Root,
    ensure_owned,
)
from phalanx.rpc.autograd.nodes import (
    ANCHOR,
    AutogradMetadata,
    RecvRpcBackward,
    SendHandles,
    SharedTensor,
    Source,
    leaves,
    make_handle,
    pack_metadata,
    read_number,
    receive,
    receive_own,
    sources,
    unpack_metadata,
)
from phalanx.torch_versions import backward_id, call_after_backward, keeps_graph

# Seconds to wait for further releases before a batch is sent.
_BATCH_SECONDS = 0.01
_LOG = logging.getLogger("phalanx.rpc")


class PeerGraphs:
    """The connection between the graphs of workers; each method is a call to the peer's graph."""

    def begin_backward(self, peer: int, request: BackwardRequest) -> PendingCall:
        """Call the peer's `backward` without waiting for its answer."""
        return calls.begin(peer, _backward, request.to_plain())

    def has_context(self, peer: int, number: int) -> bool:
        """Return whether the peer exists and has this context open; block until it answers."""
        if peer not in agent().peers:
            return False
        answer: bool = calls.rpc_sync(peer, _has_context, (number,))
        return answer

    def release(self, peer: int, numbers: list[int]) -> None:
        """Call the peer's `release` without waiting; do nothing if it is unreachable."""
        try:
            calls.rpc_async(peer, _release, (numbers,))
        except (PhalanxError, UsageError):
            # The peer is dead, or this worker is leaving: nothing is kept for it any more.
            _LOG.debug("worker %d was not notified of released messages", peer, exc_info=True)


class AutogradGraph:
    """The `AutogradHook` of a worker, and its side of backward passes across calls.

    The values of a tensor that requires gradients are sent, and the sender keeps a handle. At the
    receiver the tensor is an output of a node whose backward pass calls the sender, which continues
    from the handle. Each message also carries the dependencies of its tensors (`sources`). So a
    graph that leaves a process and returns to it is one graph there, and each node waits for all
    of its gradients.
    """

    def __init__(self, worker: int, peer_graphs: PeerGraphs) -> None:
        self._worker = worker
        self._peer_graphs = peer_graphs
        self._numbers = itertools.count(1)
        self._orders = itertools.count()
        self._received: set[tuple[int, int]] = set()
        self.send_handles = SendHandles()
        self.gradients = Gradients()
        self.attributes = GradientAttributes()
        self.accumulated_parameters = AccumulatedParameters()
        self.contexts = Contexts(worker)
        self._releases = Releases(peer_graphs.release)
        self._thread = _Thread()

    @property
    def root(self) -> Root:
        """The root of a backward pass that begins in this thread."""
        return self.contexts.root

    def root_of(self, number: object) -> Root:
        """Return the root of the backward passes in a context.

        If another worker opened the context, blocks until that worker has answered whether it is
        still open.

        Args:
            number: The context's number; 0 for this worker's passes outside any context.

        Raises:
            UsageError: No worker has such a context open.
        """
        if isinstance(number, int) and 0 <= number < 2**63:
            root = self.contexts.root_of(number)
            if root.worker == self._worker:
                is_open = not number or self.contexts.is_open(number)
            else:
                is_open = self._peer_graphs.has_context(root.worker, number)
            if is_open:
                return root
        raise UsageError(
            f"Could not find autograd context with id: {number!r}. No worker has such a context "
            "open: pass the id that `with context() as context_id` returns, within that block"
        )

    @property
    def pending(self) -> int:
        """The number of sent messages with handles and of received messages with a node."""
        return len(self.send_handles) + len(self._received)

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:
        """Prepare the tensors of a message to a peer.

        Returns:
            The detached tensors, and the packed metadata; empty if no tensor requires a gradient.
        """
        detached = [tensor.detach() for tensor in tensors]
        indices = tuple(at for at, tensor in enumerate(tensors) if tensor.requires_grad)
        if not indices or not torch.is_grad_enabled():
            return detached, b""
        number = next(self._numbers)
        handles = {index: make_handle(tensors[index]) for index in indices}
        dependencies = sources(handles.values(), peer) if self._received else ()
        self.send_handles.keep(peer, number, handles)
        return detached, pack_metadata(AutogradMetadata(number, indices, dependencies))

    def cancel(self, packed: bytes) -> None:
        """Free the handles of a message that was not sent, given its metadata."""
        if packed:
            self.send_handles.release(read_number(packed))

    def receive(self, peer: int, tensors: list[Tensor], packed: bytes) -> list[Tensor]:
        """Return the tensors of a peer's message.

        If grad mode is enabled, the tensors listed in the metadata require gradients.

        Raises:
            ValueError: The metadata is malformed.
        """
        if not packed:
            return tensors
        metadata = unpack_metadata(packed, len(tensors))
        incoming = [tensors[at] for at in metadata.indices]
        if peer == self._worker:
            # A call to this worker itself is part of the same graph.
            handles = self.send_handles.take(peer, metadata.number, metadata.indices, keep=False)
            outputs = receive_own(incoming, handles)
        elif torch.is_grad_enabled():
            outputs = self._attach(peer, metadata, incoming)
        else:
            self._releases.start()
            self._releases.add(peer, metadata.number)
            return tensors
        result = list(tensors)
        for at, tensor in zip(metadata.indices, outputs, strict=True):
            result[at] = tensor
        return result

    def share(self, peer: int, tensor: Tensor) -> int:
        """Keep a handle of a tensor that a peer reads in this worker's memory; return its number.

        The peer releases it (`release`).
        """
        number = next(self._numbers)
        with torch.enable_grad():
            self.send_handles.keep(peer, number, {0: make_handle(tensor)})
        return number

    def is_shared(self, number: int) -> bool:
        """Return whether the peer still uses a handle that `share` returned."""
        return self.send_handles.get(Source(self._worker, number, 0)) is not None

    def receive_shared(self, peer: int, number: int, values: Tensor) -> SharedTensor:
        """Return a tensor that this worker reads in a peer's memory, given the handle's number."""
        self._releases.start()
        self._received.add((peer, number))
        return SharedTensor(self, peer, number, values)

    def release_shared(self, shared: SharedTensor) -> None:
        """Release the peer's handle of a shared tensor."""
        self._received.discard((shared.peer, shared.number))
        self._releases.add(shared.peer, shared.number)

    def next_order(self) -> int:
        """Return the index of a new node among the nodes of this process."""
        return next(self._orders)

    def _attach(
        self, peer: int, metadata: AutogradMetadata, tensors: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return tensors as outputs of a node whose inputs are this worker's own handles."""
        own_handles = {
            source: saved
            for source in metadata.dependencies
            if source.owner == self._worker and (saved := self.send_handles.get(source)) is not None
        }
        self._releases.start()
        self._received.add((peer, metadata.number))
        recv = RecvRpcBackward(self, peer, metadata, tuple(own_handles), self.next_order())
        return receive(recv, tensors, list(own_handles.values()))

    def propagate(
        self, recv: RecvRpcBackward, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Send gradients of tensors to their sender, which continues the backward pass from there.

        Runs in the thread of the backward pass. If the node has inputs, blocks until their
        gradients have returned. Otherwise the call runs concurrently with the rest of the backward
        pass, which waits for it at its end.

        Returns:
            The gradients of `recv.local_sources`.
        """
        received = {
            index: gradient
            for index, gradient in zip(recv.metadata.indices, gradients, strict=True)
            if gradient is not None
        }
        remote_backward = self._thread.remote_backward
        if remote_backward is not None and remote_backward.stops_at(recv):
            for index, gradient in received.items():
                remote_backward.collect(Source(recv.peer, recv.metadata.number, index), gradient)
            received = {}
        if not received:
            return [None] * len(recv.local_sources)
        request = self._request(recv, received, remote_backward)
        pending = self._peer_graphs.begin_backward(recv.peer, request)
        if recv.local_sources:
            return self._finish(recv, request, pending.wait(), remote_backward)

        def finish() -> None:
            self._finish(recv, request, pending.wait(), remote_backward)

        call_after_backward(finish)
        return []

    def release_received(self, recv: RecvRpcBackward) -> None:
        """Release the message of a node that has been freed."""
        self._received.discard((recv.peer, recv.metadata.number))
        if recv.unfinished:
            self._releases.add(recv.peer, recv.metadata.number)

    def backward(self, request: BackwardRequest) -> BackwardResponse | None:
        """Continue a caller's backward pass from the tensors that this worker sent to it.

        Blocks until the pass has finished here and on the workers that it reaches from here.

        Returns:
            The response, or None instead of an empty one: an answer of None takes no pickle.

        Raises:
            RuntimeError: The graph has been freed, or the backward pass raised it.
        """
        indices = list(request.gradients)
        handles = self.send_handles.take(
            request.caller, request.number, indices, request.retain_graph
        )
        gradients = list(request.gradients.values())
        self.gradients.drop_contexts(request.root.worker, request.oldest_context)
        remote_backward = RemoteBackward(request)
        released: list[int] = []
        # Backward passes in this thread are now part of this one; None: a new one of this worker.
        saved, self._thread.remote_backward = self._thread.remote_backward, remote_backward
        try:
            if request.root == Root(self._worker):
                torch.autograd.backward(handles, gradients, retain_graph=True)
            else:
                self._backward_by_root(request, handles, gradients)
        finally:
            self._thread.remote_backward = saved
        with self._releases.capture(request.caller, released):
            # Frees the graph, unless something else holds it.
            handles.clear()
        if not (remote_backward.gradients or released):
            return None
        return BackwardResponse(remote_backward.gradients, released)

    def release(self, numbers: list[int]) -> None:
        """Free the handles of messages on which nothing at the receiver depends any more."""
        for number in numbers:
            self.send_handles.release(number)

    def forget(self, peer: int) -> None:
        """Free everything kept for a peer that has died."""
        self.send_handles.forget(peer)
        self.gradients.forget(peer)

    def close(self) -> None:
        """Stop notifying other workers of releases."""
        self._releases.close()

    def _request(
        self,
        recv: RecvRpcBackward,
        received: dict[int, Tensor],
        remote_backward: RemoteBackward | None,
    ) -> BackwardRequest:
        root = self.root
        mine = BackwardRequest(
            self._worker,
            recv.metadata.number,
            received,
            root,
            backward_id(),
            (recv.order,),
            frozenset(recv.local_sources),
            # All uses of a shared tensor have one handle.
            recv.shared is not None or keeps_graph(),
            self.contexts.oldest_context if root.worker == self._worker else 0,
        )
        if remote_backward is None:
            return mine
        outer = remote_backward.request
        return mine._replace(
            root=outer.root,
            task=outer.task,
            path=outer.path + mine.path,
            stop=outer.stop | mine.stop,
            # Another part of the pass may come this way again. The receiver's graph, when freed,
            # releases the handles.
            retain_graph=True,
            oldest_context=outer.oldest_context,
        )

    def _finish(
        self,
        recv: RecvRpcBackward,
        request: BackwardRequest,
        answer: BackwardResponse | None,
        remote_backward: RemoteBackward | None,
    ) -> list[Tensor | None]:
        if not request.retain_graph:
            recv.unfinished.difference_update(request.gradients)
        if answer is None:
            return [None] * len(recv.local_sources)
        self.release(answer.released)
        inputs = [answer.gradients.pop(source, None) for source in recv.local_sources]
        if remote_backward is not None:
            for source, gradient in answer.gradients.items():
                remote_backward.collect(source, gradient)
        return inputs

    def _backward_by_root(
        self, request: BackwardRequest, handles: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Run a backward pass that keeps gradients of parameters by root instead of in `grad`."""
        parameters = leaves(handles, request.stop)
        *outputs, _ = torch.autograd.grad(
            handles, [*parameters, ANCHOR], gradients, retain_graph=True, allow_unused=True
        )
        if pairs := self.accumulated_parameters.add(ensure_owned(parameters, outputs)):
            self.gradients.add(request.root, request.task, request.path, pairs)


class BackwardRequest(NamedTuple):
    """A request to a worker to continue a backward pass from tensors that it has sent.

    Attributes:
        caller: The id of the worker that makes the request and had received the tensors.
        number: The number of the message that carried the tensors.
        gradients: The gradients of the tensors, by index in the message.
        root: The root for which gradients of parameters are kept.
        task: The backward pass, as a number unique at the root's worker.
        path: The nodes that the pass has traversed, from the root's worker to the caller.
        stop: Tensors whose gradients are sent back, because a worker on the path continues from
            them itself.
        retain_graph: Whether to keep the graph for another backward pass.
        oldest_context: The lowest number of a context that may be open at the root's worker.
    """

    caller: int
    number: int
    gradients: dict[int, Tensor]
    root: Root
    task: int
    path: tuple[int, ...]
    stop: frozenset[Source]
    retain_graph: bool
    oldest_context: int

    def to_plain(self) -> tuple[Any, ...]:
        """Return the request as plain values, which are pickled several times as fast."""
        stop = tuple(map(tuple, self.stop))
        return tuple(self._replace(root=tuple(self.root), stop=stop))  # type: ignore[arg-type]

    @classmethod
    def from_plain(cls, values: tuple[Any, ...]) -> BackwardRequest:
        """Return a request, given its plain values."""
        request = cls._make(values)
        stop = frozenset(map(Source._make, request.stop))
        return request._replace(root=Root._make(request.root), stop=stop)


class BackwardResponse(NamedTuple):
    """The answer to a request.

    Attributes:
        gradients: The gradients of tensors in the request's `stop`.
        released: The numbers of the caller's messages on which nothing at the answering worker
            depends any more.
    """

    gradients: dict[Source, Tensor]
    released: list[int]


@dataclass
class RemoteBackward:
    """The part of a backward pass that one request started, in the thread that executes it."""

    request: BackwardRequest
    gradients: dict[Source, Tensor] = field(default_factory=dict)

    def stops_at(self, recv: RecvRpcBackward) -> bool:
        """Return whether gradients of the tensors of a node are sent back."""
        number = recv.metadata.number
        return any(one.owner == recv.peer and one.number == number for one in self.request.stop)

    def collect(self, source: Source, gradient: Tensor) -> None:
        """Add a gradient that is sent back; gradients from several paths are summed."""
        present = self.gradients.get(source)
        self.gradients[source] = gradient if present is None else present + gradient


class _Thread(threading.local):
    remote_backward: RemoteBackward | None = None


class Releases:
    """A collector of released messages, whose thread notifies the senders in batches.

    A graph is freed wherever its last reference is dropped, even in the garbage collector, where
    no lock may be taken and nothing may be sent.

    Args:
        send: A function that sends a peer the numbers of its released messages. It may block and
            must not raise.
    """

    def __init__(self, send: Callable[[int, list[int]], None]) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._captured = _Captured()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, peer: int, number: int) -> None:
        """Record that nothing depends any more on a message of a peer."""
        if self._captured.messages is None:
            self._queue.put((peer, number))
        else:
            self._captured.messages.append((peer, number))

    def start(self) -> None:
        """Start the thread, once; called before the first release can occur."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="phalanx-rpc-releases", daemon=True
                    )
                    self._thread.start()

    def close(self) -> None:
        """Stop sending notifications; block until the thread has ended."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def capture(self, peer: int, numbers: list[int]) -> Iterator[None]:
        """Collect this thread's releases of a peer's messages in `numbers`, to go with a reply.

        Releases for other peers are queued on exit.
        """
        messages: list[tuple[int, int]] = []
        self._captured.messages = messages
        try:
            yield
        finally:
            self._captured.messages = None
            for to, number in messages:
                if to == peer:
                    numbers.append(number)
                else:
                    self._queue.put((to, number))

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            by_peer: defaultdict[int, list[int]] = defaultdict(list)
            release: tuple[int, int] | None = first
            while release is not None:
                by_peer[release[0]].append(release[1])
                try:
                    release = self._queue.get(timeout=_BATCH_SECONDS)
                except queue.Empty:
                    break
            for peer, numbers in by_peer.items():
                self._send(peer, numbers)
            if release is None:
                return


class _Captured(threading.local):
    messages: list[tuple[int, int]] | None = None


def graph() -> AutogradGraph:
    """Return the graph of this worker.

    Raises:
        UsageError: This process is not a worker.
    """
    return cast("AutogradGraph", agent().autograd_hook)


def _backward(*values: Any) -> BackwardResponse | None:
    try:
        return graph().backward(BackwardRequest.from_plain(values))
    except (PhalanxError, UsageError):  # raised by a worker further along, or for a lost one
        raise
    except Exception as error:
        text = f"Error on Node {agent().id}: {error}"
        raise RemoteError(f"{text} ({type(error).__name__} in a backward pass)") from error


def _has_context(number: int) -> bool:
    return graph().contexts.is_open(number)


def _release(numbers: list[int]) -> None:
    if agent_or_none() is not None:
        graph().release(numbers)
