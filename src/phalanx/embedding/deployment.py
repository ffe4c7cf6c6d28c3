"""Deployment, saving and loading of a table's servers, for the process that controls a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.embedding.optimizers import RowOptimizer
from phalanx.embedding.server import EmbeddingServer
from phalanx.embedding.sharding import Sharding, make_sharding
from phalanx.rpc import calls
from phalanx.rpc.rref import RRef

__all__ = ["deploy", "load", "save"]

_TIMEOUT_SECONDS = 3600.0
"""The time that a server has to create, write or read its part."""


def deploy(
    workers: Sequence[str | int],
    num_embeddings: int,
    embedding_dim: int,
    optimizer: RowOptimizer | None = None,
    *,
    sharding: str = "range",
    trainers: int = 1,
    staleness: int | None = None,
    timeout: float = 300.0,
    dtype: torch.dtype = torch.float32,
    name: str = "table",
    weight: Callable[[Tensor], Tensor] | None = None,
) -> list[RRef[EmbeddingServer]]:
    """Create a table on workers of `phalanx.rpc`; block until all have their part.

    Args:
        workers: Names or ids of the servers, in the order of the parts.
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        optimizer: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        sharding: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainers: The number of trainers that update the table.
        staleness: The number of steps that a trainer may be ahead of another; None: trainers step
            synchronously.
        timeout: The time that an update waits for other trainers, in seconds.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: A function, which must be serializable, from n row indices to the rows' initial
            values, of shape (n, embedding_dim). By default the values are drawn from a normal
            distribution.

    Returns:
        References for `ShardedEmbeddingBag`. A server keeps its part as long as a reference to it
        exists.

    Raises:
        UsageError: An argument is invalid, or a worker does not exist.
        PhalanxError: A server does not have enough memory, or was lost.
        CallTimeout: A server has not created its part within an hour.
    """
    layout = make_sharding(sharding, num_embeddings, len(workers))
    settings: dict[str, Any] = {
        "trainers": trainers,
        "staleness": staleness,
        "timeout": timeout,
        "dtype": dtype,
        "name": name,
        "weight": weight,
    }
    futures = [
        calls.begin(
            worker,
            _create_server,
            (layout, number, embedding_dim, optimizer, settings),
            timeout=_TIMEOUT_SECONDS,
        )
        for number, worker in enumerate(workers)
    ]
    return [future.wait() for future in futures]


def save(servers: Sequence[RRef[EmbeddingServer]], path: str) -> None:
    """Write the parts of all servers, each by `EmbeddingServer.save`, to `path`/server-0 and so on.

    Call it between two steps, so that the parts are of the same state. Each path is on its server's
    host.

    Raises:
        CheckpointError: A server could not write its part.
        CallTimeout: A server has not written its part within an hour.
    """
    _call_all(servers, "save", path)


def load(servers: Sequence[RRef[EmbeddingServer]], path: str) -> None:
    """Read the parts that `save` wrote for the same number of servers.

    Each server reads its part by `EmbeddingServer.load`.

    Raises:
        CheckpointError: A server could not read its part; others may have.
        CallTimeout: A server has not read its part within an hour.
    """
    _call_all(servers, "load", path)


def _call_all(servers: Sequence[RRef[EmbeddingServer]], method: str, path: str) -> None:
    futures = [
        getattr(server.begin(timeout=_TIMEOUT_SECONDS), method)(f"{path}/server-{number}")
        for number, server in enumerate(servers)
    ]
    for future in futures:
        future.wait()


def _create_server(
    layout: Sharding,
    number: int,
    width: int,
    optimizer: RowOptimizer | None,
    settings: dict[str, Any],
) -> RRef[EmbeddingServer]:
    return RRef(EmbeddingServer.create_shard(layout, number, width, optimizer, **settings))
