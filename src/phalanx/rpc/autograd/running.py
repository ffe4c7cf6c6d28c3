"""A backward pass of another worker, as far as it goes through this one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from phalanx.rpc.autograd.gradients import Root
from phalanx.rpc.autograd.note import Source

__all__ = ["Answer", "Request", "Run", "current"]


class Request(NamedTuple):
    """Asks a worker to go on with a backward pass, from tensors that it has sent.

    Attributes:
        caller: Who asks, to whom they were sent.
        number: The message in which they were.
        gradients: Theirs, by index.
        root: For whom gradients of parameters are.
        task: The backward pass, by a number of the root's worker.
        path: The nodes that it has gone through, from the root's worker to here.
        stop: Tensors behind which somebody on the way goes on himself: their gradients go back.
        keep: Whether the graph stays for another backward pass.
        oldest: The root's worker has left its contexts of lower numbers.
    """

    caller: int
    number: int
    gradients: dict[int, Tensor]
    root: Root
    task: int
    path: tuple[int, ...]
    stop: frozenset[Source]
    keep: bool
    oldest: int


class Answer(NamedTuple):
    """What came of a request.

    Attributes:
        gradients: Those of tensors of its `stop`.
        released: Messages of the caller on which nothing depends any more at who answers.
    """

    gradients: dict[Source, Tensor]
    released: list[int]


@dataclass
class Run:
    """The part of a backward pass that a request has brought about, in the thread that does it."""

    request: Request
    gradients: dict[Source, Tensor] = field(default_factory=dict)

    def stops(self, peer: int, number: int) -> bool:
        """Whether gradients of tensors that came in this message go back."""
        return any(one.owner == peer and one.number == number for one in self.request.stop)

    def collect(self, source: Source, gradient: Tensor) -> None:
        """One of them; they add up where several ways lead to it."""
        present = self.gradients.get(source)
        self.gradients[source] = gradient if present is None else present + gradient

    @contextmanager
    def here(self) -> Iterator[None]:
        """While this thread's backward passes are part of it."""
        before = current()
        _thread.run = self
        try:
            yield
        finally:
            _thread.run = before


class _Thread(threading.local):
    run: Run | None = None


_thread = _Thread()


def current() -> Run | None:
    """The run that this thread is in; None: a backward pass here is a new one, of this worker."""
    return _thread.run
