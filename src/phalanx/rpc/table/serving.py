"""The servers of a table, made and kept by one call each: for the process that drives a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.rpc import calls
from phalanx.rpc.rref import RRef
from phalanx.rpc.table.rules import Rule
from phalanx.rpc.table.server import Server
from phalanx.rpc.table.shards import Shards, split_of

__all__ = ["load", "save", "serve"]

_SECONDS = 3600.0
"""For a server to make, write or read its part."""


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
    """Put a table on workers of `phalanx.rpc`; blocks until all have their part.

    Args:
        workers: Names or ids of the servers, in the order of the parts.
        num_embeddings: Rows of the whole table.
        embedding_dim: Elements of a row.
        rule: How rows are updated: `SGD` (without one), `Adagrad` or `Adam`.
        shards: "range": rows that follow one another are on one server; "hash": row r is on
            server r modulo their number.
        trainers: How many update it.
        staleness: None: trainers go in step; else how many steps one may be ahead of another.
        timeout: Seconds that an update waits for other trainers.
        dtype: float32 or float64.
        name: What errors call the table.
        weight: Gives the first values, of shape [n, embedding_dim], for a list of n rows; a
            function that can be sent. By default drawn from a normal distribution.

    Returns:
        References for `ShardedEmbeddingBag`. The table lives as long as any of them does.

    Raises:
        UsageError: An argument isn't as said, or there is no such worker.
        PhalanxError: A server hasn't so much memory, or is lost.
        CallTimeout: One hasn't its part after an hour.
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
    """Have all servers write their parts: `Server.save` to `path`/server-0 and so on.

    Call it between two steps, for a snapshot of one state. Paths are those of each server's host.

    Raises:
        SnapshotError: One couldn't.
        CallTimeout: One hasn't after an hour.
    """
    _each(servers, "save", path)


def load(servers: Sequence[RRef[Server]], path: str) -> None:
    """Have all servers read what `save` has written, by as many servers; `Server.load`.

    Raises:
        SnapshotError: One couldn't; others may have.
        CallTimeout: One hasn't after an hour.
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
