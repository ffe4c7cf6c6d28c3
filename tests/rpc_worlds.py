"""Workers simulated in one process: an autograd graph each, with calls run on other threads."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.rpc.autograd.graph import (
    AutogradGraph,
    BackwardRequest,
    BackwardResponse,
    PeerGraphs,
)

# The time limit in seconds for a call, and for freeing unused graphs.
LIMIT = 60.0

Program = Callable[["SingleProcess", int, Sequence[Tensor]], list[Tensor]]


class SingleProcess:
    """Workers with parameters and values stored by calls, all in one process without graphs."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size, self.stores = size, True
        self.stored: list[list[Tensor]] = [[] for _ in range(size)]
        self.parameters = [
            [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
            for _ in range(size)
        ]
        for parameter in self.all_parameters():
            parameter.requires_grad_()

    def all_parameters(self) -> list[Tensor]:
        return [parameter for own in self.parameters for parameter in own]

    def call(self, rank: int, to: int, program: Program, arguments: list[Tensor]) -> list[Tensor]:
        return program(self, to, arguments)


class SimulatedWorkers(SingleProcess):
    """Workers with an autograd graph each; calls send copies of tensors."""

    def __init__(self, size: int, seed: int, pool: ThreadPoolExecutor) -> None:
        super().__init__(size, seed)
        self.pool = pool
        self.release_count = 0
        self.graphs = [AutogradGraph(worker, PeerCalls(self)) for worker in range(size)]

    def call(self, rank: int, to: int, program: Program, arguments: list[Tensor]) -> list[Tensor]:
        sent, metadata = self.graphs[rank].send(to, arguments)

        def execute() -> tuple[list[Tensor], bytes]:
            received = self.graphs[to].receive(rank, [tensor.clone() for tensor in sent], metadata)
            return self.graphs[to].send(rank, program(self, to, received))

        results, metadata = self.pool.submit(execute).result(LIMIT)
        return self.graphs[rank].receive(to, [tensor.clone() for tensor in results], metadata)

    def wait_until_freed(self) -> None:
        """Wait until nothing is kept for a backward pass; fail after a time limit."""
        gc.collect()
        deadline = time.monotonic() + LIMIT
        while any(graph.pending for graph in self.graphs) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not any(graph.pending for graph in self.graphs)


class PeerCalls(PeerGraphs):
    """Calls to peer graphs, executed on other threads."""

    def __init__(self, world: SimulatedWorkers) -> None:
        self._world = world

    def begin_backward(  # type: ignore[override]
        self, peer: int, request: BackwardRequest
    ) -> PendingBackward:
        return PendingBackward(self._world.pool.submit(self._world.graphs[peer].backward, request))

    def has_context(self, peer: int, number: int) -> bool:
        return self._world.graphs[peer].contexts.is_open(number)

    def release(self, peer: int, numbers: list[int]) -> None:
        self._world.release_count += len(numbers)
        self._world.graphs[peer].release(numbers)


class PendingBackward:
    def __init__(self, future: Future[BackwardResponse | None]) -> None:
        self._future = future

    def wait(self) -> BackwardResponse | None:
        return self._future.result(LIMIT)


@contextmanager
def workers(size: int, seed: int, pool: ThreadPoolExecutor) -> Iterator[SimulatedWorkers]:
    world = SimulatedWorkers(size, seed, pool)
    try:
        yield world
    finally:
        for graph in world.graphs:
            graph.close()
