"""The servers of a table on workers of `phalanx.rpc`: their creation, checkpoints and replacement.

Servers of a replicated table may be replaced while trainers use them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.embedding.optimizers import RowOptimizer
from phalanx.embedding.replicated_server import ReplicatedServer, drop_part, keep_part
from phalanx.embedding.replication import PartKey, RoleRegister, Roles
from phalanx.embedding.server import COPY_SECONDS, EmbeddingServer, TableSpec
from phalanx.embedding.sharding import make_sharding
from phalanx.embedding.table import EmbeddingTable
from phalanx.errors import UsageError
from phalanx.rpc import calls
from phalanx.rpc.agent import agent
from phalanx.rpc.rref import RRef

Server = RRef[EmbeddingServer] | ReplicatedServer
"""The server of a part, or the two that it is replicated on."""


def deploy(
    workers: Sequence[str | int],
    num_embeddings: int,
    embedding_dim: int,
    optimizer: RowOptimizer | None = None,
    *,
    sharding: str = "range",
    trainers: int | None = 1,
    staleness: int | None = None,
    timeout: float = 300.0,
    dtype: torch.dtype = torch.float32,
    name: str = "table",
    weight: Callable[[Tensor], Tensor] | None = None,
    replicated: bool = False,
) -> Sequence[Server]:
    """Create a table on workers of `phalanx.rpc`; block until all have their part.

    Args:
        workers: Names or ids of the servers, in the order of the parts.
        num_embeddings: The number of rows of the whole table.
        embedding_dim: The number of elements of a row.
        optimizer: The optimizer of the rows: `SGD` (the default), `Adagrad` or `Adam`.
        sharding: "range" places consecutive rows on the same server; "hash" places row r on server
            r modulo the number of servers.
        trainers: The number of trainers that update the table. None: trainers come and go; those
            that are there count, and each comes with its `ShardedEmbeddingBag`.
        staleness: The number of steps that a trainer may be ahead of another; None: trainers step
            synchronously.
        timeout: The time that an update waits for other trainers, in seconds.
        dtype: float32 or float64.
        name: The table's name in error messages.
        weight: A function, which must be serializable, from n row indices to the rows' initial
            values, of shape (n, embedding_dim). By default the values are drawn from a normal
            distribution.
        replicated: True to keep a copy of each part on the next server. An update is complete when
            both have made it, so the death of a server loses no completed update, and trainers
            continue with the copy. It needs two servers at least, and twice the memory.

    Returns:
        References for `ShardedEmbeddingBag`. A server keeps its part as long as a reference to it
        exists; the servers of a replicated table, until they leave RPC.

    Raises:
        UsageError: An argument is invalid, or a worker does not exist.
        PhalanxError: A server does not have enough memory, or was lost.
        CallTimeout: A server has not created its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8, Adagrad(lr=0.1))
        >>> bag = ShardedEmbeddingBag(1000, 8, servers, mode="sum")
    """
    if replicated and len(workers) < 2:
        raise UsageError(f"deploy: replicated=True on {len(workers)} server, expected 2 at least")
    layout = make_sharding(sharding, num_embeddings, len(workers))
    settings: dict[str, Any] = {
        "trainers": trainers,
        "staleness": staleness,
        "timeout": timeout,
        "dtype": dtype,
        "name": name,
        "weight": weight,
    }
    table = secrets.token_hex(8)
    keys = [PartKey(table, number) if replicated else None for number in range(len(workers))]
    futures = [
        calls.begin(
            worker,
            _create_server,
            (key, layout, number, embedding_dim, optimizer),
            settings,
            COPY_SECONDS,
        )
        for number, (worker, key) in enumerate(zip(workers, keys, strict=True))
    ]
    servers: list[RRef[EmbeddingServer]] = [future.wait() for future in futures]
    parts = [ReplicatedServer(key) for key in keys if key is not None]
    if parts:
        replicate(parts, [*workers[1:], workers[0]])
    return parts or servers


def replicate(servers: Sequence[ReplicatedServer], workers: Sequence[str | int]) -> None:
    """Give each part without a backup one; trainers may use the table meanwhile.

    The updates of a part wait while it is copied. Blocks until all are copied.

    Args:
        servers: The parts, as `deploy(..., replicated=True)` returned them.
        workers: Workers for the copies: the first one that does not serve the part itself, from the
            number of the part on.

    Raises:
        UsageError: A worker does not exist, or there is none that does not serve a part already.
        PhalanxError: A worker does not have enough memory, or was lost.

    Example:
        >>> def continue_after_a_loss(servers):
        ...     embedding.replicate(servers, ["ps3", "ps4"])
    """
    ids = [agent().peer(worker).id for worker in workers]
    for number, part in enumerate(servers):
        roles = _roles_with_live_primary(part)
        if roles.backup is not None and not agent().peers[roles.backup].is_unreachable():
            continue
        order = [*ids[number % len(ids) :], *ids[: number % len(ids)]] if ids else []
        chosen = next((each for each in order if each != roles.primary), None)
        if chosen is None:
            raise UsageError(
                f"replicate: workers={list(workers)} given, expected one other than worker "
                f"{roles.primary}, which serves part {number}"
            )
        _copy_part(part, chosen)


def move(servers: Sequence[ReplicatedServer], source: str | int, target: str | int) -> None:
    """Move all that a server has to another worker, which may have joined since.

    Trainers may use the table meanwhile; the updates of a part wait while it is copied. After that,
    the source may leave.

    Args:
        servers: The parts, as `deploy(..., replicated=True)` returned them.
        source: The worker that has parts or copies.
        target: The worker that gets them; it must not have parts of the same number.

    Raises:
        UsageError: A worker does not exist, or the target serves a part of the source already.
        PhalanxError: The target does not have enough memory, or a server was lost.

    Example:
        >>> def make_room(servers):
        ...     embedding.move(servers, "ps0", "ps2")
    """
    old, new = agent().peer(source).id, agent().peer(target).id
    for number, part in enumerate(servers):
        roles = _roles_with_live_primary(part)
        if old not in (roles.primary, roles.backup):
            continue
        if new in (roles.primary, roles.backup):
            raise UsageError(f"move: worker {target!r} serves part {number} already")
        if roles.primary == old:
            if roles.backup is None:
                _copy_part(part, new)
            server = part.current
            server.rpc_sync(COPY_SECONDS).hand_over()
            part.replace(server)
        if part.roles.primary != new:
            _copy_part(part, new)
        calls.rpc_sync(old, drop_part, (part.key,))


def _roles_with_live_primary(part: ReplicatedServer) -> Roles:
    """Return the roles of the servers of a part, once a lost primary has been replaced."""
    part.start_call("spec", timeout=None).wait()
    return part.roles


def _copy_part(part: ReplicatedServer, worker: int) -> None:
    """Give a part a backup on a worker."""
    spec: TableSpec = part.start_call("spec", timeout=None).wait()
    optimizer = part.start_call("optimizer", timeout=None).wait()
    backup = calls.rpc_sync(
        worker, _create_backup, (part.key, spec, optimizer), timeout=COPY_SECONDS
    )
    # Not repeated if this server is lost: the other one might be told to copy itself.
    part.current.rpc_sync(COPY_SECONDS).set_backup(backup)


def save(servers: Sequence[Server], path: str) -> None:
    """Write the parts of all servers, each by `EmbeddingServer.save`, to `path`/server-0 and so on.

    Call it between two steps, so that the parts are of the same state. Each path is on its server's
    host.

    Raises:
        CheckpointError: A server could not write its part.
        CallTimeout: A server has not written its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8)
        >>> embedding.save(servers, f"{checkpoints}/step-100")
    """
    _call_all(servers, "save", path)


def load(servers: Sequence[Server], path: str) -> None:
    """Read the parts that `save` wrote for the same number of servers.

    Each server reads its part by `EmbeddingServer.load`.

    Raises:
        CheckpointError: A server could not read its part; others may have.
        CallTimeout: A server has not read its part within an hour.

    Example:
        >>> servers = embedding.deploy(["ps"], 1000, 8)
        >>> embedding.load(servers, f"{checkpoints}/step-100")
    """
    _call_all(servers, "load", path)


def _call_all(servers: Sequence[Server], method: str, path: str) -> None:
    references = [each.current if isinstance(each, ReplicatedServer) else each for each in servers]
    futures = [
        getattr(server.begin(timeout=COPY_SECONDS), method)(f"{path}/server-{number}")
        for number, server in enumerate(references)
    ]
    for future in futures:
        future.wait()


def _create_server(key: PartKey | None, *arguments: Any, **settings: Any) -> RRef[EmbeddingServer]:
    server = RRef(EmbeddingServer.create_shard(*arguments, **settings))
    if key is not None:
        roles = RoleRegister(key).change(Roles(1, agent().id))
        server.local_value().serve(key, roles)
        keep_part(key, server)
    return server


def _create_backup(key: PartKey, spec: TableSpec, optimizer: RowOptimizer) -> RRef[EmbeddingServer]:
    weight = torch.zeros(spec.rows, spec.width, dtype=spec.dtype, device="cpu")
    table = EmbeddingTable(
        spec.rows, spec.width, optimizer, dtype=spec.dtype, name=spec.name, weight=weight
    )
    server = RRef(
        EmbeddingServer(table, spec.trainers, staleness=spec.staleness, timeout=spec.timeout)
    )
    keep_part(key, server)
    return server
