"""The part of another worker's backward pass that runs in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from phalanx.rpc.autograd.gradients import Root
from phalanx.rpc.autograd.metadata import Source

__all__ = ["BackwardRequest", "BackwardResponse", "RemoteBackward", "current"]


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

    def stops_at(self, peer: int, number: int) -> bool:
        """Return whether gradients of tensors received in this message are sent back."""
        return any(one.owner == peer and one.number == number for one in self.request.stop)

    def collect(self, source: Source, gradient: Tensor) -> None:
        """Add a gradient that is sent back; gradients from several paths are summed."""
        present = self.gradients.get(source)
        self.gradients[source] = gradient if present is None else present + gradient

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Make this thread's backward passes part of this one within the context."""
        saved = current()
        _thread.remote_backward = self
        try:
            yield
        finally:
            _thread.remote_backward = saved


class _Thread(threading.local):
    remote_backward: RemoteBackward | None = None


_thread = _Thread()


def current() -> RemoteBackward | None:
    """Return the one that this thread executes; None if a pass here is a new one of this worker."""
    return _thread.remote_backward
