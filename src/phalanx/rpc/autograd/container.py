"""The graph of this process, and the calls between the graphs of workers."""

from __future__ import annotations

import logging

from phalanx.errors import PhalanxError, RemoteError, UsageError
from phalanx.rpc import calls, peer_loss
from phalanx.rpc.autograd.graph import AutogradGraph
from phalanx.rpc.autograd.remote_backward import BackwardRequest, BackwardResponse
from phalanx.rpc.codec.autograd_hook import set_autograd_hook
from phalanx.rpc.current_agent import agent
from phalanx.rpc.pending_call import PendingCall

__all__ = ["close", "graph", "init"]

_LOG = logging.getLogger("phalanx.rpc")
_graphs: list[AutogradGraph] = []


class _RpcPeerGraphs:
    """A `PeerGraphs` whose messages are ordinary calls of `phalanx.rpc`."""

    def backward(self, peer: int, request: BackwardRequest) -> BackwardResponse:
        answer: BackwardResponse = calls.rpc_sync(peer, _backward, (request,))
        return answer

    def begin_backward(self, peer: int, request: BackwardRequest) -> PendingCall:
        return calls.begin(peer, _backward, (request,))

    def has_context(self, peer: int, number: int) -> bool:
        if all(info.id != peer for info in calls.get_worker_infos()):
            return False
        answer: bool = calls.rpc_sync(peer, _has_context, (number,))
        return answer

    def release(self, peer: int, numbers: list[int]) -> None:
        try:
            calls.rpc_async(peer, _release, (numbers,))
        except (
            PhalanxError,
            UsageError,
        ):  # the peer is dead, or this worker is leaving: nothing is kept for it any more
            _LOG.debug("worker %d was not notified of released messages", peer, exc_info=True)


def init(worker: int) -> None:
    """Start propagating gradients across calls; `init_rpc` calls this before any other call."""
    new_graph = AutogradGraph(worker, _RpcPeerGraphs())
    _graphs[:] = [new_graph]
    set_autograd_hook(new_graph)


def close() -> None:
    """Free everything kept for other workers; `shutdown` calls this after the last call."""
    set_autograd_hook(None)
    while _graphs:
        _graphs.pop().close()


def graph() -> AutogradGraph:
    """Return the graph of this worker.

    Raises:
        UsageError: This process is not a worker.
    """
    if not _graphs:
        agent()  # raises
    return _graphs[0]


def _forget_lost(worker: int) -> None:
    for each in _graphs:
        each.forget(worker)


peer_loss.add_listener(_forget_lost)


def _backward(request: BackwardRequest) -> BackwardResponse:
    try:
        return graph().backward(request)
    except (PhalanxError, UsageError):  # raised by a worker further along, or for a lost one
        raise
    except Exception as error:
        text = f"Error on Node {agent().id}: {error}"
        raise RemoteError(f"{text} ({type(error).__name__} in a backward pass)") from error


def _has_context(number: int) -> bool:
    return graph().contexts.is_open(number)


def _release(numbers: list[int]) -> None:
    if _graphs:
        _graphs[0].release(numbers)
