"""Tables that processes of a host read while others write to them, and servers that die."""

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
    RangeShards,
    Server,
    ShardedEmbeddingBag,
    Table,
    TableHandle,
)
from phalanx.embedding.lookup import _Memory
from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.rpc.current_agent import agent
from tests.ranks import RankServer

ROWS, WIDTH = 16, 33
# Changed rows that a reader sees.
CHANGES = 2000


def share(table: Table) -> None:
    """Say where a table is; it appears whole."""
    path = Path(os.environ["FOLDER"], "table")
    path.with_suffix(".new").write_bytes(pickle.dumps(table.handle))
    path.with_suffix(".new").rename(path)


def shared() -> TableHandle:
    path = Path(os.environ["FOLDER"], "table")
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
    handle: TableHandle = pickle.loads(path.read_bytes())
    return handle


def whole(rows: Tensor) -> bool:
    return bool((rows == rows[..., :1]).all())


def read_and_write(writers: int) -> int:
    """The first ranks write until the others have seen enough; returns how many writes it made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = Table(ROWS, WIDTH, SGD(1.0), weight=torch.zeros(ROWS, WIDTH)) if rank == 0 else None
    told = [made.handle if made else None]
    dist.broadcast_object_list(told)
    table = made or Table.open(told[0])
    every = torch.arange(ROWS)
    folder = Path(os.environ["FOLDER"])
    written = 0
    if rank < writers:
        while len([*folder.glob("seen*")]) < size - writers:
            for _ in range(50):
                table.update(every, torch.full((ROWS, WIDTH), -1.0))
                written += 1
    else:
        read_beside(table, every)
        (folder / f"seen{rank}").touch()
    total = torch.tensor([float(written)])
    dist.all_reduce(total)
    assert (table.gather(every) == total).all(), "an update is lost"
    dist.barrier()  # the table's memory is opened through the process that made it
    return written


def read_beside(table: Table, every: Tensor) -> None:
    """Until there have been enough changes."""
    last, changes = torch.zeros(ROWS), 0
    end = time.monotonic() + 40
    while changes < CHANGES:
        assert time.monotonic() < end
        rows = table.gather(every)
        assert whole(rows)
        assert (rows[:, 0] >= last).all(), "a row went back"
        changes += int((rows[:, 0] > last).sum())
        pooled = table.pool(every.view(ROWS, 1), mode="max")
        assert whole(pooled)
        assert (pooled[:, 0] >= rows[:, 0]).all()
        last = pooled[:, 0]


@pytest.mark.parametrize(("writers", "size"), [(1, 3), (2, 4)])
def test_every_row_that_is_read_is_one_write(ranks: RankServer, writers: int, size: int) -> None:
    written = ranks.run(size, read_and_write, writers)
    assert all(written[:writers])


def write_for_ever() -> None:
    table = Table.open(shared())
    number = 0.0
    while True:
        number += 1
        state = torch.full((ROWS, WIDTH), number)
        table.load_state_dict(
            {"weight": state, "exp_avg": state, "exp_avg_sq": state, "step": torch.tensor(0)}
        )
        Path(os.environ["FOLDER"], "wrote").touch()


def outlive(kills: int) -> None:
    """Write beside children that are killed at any moment."""
    table = Table(ROWS, WIDTH, Adam(), weight=torch.zeros(ROWS, WIDTH))
    share(table)
    wrote = Path(os.environ["FOLDER"], "wrote")
    for _ in range(kills):
        wrote.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                write_for_ever()
            finally:
                os._exit(1)
        end = time.monotonic() + 30
        while not wrote.exists():
            assert time.monotonic() < end
        for _ in range(int(torch.randint(1, 50, ()))):
            state = table.state_dict()
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        state = table.state_dict()
        assert whole(state["weight"])
        assert torch.equal(state["weight"], state["exp_avg"])
        assert torch.equal(state["weight"], state["exp_avg_sq"])
        table.load_state_dict(state)


def test_a_writer_that_is_killed_leaves_whole_rows(ranks: RankServer) -> None:
    ranks.run(1, outlive, 12, timeout=None)


def outlive_a_stopped_one() -> None:
    from phalanx.embedding import table as table_module

    table = Table(ROWS, 1 << 20, SGD(), name="clicks", weight=torch.zeros(ROWS, 1 << 20))
    gradients = torch.ones(ROWS, table.width)
    child = os.fork()
    if child == 0:
        try:
            while True:
                table.update(torch.arange(ROWS), gradients)
        finally:
            os._exit(1)
    table_module._PATIENCE = 0.05
    failure = None
    end = time.monotonic() + 30
    while failure is None:
        step = table.step
        while table.step == step:  # from then on it takes rows, most of the time
            assert time.monotonic() < end
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


def test_a_writer_that_is_stopped_is_named(ranks: RankServer) -> None:
    ranks.run(1, outlive_a_stopped_one, timeout=None)


def lose_the_server() -> str:
    if int(os.environ["RANK"]) == 0:
        table = Table(ROWS, WIDTH, name="clicks")
        share(table)
        end = time.monotonic() + 30
        while not Path(os.environ["FOLDER"], "opened").exists():
            assert time.monotonic() < end
        os.kill(os.getpid(), signal.SIGKILL)
    memory = _Memory(shared())
    memory.gather(torch.arange(ROWS))
    Path(os.environ["FOLDER"], "opened").touch()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            memory.gather(torch.arange(ROWS))
        except PeerLost as error:
            return str(error)
    return "it went on"


def test_rows_of_a_dead_server_are_not_read(ranks: RankServer) -> None:
    run = ranks.start(2, lose_the_server, timeout=None)
    ended = run.join()
    assert ended[1].value == (
        f"table 'clicks': its server (pid {ended[0].pid}) has ended: start the job again from its "
        "last checkpoint"
    )


EMBEDDINGS, STEPS = 40, 6
GROUPS: list[Any] = []


def weight_of(rows: Tensor) -> Tensor:
    return torch.sin(rows[:, None] * 0.7 + torch.arange(5)).double()


def batch_of(step: int, trainer: int) -> Tensor:
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
    trainers: int, servers: int, split: str, in_memory: bool, together: bool
) -> list[float] | None:
    """Trainers come first, then servers."""
    rank = int(os.environ["RANK"])
    GROUPS[:] = [dist.new_group(list(range(trainers)))]
    rpc.init_rpc(f"worker{rank}")
    losses = None
    if rank == 0:
        places = embedding.serve(
            [f"worker{trainers + each}" for each in range(servers)],
            EMBEDDINGS,
            5,
            Adam(0.05),
            shards=split,
            trainers=trainers,
            timeout=30.0,
            dtype=torch.float64,
            weight=weight_of,
        )
        futures = [
            rpc.rpc_async(f"worker{each}", train_with, (places, each, split, in_memory, together))
            for each in range(trainers)
        ]
        parts = [future.wait() for future in futures]
        losses = [sum(step) / trainers for step in zip(*parts, strict=True)]
    rpc.shutdown()
    return losses


def train_with(
    places: list[rpc.RRef[Server]], trainer: int, split: str, in_memory: bool, together: bool
) -> list[float]:
    group = GROUPS[0] if together else None
    if together:
        with pytest.raises(UsageError, match=r"trainer=\d of 2 given .* this is rank \d of 2"):
            ShardedEmbeddingBag(
                EMBEDDINGS, 5, places, trainer=1 - trainer, shards=split, group=group
            )
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, places, trainer=trainer, shards=split, group=group)
    assert bag.rows.in_memory == [in_memory] * len(places)
    assert (bag._together is not None) == (together and in_memory)
    return train(bag, [batch_of(step, trainer) for step in range(STEPS)])


@pytest.mark.parametrize(
    ("trainers", "servers", "split", "hosts", "together"),
    [
        (2, 1, "range", "aaa", False),
        (2, 1, "range", "aaa", True),
        (2, 2, "hash", "aaaa", True),
        (2, 2, "hash", "aabb", True),
    ],
)
def test_trainers_have_the_losses_of_one_process(
    ranks: RankServer, trainers: int, servers: int, split: str, hosts: str, together: bool
) -> None:
    in_memory = "b" not in hosts
    found = ranks.run(
        trainers + servers,
        train_by_calls,
        *(trainers, servers, split, in_memory, together),
        hosts=hosts,
    )[0]
    server = Server.of_shard(
        RangeShards(EMBEDDINGS, 1), 0, 5, Adam(0.05), dtype=torch.float64, weight=weight_of
    )
    alone = ShardedEmbeddingBag(EMBEDDINGS, 5, [server])
    batches = [
        torch.cat([batch_of(step, trainer) for trainer in range(trainers)]) for step in range(STEPS)
    ]
    torch.testing.assert_close(found, train(alone, batches), rtol=1e-12, atol=1e-12)


def lose_trainers() -> str:
    """A trainer that dies ends the wait of the others, who are told which."""
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 1:
        time.sleep(30)
    places = embedding.serve(["worker0"], EMBEDDINGS, 5, trainers=2, name="clicks")
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, places)
    places[0].local_value().enrol(1, 1)
    bag(torch.tensor([[1, 2]])).sum().backward()
    other = agent().peers[1].record.pid
    os.kill(other, signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        bag.step()
    rpc.shutdown(graceful=False)
    return str(caught.value).replace(str(other), "PID")


def test_a_trainer_that_dies_is_named(ranks: RankServer) -> None:
    ended = ranks.start(2, lose_trainers).join()
    assert str(ended[0].value).startswith(
        "table 'clicks': trainer 1 is lost: worker 'worker1' (id 1, pid PID on "
    ), ended[0].report()
