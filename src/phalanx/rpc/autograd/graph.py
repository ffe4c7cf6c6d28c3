"""The graph of a worker, tied to those of others: what leaves, what comes, what comes back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from phalanx.rpc.autograd import note as notes
from phalanx.rpc.autograd.contexts import Contexts
from phalanx.rpc.autograd.gradients import Gradients, Mixed, Root
from phalanx.rpc.autograd.note import Note, Source
from phalanx.rpc.autograd.received import ANCHOR, Origin, receive, receive_own
from phalanx.rpc.autograd.releases import Releases
from phalanx.rpc.autograd.running import Answer, Request, Run, current
from phalanx.rpc.autograd.sent import Sent, handle
from phalanx.rpc.autograd.walk import leaves, sources

__all__ = ["AutogradGraph", "Transport"]


class Coming(Protocol):
    """The answer to a call that goes on meanwhile."""

    def wait(self) -> Answer:
        """Block until it is there; raises what the call raised."""
        ...


class Transport(Protocol):
    """How the graphs of workers reach one another; each method is a call to the peer's graph."""

    def backward(self, peer: int, request: Request) -> Answer:
        """Have the peer's `backward` called; blocks until it answers."""
        ...

    def begin_backward(self, peer: int, request: Request) -> Coming:
        """Have it called, and return at once."""
        ...

    def release(self, peer: int, numbers: list[int]) -> None:
        """Have the peer's `released` called, as soon as may be; nothing if it can't be reached."""
        ...


