"""Workers as autograd graphs in one process, whose calls are functions on other threads."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.rpc.autograd.graph import AutogradGraph
from phalanx.rpc.autograd.remote_backward import BackwardRequest, BackwardResponse

# Seconds within which a call returns, and what isn't needed any more is freed.
LIMIT = 60.0

Program = Callable[["World", int, Sequence[Tensor]], list[Tensor]]


class World:
    """Workers with parameters, and with values that calls leave there; all in one process."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size, self.stores = size, True
        self.stored: list[list[Tensor]] = [[] for _ in range(size)]
        self.parameters = [
            [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
            for _ in range(size)
        ]
        for parameter in self.of_all():
            parameter.requires_grad_()

    def of_all(self) -> list[Tensor]:
        return [parameter for own in self.parameters for parameter in own]

    def call(self, me: int, to: int, program: Program, arguments: list[Tensor]) -> list[Tensor]:
        return program(self, to, arguments)


class Workers(World):
    """The same with a graph for each, so that calls carry copies."""

    def __init__(self, size: int, seed: int, pool: ThreadPoolExecutor) -> None:
        super().__init__(size, seed)
        self.pool = pool
        self.told = 0
        self.graphs = [AutogradGraph(worker, Calls(self)) for worker in range(size)]

    def call(self, me: int, to: int, program: Program, arguments: list[Tensor]) -> list[Tensor]:
        there, note = self.graphs[me].send(to, arguments)

        def execute() -> tuple[list[Tensor], bytes]:
            arrived = self.graphs[to].receive(me, [tensor.clone() for tensor in there], note)
            return self.graphs[to].send(me, program(self, to, arrived))

        back, note = self.pool.submit(execute).result(LIMIT)
        return self.graphs[me].receive(to, [tensor.clone() for tensor in back], note)

    def free(self) -> None:
        """Wait until nothing is kept for a backward pass; a time limit fails the test."""
        gc.collect()
        end = time.monotonic() + LIMIT
        while any(graph.pending for graph in self.graphs) and time.monotonic() < end:
            time.sleep(0.002)
        assert not any(graph.pending for graph in self.graphs)


class Calls:
    """The transport: a call is a function on another thread."""

    def __init__(self, world: Workers) -> None:
        self._world = world

    def backward(self, peer: int, request: BackwardRequest) -> BackwardResponse:
        return self.begin_backward(peer, request).wait()

    def begin_backward(self, peer: int, request: BackwardRequest) -> Coming:
        return Coming(self._world.pool.submit(self._world.graphs[peer].backward, request))

    def has_context(self, peer: int, number: int) -> bool:
        return self._world.graphs[peer].contexts.is_open(number)

    def release(self, peer: int, numbers: list[int]) -> None:
        self._world.told += len(numbers)
        self._world.graphs[peer].release(numbers)


class Coming:
    def __init__(self, future: Future[BackwardResponse]) -> None:
        self._future = future

    def wait(self) -> BackwardResponse:
        return self._future.result(LIMIT)


@contextmanager
def workers(size: int, seed: int, pool: ThreadPoolExecutor) -> Iterator[Workers]:
    world = Workers(size, seed, pool)
    try:
        yield world
    finally:
        for graph in world.graphs:
            graph.close()
