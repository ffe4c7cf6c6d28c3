"""Embedding tables that processes of a host read and write concurrently, and dead servers."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import embedding, rpc
from phalanx.embedding import (
    SGD,
    Adam,
    EmbeddingServer,
    EmbeddingTable,
    RangeSharding,
    ShardedEmbeddingBag,
    TableHandle,
)
from phalanx.embedding.sharded_table import _MappedTable
from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.rpc.agent import agent
from tests.ranks import RankServer

ROWS, WIDTH = 16, 33
# The number of changed rows that a reader waits for.
CHANGES = 2000


def publish(table: EmbeddingTable) -> None:
    """Publish a table's handle atomically in a file."""
    path = Path(os.environ["FOLDER"], "table")
    path.with_suffix(".new").write_bytes(pickle.dumps(table.handle))
    path.with_suffix(".new").rename(path)


def receive_handle() -> TableHandle:
    path = Path(os.environ["FOLDER"], "table")
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
    handle: TableHandle = pickle.loads(path.read_bytes())
    return handle


def is_uniform(rows: Tensor) -> bool:
    return bool((rows == rows[..., :1]).all())


def read_and_write(writers: int) -> int:
    """Write on the first ranks until the others have seen enough; return the number of writes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    created = (
        EmbeddingTable(ROWS, WIDTH, SGD(1.0), weight=torch.zeros(ROWS, WIDTH))
        if rank == 0
        else None
    )
    handles = [created.handle if created else None]
    dist.broadcast_object_list(handles)
    table = created or EmbeddingTable.open(handles[0])
    all_rows = torch.arange(ROWS)
    folder = Path(os.environ["FOLDER"])
    written = 0
    if rank < writers:
        while len([*folder.glob("seen*")]) < size - writers:
            for _ in range(50):
                table.update(all_rows, torch.full((ROWS, WIDTH), -1.0))
                written += 1
    else:
        read_concurrently(table, all_rows)
        (folder / f"seen{rank}").touch()
    total = torch.tensor([float(written)])
    dist.all_reduce(total)
    assert (table.gather(all_rows) == total).all(), "an update is lost"
    dist.barrier()  # the table's memory is opened through the process that created it
    return written


def read_concurrently(table: EmbeddingTable, all_rows: Tensor) -> None:
    """Read until there have been enough changes."""
    last, changes = torch.zeros(ROWS), 0
    deadline = time.monotonic() + 40
    while changes < CHANGES:
        assert time.monotonic() < deadline
        rows = table.gather(all_rows)
        assert is_uniform(rows)
        assert (rows[:, 0] >= last).all(), "a row changed back"
        changes += int((rows[:, 0] > last).sum())
        pooled = table.pool(all_rows.view(ROWS, 1), mode="max")
        assert is_uniform(pooled)
        assert (pooled[:, 0] >= rows[:, 0]).all()
        last = pooled[:, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("writers", "size"), [(1, 3), (2, 4)])
def test_reads_see_complete_rows(ranks: RankServer, writers: int, size: int) -> None:
    written = ranks.run(size, read_and_write, writers)
    assert all(written[:writers])


def write_forever() -> None:
    table = EmbeddingTable.open(receive_handle())
    number = 0.0
    while True:
        number += 1
        state = torch.full((ROWS, WIDTH), number)
        table.load_state_dict(
            {"weight": state, "exp_avg": state, "exp_avg_sq": state, "step": torch.tensor(0)}
        )
        Path(os.environ["FOLDER"], "wrote").touch()


def read_despite_kills(kills: int) -> None:
    """Read and write while children that write are killed at random moments."""
    table = EmbeddingTable(ROWS, WIDTH, Adam(), weight=torch.zeros(ROWS, WIDTH))
    publish(table)
    marker = Path(os.environ["FOLDER"], "wrote")
    for _ in range(kills):
        marker.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                write_forever()
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not marker.exists():
            assert time.monotonic() < deadline
        for _ in range(int(torch.randint(1, 50, ()))):
            state = table.state_dict()
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        state = table.state_dict()
        assert is_uniform(state["weight"])
        assert torch.equal(state["weight"], state["exp_avg"])
        assert torch.equal(state["weight"], state["exp_avg_sq"])
        table.load_state_dict(state)


def test_killed_writer_leaves_complete_rows(ranks: RankServer) -> None:
    ranks.run(1, read_despite_kills, 12, timeout=None)


def read_despite_stopped_writer() -> None:
    from phalanx.embedding import table as table_module

    table = EmbeddingTable(ROWS, 1 << 20, SGD(), name="clicks", weight=torch.zeros(ROWS, 1 << 20))
    gradients = torch.ones(ROWS, table.width)
    child = os.fork()
    if child == 0:
        try:
            while True:
                table.update(torch.arange(ROWS), gradients)
        finally:
            os._exit(1)
    table_module._ROW_TIMEOUT_SECONDS = 0.05
    failure = None
    deadline = time.monotonic() + 30
    while failure is None:
        step = table.step
        while table.step == step:  # afterwards it holds rows most of the time
            assert time.monotonic() < deadline
        os.kill(child, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        try:
            table.gather(torch.arange(ROWS))
        except PhalanxError as error:
            failure = str(error)
        else:
            os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"being written by process {child} for more than 0.05 s" in failure
    assert "'clicks': row " in failure
    table.gather(torch.arange(ROWS))


def test_stopped_writer_is_named(ranks: RankServer) -> None:
    ranks.run(1, read_despite_stopped_writer, timeout=None)


def read_until_server_dies() -> str:
    if int(os.environ["RANK"]) == 0:
        table = EmbeddingTable(ROWS, WIDTH, name="clicks")
        publish(table)
        deadline = time.monotonic() + 30
        while not Path(os.environ["FOLDER"], "opened").exists():
            assert time.monotonic() < deadline
        os.kill(os.getpid(), signal.SIGKILL)
    table = _MappedTable(receive_handle())
    table.gather(torch.arange(ROWS))
    Path(os.environ["FOLDER"], "opened").touch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            table.gather(torch.arange(ROWS))
        except PeerLost as error:
            return str(error)
    return "no error"


def test_rows_of_a_dead_server_are_not_read(ranks: RankServer) -> None:
    run = ranks.start(2, read_until_server_dies, timeout=None)
    exits = run.join()
    assert exits[1].value == (
        f"table 'clicks': its server (pid {exits[0].pid}) has exited: restart the job from its "
        "last checkpoint"
    )


EMBEDDINGS, STEPS = 40, 6
GROUPS: list[Any] = []


def make_weight(rows: Tensor) -> Tensor:
    return torch.sin(rows[:, None] * 0.7 + torch.arange(5)).double()


def make_batch(step: int, trainer: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randint(0, EMBEDDINGS, (3 + step, 3), generator=generator)


def train(bag: ShardedEmbeddingBag, batches: list[Tensor]) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        loss = (bag(batch) - 0.5).square().mean()
        loss.backward()
        if step + 1 < len(batches):
            bag.prefetch(batches[step + 1])
        bag.step()
        losses.append(float(loss.detach()))
    return losses


def train_by_calls(
    trainers: int, servers: int, split: str, is_local: bool, is_collective: bool
) -> list[float] | None:
    """Train on the first ranks with servers on the others."""
    rank = int(os.environ["RANK"])
    GROUPS[:] = [dist.new_group(list(range(trainers)))]
    rpc.init_rpc(f"worker{rank}")
    losses = None
    if rank == 0:
        servers = embedding.deploy(
            [f"worker{trainers + worker}" for worker in range(servers)],
            EMBEDDINGS,
            5,
            Adam(0.05),
            sharding=split,
            trainers=trainers,
            timeout=30.0,
            dtype=torch.float64,
            weight=make_weight,
        )
        futures = [
            rpc.rpc_async(
                f"worker{worker}", train_with, (servers, worker, split, is_local, is_collective)
            )
            for worker in range(trainers)
        ]
        parts = [future.wait() for future in futures]
        losses = [sum(step) / trainers for step in zip(*parts, strict=True)]
    rpc.shutdown()
    return losses


def train_with(
    servers: list[rpc.RRef[EmbeddingServer]],
    trainer: int,
    split: str,
    is_local: bool,
    is_collective: bool,
) -> list[float]:
    group = GROUPS[0] if is_collective else None
    if is_collective:
        with pytest.raises(
            UsageError, match=r"trainer=\d of 2 given .* this process is rank \d of 2"
        ):
            ShardedEmbeddingBag(
                EMBEDDINGS, 5, servers, trainer=1 - trainer, sharding=split, group=group
            )
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers, trainer=trainer, sharding=split, group=group)
    assert bag.table.is_local == [is_local] * len(servers)
    assert (bag._collective_update is not None) == (is_collective and is_local)
    return train(bag, [make_batch(step, trainer) for step in range(STEPS)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("trainers", "servers", "split", "hosts", "is_collective"),
    [
        (2, 1, "range", "aaa", False),
        (2, 1, "range", "aaa", True),
        (2, 2, "hash", "aaaa", True),
        (2, 2, "hash", "aabb", True),
    ],
)
def test_trainers_have_the_losses_of_one_process(
    ranks: RankServer, trainers: int, servers: int, split: str, hosts: str, is_collective: bool
) -> None:
    is_local = "b" not in hosts
    losses = ranks.run(
        trainers + servers,
        train_by_calls,
        *(trainers, servers, split, is_local, is_collective),
        hosts=hosts,
    )[0]
    server = EmbeddingServer.create_shard(
        RangeSharding(EMBEDDINGS, 1), 0, 5, Adam(0.05), dtype=torch.float64, weight=make_weight
    )
    single_bag = ShardedEmbeddingBag(EMBEDDINGS, 5, [server])
    batches = [
        torch.cat([make_batch(step, trainer) for trainer in range(trainers)])
        for step in range(STEPS)
    ]
    torch.testing.assert_close(losses, train(single_bag, batches), rtol=1e-12, atol=1e-12)


def step_without_trainer() -> str:
    """Step while another trainer is killed; return the error."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 1:
        time.sleep(30)
    servers = embedding.deploy(["worker0"], EMBEDDINGS, 5, trainers=2, name="clicks")
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers)
    servers[0].local_value().register_trainer(1, 1)
    bag(torch.tensor([[1, 2]])).sum().backward()
    other = agent().peers[1].record.pid
    os.kill(other, signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        bag.step()
    rpc.shutdown(graceful=False)
    return str(caught.value).replace(str(other), "PID")


def test_dead_trainer_is_named(ranks: RankServer) -> None:
    exits = ranks.start(2, step_without_trainer).join()
    assert str(exits[0].value).startswith(
        "table 'clicks': trainer 1 is lost: worker 'worker1' (id 1, pid PID on "
    ), exits[0].report()