class AutogradGraph:
    """What `phalanx.rpc.calls` asks when tensors leave and come, so that gradients find back.

    A tensor that requires gradients leaves as its values, and a handle stays here. Where it comes
    it is an output of a node, whose backward pass is a call back to here: it goes on from the
    handle. What depends on what is told along with each message (`sources`), so that a graph that
    leaves a process and comes back is one graph there: each node waits for all of its gradients.
    """

    def __init__(self, worker: int, transport: Transport) -> None:
        self._worker = worker
        self._transport = transport
        self._numbers = itertools.count(1)
        self._orders = itertools.count()
        self._received: set[tuple[int, int]] = set()
        self.sent = Sent()
        self.gradients = Gradients()
        self.mixed = Mixed()
        self.contexts = Contexts(worker)
        self._releases = Releases(transport.release)

    @property
    def root(self) -> Root:
        """Whose a backward pass is that begins in this thread."""
        return self.contexts.root(self.contexts.current)

    @property
    def pending(self) -> int:
        """Messages for which something is kept here, and nodes of messages that came."""
        return len(self.sent) + len(self._received)

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:
        """What travels of tensors in a message to a peer, and what is to be told along with it."""
        travelling = [tensor.detach() for tensor in tensors]
        indices = tuple(at for at, tensor in enumerate(tensors) if tensor.requires_grad)
        if not indices or not torch.is_grad_enabled():
            return travelling, b""
        number = next(self._numbers)
        handles = {index: handle(tensors[index]) for index in indices}
        reach = sources(handles.values(), peer) if self._received else ()
        self.sent.keep(peer, number, handles)
        return travelling, notes.packed(Note(number, indices, reach))

    def receive(self, peer: int, tensors: list[Tensor], note: bytes) -> list[Tensor]:
        """The tensors of a message of a peer; those that require gradients there do so here.

        Raises:
            ValueError: The note is malformed.
        """
        if not note:
            return tensors
        told = notes.unpacked(note, len(tensors))
        coming = [tensors[at] for at in told.indices]
        if peer == self._worker:
            # A call to oneself: what it does here is part of the same graph.
            handles = self.sent.take(peer, told.number, told.indices, keep=False)
            made = receive_own(coming, handles)
        elif torch.is_grad_enabled():
            made = self._tied(peer, told, coming)
        else:
            self._releases.start()
            self._releases.add(peer, told.number)
            return tensors
        arrived = list(tensors)
        for at, tensor in zip(told.indices, made, strict=True):
            arrived[at] = tensor
        return arrived

    def _tied(self, peer: int, told: Note, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Tensors as outputs of a node, with inputs of this worker's on which they depend."""
        own = {
            source: kept
            for source in told.reach
            if source.owner == self._worker and (kept := self.sent.handle(source)) is not None
        }
        self._releases.start()
        self._received.add((peer, told.number))
        origin = Origin(self, peer, told, tuple(own), next(self._orders))
        return receive(origin, tensors, list(own.values()))

    def pull(self, origin: Origin, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring gradients of tensors to the worker that sent them, and have it go on from there.

        It blocks where gradients come back that the node's inputs wait for; else the call goes on
        beside the rest of the backward pass, which ends with it. It runs in the thread of the
        backward pass.

        Returns:
            The gradients of `origin.own`.
        """
        given = {
            index: gradient
            for index, gradient in zip(origin.indices, gradients, strict=True)
            if gradient is not None
        }
        run = current()
        if run is not None and run.stops(origin.peer, origin.number):
            for index, gradient in given.items():
                run.collect(Source(origin.peer, origin.number, index), gradient)
            given = {}
        if not given:
            return [None] * len(origin.own)
        request = self._request(origin, given, run)
        if origin.own:
            answer = self._transport.backward(origin.peer, request)
            return self._finish(origin, request, answer, run)
        coming = self._transport.begin_backward(origin.peer, request)

        def finish() -> None:
            self._finish(origin, request, coming.wait(), run)

        Variable._execution_engine.queue_callback(finish)
        return []

    def end(self, origin: Origin) -> None:
        """A node of tensors that came is gone."""
        self._received.discard((origin.peer, origin.number))
        if origin.waiting:
            self._releases.add(origin.peer, origin.number)

    def backward(self, request: Request) -> Answer:
        """Go on with a backward pass of a caller, from what was sent to it.

        Blocks until it is over here and wherever it goes on from here.

        Raises:
            RuntimeError: The graph is freed, or what a backward pass raises.
        """
        indices = list(request.gradients)
        handles = self.sent.take(request.caller, request.number, indices, request.keep)
        gradients = list(request.gradients.values())
        self.gradients.drop_contexts(request.root.worker, request.oldest)
        run = Run(request)
        released: list[int] = []
        with run.here():
            if request.root == Root(self._worker):
                torch.autograd.backward(handles, gradients, retain_graph=True)
            else:
                self._backward_apart(request, handles, gradients)
        with self._releases.caught(request.caller, released):
            # The end of the graph, where nothing else holds it.
            handles.clear()
        return Answer(run.gradients, released)

    def released(self, numbers: list[int]) -> None:
        """A peer has nothing any more that depends on these messages."""
        for number in numbers:
            self.sent.release(number)

    def forget(self, peer: int) -> None:
        """A peer is dead: nothing is kept for it."""
        self.sent.forget(peer)
        self.gradients.forget(peer)

    def close(self) -> None:
        """Tell others nothing any more."""
        self._releases.close()

    def _request(self, origin: Origin, given: dict[int, Tensor], run: Run | None) -> Request:
        root = self.root
        mine = Request(
            self._worker,
            origin.number,
            given,
            root,
            torch._C._current_graph_task_id(),
            (origin.order,),
            frozenset(origin.own),
            torch._C._autograd._get_current_graph_task_keep_graph(),
            self.contexts.oldest if root.worker == self._worker else 0,
        )
        if run is None:
            return mine
        above = run.request
        return mine._replace(
            root=above.root,
            task=above.task,
            path=above.path + mine.path,
            stop=above.stop | mine.stop,
            # Another part of the pass may come this way again; what it needs goes with the graph.
            keep=True,
            oldest=above.oldest,
        )

    def _finish(
        self, origin: Origin, request: Request, answer: Answer, run: Run | None
    ) -> list[Tensor | None]:
        if not request.keep:
            origin.waiting.difference_update(request.gradients)
        self.released(answer.released)
        inputs = [answer.gradients.pop(source, None) for source in origin.own]
        if run is not None:
            for source, gradient in answer.gradients.items():
                run.collect(source, gradient)
        return inputs

    def _backward_apart(
        self, request: Request, handles: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Keep gradients of parameters for the root, instead of in `grad`."""
        parameters = leaves(handles, request.stop)
        *made, _ = torch.autograd.grad(
            handles, [*parameters, ANCHOR], gradients, retain_graph=True, allow_unused=True
        )
        gradients_of: list[Tensor | None] = list(made)
        pairs = [(p, g) for p, g in zip(parameters, gradients_of, strict=True) if g is not None]
        if pairs := self.mixed.add(pairs):
            self.gradients.add(request.root, request.task, request.path, pairs)
