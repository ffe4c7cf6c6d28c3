"""The graph of this process, and calls between the graphs of workers."""

from __future__ import annotations

import logging

from phalanx.errors import PhalanxError, UsageError
from phalanx.rpc import calls, seam
from phalanx.rpc.asked import Asked
from phalanx.rpc.autograd.graph import AutogradGraph
from phalanx.rpc.autograd.running import Answer, Request

__all__ = ["begin", "end", "graph"]

_LOG = logging.getLogger("phalanx.rpc")
_graphs: list[AutogradGraph] = []


class _Calls:
    """The backward pass of a node is a call like any other."""

    def backward(self, peer: int, request: Request) -> Answer:
        answer: Answer = calls.rpc_sync(peer, _backward, (request,))
        return answer

    def begin_backward(self, peer: int, request: Request) -> Asked:
        return calls.begin(peer, _backward, (request,))

    def release(self, peer: int, numbers: list[int]) -> None:
        try:
            calls.rpc_async(peer, _released, (numbers,))
        except (
            PhalanxError,
            UsageError,
        ):  # it is dead, or this worker leaves: nothing is kept any more
            _LOG.debug("worker %d isn't told what it may free", peer, exc_info=True)


def begin(worker: int) -> None:
    """Let gradients cross calls: from `init_rpc` on, before there is a call."""
    made = AutogradGraph(worker, _Calls())
    _graphs[:] = [made]
    seam.set_graph(made)


def end() -> None:
    """Let go of all that is kept for others: at `shutdown`, when there are no calls any more."""
    seam.set_graph(None)
    while _graphs:
        _graphs.pop().close()


def graph() -> AutogradGraph:
    """The graph of this worker.

    Raises:
        UsageError: There is none.
    """
    if not _graphs:
        raise UsageError("this process is no worker of RPC: call phalanx.rpc.init_rpc first")
    return _graphs[0]


def _lost(worker: int) -> None:
    for here in _graphs:
        here.forget(worker)


seam.when_lost(_lost)


def _backward(request: Request) -> Answer:
    return graph().backward(request)


def _released(numbers: list[int]) -> None:
    if _graphs:
        _graphs[0].released(numbers)
