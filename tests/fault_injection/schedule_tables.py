"""Random programs of a replicated table, whose parts move to other workers while trainers use it.

Each update adds a number to some rows: in the end every row shows how many updates it was in, and
both servers of each part have the same rows.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from phalanx import embedding, rpc
from phalanx.embedding import SGD, ShardedEmbeddingBag
from phalanx.embedding.replicated_server import ReplicatedServer, find_part
from phalanx.embedding.replication import ChangeReceiver, ChangeSender, PartKey, RoleRegister
from phalanx.embedding.server import EmbeddingServer
from phalanx.errors import PhalanxError
from tests.fault_injection.pauses import LIMIT, WORKERS, HandOvers

ROWS, WIDTH = 60, 2
HAND_OVERS: HandOvers = (
    (ChangeSender, "send"),
    (ChangeSender, "_end"),
    (ChangeReceiver, "receive"),
    (EmbeddingServer, "begin_update"),
    (EmbeddingServer, "replicate"),
    (EmbeddingServer, "take_over"),
    (EmbeddingServer, "read_roles"),
    (EmbeddingServer, "_continue"),
    (EmbeddingServer, "_drop_backup"),
    (RoleRegister, "change"),
    (ReplicatedServer, "replace"),
)


def make_zeros(rows: torch.Tensor) -> torch.Tensor:
    """Return the initial rows."""
    return torch.zeros(len(rows), WIDTH, dtype=torch.float64)


def train(servers: list[ReplicatedServer], trainer: int, seed: int, updates: int) -> list[int]:
    """Update random rows; return for each row in how many updates it was."""
    chosen, counts = Random(seed), [0] * ROWS
    bag = ShardedEmbeddingBag(
        ROWS, WIDTH, servers, mode="sum", trainer=trainer, use_shared_memory=chosen.random() < 0.5
    )
    for _ in range(updates):
        rows = [chosen.randrange(ROWS) for _ in range(chosen.randint(1, 5))]
        bag(torch.tensor(rows)[:, None]).sum().mul(-WORKERS).backward()
        bag.step()
        for row in rows:
            counts[row] += 1
    bag.wait()
    return counts


def read_part(key: PartKey) -> torch.Tensor:
    """Return the rows of a part of which this worker is the primary or the backup."""
    table = find_part(key).local_value().table
    return table.gather(torch.arange(table.rows))


def run_program(chosen: Random) -> str:
    """Run a program; return what went wrong, or nothing."""
    *used, free = chosen.sample(range(WORKERS), WORKERS)
    staleness = chosen.choice((None, 0, 1, 3))
    try:
        servers: Any = embedding.deploy(
            used,
            ROWS,
            WIDTH,
            SGD(1.0),
            trainers=WORKERS,
            staleness=staleness,
            timeout=LIMIT,
            dtype=torch.float64,
            weight=make_zeros,
            replicated=True,
        )
        updates = chosen.randint(1, 8)
        futures = [
            rpc.rpc_async(
                trainer, train, (servers, trainer, chosen.randrange(2**31), updates), timeout=LIMIT
            )
            for trainer in range(WORKERS)
        ]
        for _ in range(chosen.randint(0, 3)):
            source = used.pop(0)
            embedding.move(servers, source, free)
            used, free = [*used, free], source
        counts = [future.wait() for future in futures]
        return _compare(servers, counts, WORKERS if staleness is not None else 1)
    except PhalanxError as error:
        return f"{type(error).__name__}: {error}"


def _compare(servers: list[ReplicatedServer], counts: list[list[int]], factor: int) -> str:
    """Compare the rows of all servers with the updates; a step makes the mean of its updates."""
    expected = torch.tensor(counts, dtype=torch.float64).sum(0) * factor
    primaries = []
    for part in servers:
        primary, backup = (
            rpc.rpc_sync(worker, read_part, (part.key,), timeout=LIMIT)
            for worker in (part.roles.primary, part.roles.backup)
        )
        if not torch.equal(primary, backup):
            return f"part {part.key.number} differs on its servers: {primary}, {backup}"
        primaries.append(primary)
    found = torch.cat(primaries)
    wrong = [row for row in range(ROWS) if not (found[row] == expected[row]).all()]
    if not wrong:
        return ""
    row = wrong[0]
    return f"{len(wrong)} rows are wrong, first row {row}: {found[row]}, expected {expected[row]}"
