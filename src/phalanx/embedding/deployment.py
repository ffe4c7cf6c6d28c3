"""Deployment, saving and loading of a table's servers, for the process that drives a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.embedding.optimizers import Rule
from phalanx.embedding.server import Server
from phalanx.embedding.sharding import Shards, split_of
from phalanx.rpc import calls
from phalanx.rpc.rref import RRef

__all__ = ["load", "save", "serve"]

_SECONDS = 3600.0
"""The timeout for a server to create, write or read its part."""


def serve(
    workers: Sequence[str | int],
    num_embeddings: int,
    embedding_dim: int,
    rule: Rule | None = None,
    *,
    shards: str = "range",
    trainers: int = 1,
    staleness: int | None = None,
    timeout: float = 300.0,
    dtype: torch.dtype = torch.float32,
    name: str = "table",
    weight: Callable[[Tensor], Tensor] | None = None,
) -> list[RRef[Server]]:
    """Create a table on workers of `phalanx.rpc`; block until all have their part.

    Args:
        workers: Names or ids of the servers, in the order of the parts.
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        rule: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        shards: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainers: The number of trainers that update the table.
        staleness: The number of steps that a trainer may be ahead of another; None: trainers step
            synchronously.
        timeout: The time that an update waits for other trainers, in seconds.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: A function, which must be serializable, from n row indices to their initial
            values, of shape (n, embedding_dim). By default the values are drawn from a normal
            distribution.

    Returns:
        References for `ShardedEmbeddingBag`. The part of a server lives as long as a reference to
        it.

    Raises:
        UsageError: An argument is invalid, or there is no such worker.
        PhalanxError: A server does not have enough memory, or is lost.
        CallTimeout: A server does not have its part after an hour.
    """
    split = split_of(shards, num_embeddings, len(workers))
    terms: dict[str, Any] = {
        "trainers": trainers,
        "staleness": staleness,
        "timeout": timeout,
        "dtype": dtype,
        "name": name,
        "weight": weight,
    }
    coming = [
        calls.begin(worker, _made, (split, number, embedding_dim, rule, terms), timeout=_SECONDS)
        for number, worker in enumerate(workers)
    ]
    return [each.wait() for each in coming]


def save(servers: Sequence[RRef[Server]], path: str) -> None:
    """Write the parts of all servers, each by `Server.save`, to `path`/server-0 and so on.

    Call it between two steps, so that the parts are of the same state. Each path is on its server's
    host.

    Raises:
        CheckpointError: A server could not write its part.
        CallTimeout: A server has not written its part after an hour.
    """
    _each(servers, "save", path)


def load(servers: Sequence[RRef[Server]], path: str) -> None:
    """Read the parts that `save` has written from as many servers, each by `Server.load`.

    Raises:
        CheckpointError: A server could not read its part; others may have.
        CallTimeout: A server has not read its part after an hour.
    """
    _each(servers, "load", path)


def _each(servers: Sequence[RRef[Server]], method: str, path: str) -> None:
    coming = [
        getattr(server.begin(timeout=_SECONDS), method)(f"{path}/server-{number}")
        for number, server in enumerate(servers)
    ]
    for each in coming:
        each.wait()


def _made(
    split: Shards, number: int, width: int, rule: Rule | None, terms: dict[str, Any]
) -> RRef[Server]:
    return RRef(Server.of_shard(split, number, width, rule, **terms))
