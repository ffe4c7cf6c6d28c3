"""Where autograd takes hold of calls, and on whose behalf a thread works.

Every tensor that leaves with a request or an answer, and every one that comes, passes through a
`Graph`. By default tensors only lose their history.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["Graph", "behalf", "graph", "lost", "on_behalf_of", "set_graph", "when_lost", "why_lost"]


class Graph(Protocol):
    """What tensors pass through, in the thread that sends or receives them."""

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:
        """Before tensors leave with a request or an answer.

        Args:
            peer: The worker that they go to.
            tensors: All of them.

        Returns:
            What travels in their place, without history, and a note for the other side.
        """
        ...

    def receive(self, peer: int, tensors: list[Tensor], note: bytes) -> list[Tensor]:
        """Before tensors are put into unpickled arguments or results.

        Args:
            peer: The worker that they come from.
            tensors: What has travelled.
            note: What `send` of the other side said.
        """
        ...


class _Detached:
    """No history travels."""

    def send(self, peer: int, tensors: list[Tensor]) -> tuple[list[Tensor], bytes]:  # noqa: ARG002
        return [each.detach() if each.requires_grad else each for each in tensors], b""

    def receive(self, peer: int, tensors: list[Tensor], note: bytes) -> list[Tensor]:  # noqa: ARG002
        return tensors


class _Behalf(threading.local):
    root: int | None = None


behalf = _Behalf()
_graphs: list[Graph] = [_Detached()]
_when_lost: list[Callable[[int], None]] = []
_why_lost: dict[int, str] = {}


def set_graph(graph: Graph | None) -> None:
    """Have tensors pass through `graph` from now on; None: they only lose their history."""
    _graphs[0] = _Detached() if graph is None else graph


def graph() -> Graph:
    """What tensors pass through."""
    return _graphs[0]


def when_lost(callback: Callable[[int], None]) -> None:
    """Have a function called, in a thread of RPC, with the id of each worker that is lost."""
    _when_lost.append(callback)


def why_lost(worker: int) -> str:
    """What is known of a worker that is lost."""
    return _why_lost.get(worker, "")


def lost(worker: int, words: str) -> None:
    """Call all of them."""
    _why_lost[worker] = words
    for callback in _when_lost:
        callback(worker)


@contextmanager
def on_behalf_of(root: int) -> Iterator[None]:
    """Within it, this thread works on behalf of the worker `root`."""
    before, behalf.root = behalf.root, root
    try:
        yield
    finally:
        behalf.root = before
