"""Tables whose parts are on two servers each: servers die, and no acknowledged update is lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from phalanx import embedding, rpc
from phalanx.embedding import SGD, Adam, EmbeddingServer, RangeSharding, ShardedEmbeddingBag
from phalanx.embedding.replicated_server import ReplicatedServer
from phalanx.embedding.replication import ChangeSender, Replica
from phalanx.errors import PeerLost, PhalanxError, UsageError
from phalanx.rpc.agent import agent
from tests.multiprocess.test_embedding import EMBEDDINGS, make_batch, make_weight, train
from tests.ranks import RankServer, marker_file, wait_for_file

TRAINERS, SERVERS, STEPS = 2, 3, 60
NAMES = [f"worker{TRAINERS + number}" for number in range(SERVERS)]


def run_workers(job: Any, *arguments: Any) -> Any:
    """Run a function on worker 0, while the others are workers that it may call."""
    rank = int(os.environ["RANK"])
    options = rpc.RpcBackendOptions(init_method=f"file://{os.environ['FOLDER']}/store")
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=options)
    result = None
    if rank == 0:
        result = job(*arguments)
        marker_file("done").touch()
    else:
        wait_for_file("done", 60)
    rpc.shutdown(graceful=False)
    return result


def kill_later(victim: str, seconds: float) -> None:
    """Kill a worker after a time."""
    pid = rpc.rpc_sync(victim, os.getpid)
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def deploy_for_steps(names: Sequence[str] = NAMES) -> Sequence[ReplicatedServer]:
    return embedding.deploy(  # type: ignore[return-value] # they are replicated
        names,
        EMBEDDINGS,
        5,
        Adam(0.05),
        trainers=TRAINERS,
        timeout=30.0,
        dtype=torch.float64,
        weight=make_weight,
        replicated=True,
    )


def train_in_step(deaths: Sequence[tuple[str, float]]) -> list[float]:
    """Train with synchronous steps on two trainers; return the losses."""
    servers = deploy_for_steps()
    for victim, seconds in deaths:
        kill_later(victim, seconds)
    futures = [
        rpc.rpc_async(f"worker{trainer}", train_with, (servers, trainer))
        for trainer in range(TRAINERS)
    ]
    parts = [future.wait() for future in futures]
    return [sum(step) / TRAINERS for step in zip(*parts, strict=True)]


def train_with(servers: list[ReplicatedServer], trainer: int) -> list[float]:
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers, trainer=trainer)
    return train(bag, [make_batch(step, trainer) for step in range(STEPS)])


def single_losses() -> list[float]:
    """Return the losses of one process with the batches of all trainers."""
    server = EmbeddingServer.create_shard(
        RangeSharding(EMBEDDINGS, 1), 0, 5, Adam(0.05), dtype=torch.float64, weight=make_weight
    )
    batches = [
        torch.cat([make_batch(step, trainer) for trainer in range(TRAINERS)])
        for step in range(STEPS)
    ]
    return train(ShardedEmbeddingBag(EMBEDDINGS, 5, [server]), batches)


@pytest.mark.parametrize("hosts", ["aaaaa", "aabbc"])
@pytest.mark.parametrize("victim", [None, 0, 1, 2])
def test_losses_are_those_of_one_process(ranks: RankServer, victim: int | None, hosts: str) -> None:
    deaths = [] if victim is None else [(NAMES[victim], random.uniform(0.0, 0.2))]
    run = ranks.start(
        TRAINERS + SERVERS, run_workers, train_in_step, deaths, hosts=hosts, timeout=None
    )
    ended = run.join()
    lost = None if victim is None else TRAINERS + victim
    for each in ended:
        assert each.code == (-signal.SIGKILL if each.rank == lost else 0), each.report()
    torch.testing.assert_close(ended[0].value, single_losses(), rtol=1e-12, atol=1e-12)


def deploy_counters(names: Sequence[str]) -> Sequence[ReplicatedServer]:
    """Create a table whose rows count their updates."""
    return embedding.deploy(  # type: ignore[return-value] # they are replicated
        names,
        EMBEDDINGS,
        1,
        SGD(1.0),
        trainers=TRAINERS,
        staleness=2,
        timeout=30.0,
        dtype=torch.float64,
        weight=make_zeros,
        replicated=True,
    )


def start_counting(servers: Sequence[ReplicatedServer]) -> list[Any]:
    return [
        rpc.rpc_async(f"worker{trainer}", update_all, (servers, trainer))
        for trainer in range(TRAINERS)
    ]


def finish_counting(
    servers: Sequence[ReplicatedServer], futures: Sequence[Any]
) -> tuple[float, list[float]]:
    """Return how many updates were acknowledged, and how many each row has."""
    acknowledged = sum(future.wait() for future in futures)
    bag = ShardedEmbeddingBag(EMBEDDINGS, 1, servers, mode="sum", use_shared_memory=False)
    with torch.no_grad():
        return acknowledged, bag(torch.arange(EMBEDDINGS)[:, None]).flatten().tolist()


def count_updates(seconds: float) -> tuple[float, list[float]]:
    """Update all rows under a staleness bound; return the updates and the rows at the end."""
    servers = deploy_counters(NAMES)
    if seconds < math.inf:
        kill_later(NAMES[1], seconds)
    return finish_counting(servers, start_counting(servers))


def make_zeros(rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(rows), 1, dtype=torch.float64)


def update_all(servers: list[ReplicatedServer], trainer: int) -> int:
    bag = ShardedEmbeddingBag(EMBEDDINGS, 1, servers, mode="sum", trainer=trainer)
    for _ in range(STEPS):
        bag(torch.arange(EMBEDDINGS)[:, None]).sum().neg().backward()
        bag.step()
        bag.wait()
    return STEPS


OWNERS = {each.__name__: each for each in (EmbeddingServer, ChangeSender, Replica)}


def die_at(owner: str, method: str, moment: str, count: int) -> None:
    """Have this process die before or after a method, at the call with this number."""
    called, numbers = getattr(OWNERS[owner], method), itertools.count(1)

    @functools.wraps(called)
    def call(*arguments: Any, **options: Any) -> Any:
        is_last = next(numbers) == count
        if is_last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        value = called(*arguments, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(OWNERS[owner], method, call)


def count_updates_until(owner: str, method: str, moment: str, count: int) -> Any:
    rpc.rpc_sync(NAMES[1], die_at, (owner, method, moment, count))
    return count_updates(math.inf)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ("EmbeddingServer", "begin_update"),
        ("EmbeddingServer", "_make_step"),
        ("EmbeddingServer", "replicate"),
        ("ChangeSender", "send"),
        ("ChangeSender", "_end"),
        ("ChangeSender", "answered"),
    ],
)
def test_a_server_dies_at_each_step_of_an_update(
    ranks: RankServer, owner: str, method: str, moment: str
) -> None:
    arguments = owner, method, moment, random.randrange(3, 40)
    run = ranks.start(
        TRAINERS + SERVERS, run_workers, count_updates_until, *arguments, timeout=None
    )
    ended = run.join()
    codes = [each.code for each in ended]
    assert codes == [0, 0, 0, -signal.SIGKILL, 0], (arguments, ended[0].report())
    acknowledged, rows = ended[0].value
    assert rows == [float(acknowledged)] * EMBEDDINGS, arguments


def count_updates_in_a_move(victim: str, owner: str, method: str, moment: str) -> Any:
    """Move the copy of part 0 to a third server; one of the servers of the part dies meanwhile."""
    servers = deploy_counters(NAMES[:2])
    futures = start_counting(servers)
    rpc.rpc_sync(victim, die_at, (owner, method, moment, 1))
    with contextlib.suppress(PhalanxError):
        embedding.move(servers[:1], NAMES[1], NAMES[2])
    return finish_counting(servers, futures)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("victim", "owner", "method"),
    [
        (NAMES[0], "EmbeddingServer", "set_backup"),
        (NAMES[0], "Replica", "change_roles"),
        (NAMES[2], "EmbeddingServer", "begin_copy"),
        (NAMES[2], "EmbeddingServer", "replicate"),
    ],
)
def test_a_server_dies_at_each_step_of_a_copy(
    ranks: RankServer, victim: str, owner: str, method: str, moment: str
) -> None:
    arguments = victim, owner, method, moment
    run = ranks.start(
        TRAINERS + SERVERS, run_workers, count_updates_in_a_move, *arguments, timeout=None
    )
    ended = run.join()
    expected = [-signal.SIGKILL if f"worker{n}" == victim else 0 for n in range(5)]
    assert [each.code for each in ended] == expected, ended[0].report()
    acknowledged, rows = ended[0].value
    assert rows == [float(acknowledged)] * EMBEDDINGS


@pytest.mark.parametrize("hosts", ["aaaaa", "aabbc"])
def test_no_acknowledged_update_is_lost_or_made_twice(ranks: RankServer, hosts: str) -> None:
    delay = random.uniform(0.0, 0.2)
    run = ranks.start(
        TRAINERS + SERVERS, run_workers, count_updates, delay, hosts=hosts, timeout=None
    )
    ended = run.join()
    codes = [each.code for each in ended]
    assert codes == [0, 0, 0, -signal.SIGKILL, 0], ended[0].report()
    acknowledged, rows = ended[0].value
    assert rows == [float(acknowledged)] * EMBEDDINGS


def lose_both() -> str:
    servers = embedding.deploy(NAMES[:2], EMBEDDINGS, 5, dtype=torch.float64, replicated=True)
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers)
    for name in NAMES[:2]:
        kill_later(name, 0.0)
    with pytest.raises(PeerLost) as error:
        train(bag, [make_batch(step % STEPS, 0) for step in range(10_000)])
    with pytest.raises(UsageError, match="expected 2 at least"):
        embedding.deploy(NAMES[2:], EMBEDDINGS, 5, replicated=True)
    return str(error.value)


def test_both_servers_of_a_part_are_lost(ranks: RankServer) -> None:
    ended = ranks.start(TRAINERS + SERVERS, run_workers, lose_both, timeout=None).join()
    assert ended[0].code == 0, ended[0].report()
    assert "no server with a copy of it is left: worker" in ended[0].value


def lose_contact() -> list[float]:
    """Trainer 0 takes the primary of part 0 for lost, which lives and still has trainer 1."""
    servers = deploy_for_steps()
    futures = [
        rpc.rpc_async(f"worker{trainer}", train_without_contact, (servers, trainer))
        for trainer in range(TRAINERS)
    ]
    parts = [future.wait() for future in futures]
    marker_file("done").touch()
    return [sum(step) / TRAINERS for step in zip(*parts, strict=True)]


def train_without_contact(servers: list[ReplicatedServer], trainer: int) -> list[float]:
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers, trainer=trainer, use_shared_memory=False)
    batches = [make_batch(step, trainer) for step in range(STEPS)]
    losses = train(bag, batches[:20])
    if trainer == 0:
        own = agent()
        own.mark_lost(own.peers[servers[0].roles.primary], "lost as the test wants")
    losses += train(bag, batches[20:])
    assert servers[0].roles[1:] == (TRAINERS + 1, None)
    return losses


def test_a_primary_that_only_one_trainer_has_lost(ranks: RankServer) -> None:
    """It answers nobody any more, so that no update is made on one server only."""
    ended = ranks.start(TRAINERS + SERVERS, run_workers, lose_contact, timeout=None).join()
    assert ended[0].code == 0, ended[0].report()
    torch.testing.assert_close(ended[0].value, single_losses(), rtol=1e-12, atol=1e-12)


def change_servers() -> list[float]:
    """Move parts, lose a server, and give the parts other ones, while trainers train."""
    servers = deploy_for_steps(NAMES[:2])
    futures = [
        rpc.rpc_async(f"worker{trainer}", train_slowly, (servers, trainer))
        for trainer in range(TRAINERS)
    ]
    wait_for_file("step5")
    embedding.move(servers, NAMES[0], NAMES[2])
    for part, roles in enumerate([(TRAINERS + 1, TRAINERS + 2), (TRAINERS + 1, TRAINERS + 2)]):
        assert servers[part].roles[1:] == roles
    with pytest.raises(UsageError, match="move: worker 'worker4' serves part 0 already"):
        embedding.move(servers, NAMES[1], NAMES[2])
    marker_file("moved").touch()
    wait_for_file("step25")
    os.kill(rpc.rpc_sync(NAMES[1], os.getpid), signal.SIGKILL)
    wait_for_file("step35")
    embedding.replicate(servers, [NAMES[0], NAMES[2]])
    assert [part.roles[1:] for part in servers] == [(TRAINERS + 2, TRAINERS)] * 2
    with pytest.raises(UsageError, match="expected one other than worker 4"):
        embedding.replicate([LoneServer(servers[0])], [NAMES[2]])  # type: ignore[list-item]
    os.kill(rpc.rpc_sync(NAMES[2], os.getpid), signal.SIGKILL)
    parts = [future.wait() for future in futures]
    marker_file("done").touch()
    return [sum(step) / TRAINERS for step in zip(*parts, strict=True)]


class LoneServer:
    """A part that looks as if it had no backup."""

    def __init__(self, part: ReplicatedServer) -> None:
        self.roles = part.roles._replace(backup=None)
        self.start_call = part.start_call


def train_slowly(servers: list[ReplicatedServer], trainer: int) -> list[float]:
    bag = ShardedEmbeddingBag(EMBEDDINGS, 5, servers, trainer=trainer)
    losses = []
    for step in range(STEPS):
        losses += train(bag, [make_batch(step, trainer)])
        if trainer == 0:
            marker_file(f"step{step}").touch()
        if step == 20:
            wait_for_file("moved")
    return losses


@pytest.mark.parametrize("hosts", ["aaaaa", "abcde"])
def test_servers_come_and_go_while_trainers_train(ranks: RankServer, hosts: str) -> None:
    ended = ranks.start(
        TRAINERS + SERVERS, run_workers, change_servers, timeout=None, hosts=hosts
    ).join()
    codes = [each.code for each in ended]
    assert codes == [0, 0, 0, -signal.SIGKILL, -signal.SIGKILL], ended[0].report()
    torch.testing.assert_close(ended[0].value, single_losses(), rtol=1e-12, atol=1e-12)


def train_while_trainers_change(staleness: int | None, replicated: bool) -> None:
    """Workers 1 and 2 train beside this one; 1 dies, 2 leaves, and then 1's number comes back."""
    servers = embedding.deploy(
        NAMES[1:],
        EMBEDDINGS,
        1,
        SGD(1.0),
        trainers=None,
        staleness=staleness,
        timeout=30.0,
        dtype=torch.float64,
        weight=make_zeros,
        replicated=replicated,
    )
    bag = ShardedEmbeddingBag(EMBEDDINGS, 1, servers, mode="sum")
    assert read(bag) == [0.0]
    update(bag, 1)
    assert read(bag) == [1.0]  # alone
    futures = [rpc.rpc_async(f"worker{n}", update_as, (servers, n, 4 * n)) for n in (1, 2)]
    wait_for_file("present1")
    wait_for_file("present2")
    for _ in range(8):
        update(bag, 1)
    futures[1].wait()
    bound = staleness or 0
    for _ in range(20):
        update(bag, 1)
    with pytest.raises(PeerLost):
        futures[0].wait()
    made = 29 if staleness is None else 29 + 8 + 4
    assert made - 4 * bound <= read(bag)[0] <= made + bound
    assert len(set(read(bag))) == 1
    bag.trainer = 1  # which was removed
    with pytest.raises(UsageError, match=r"trainer=1 given, expected one of those .*\[0\]"):
        update(bag, 1)


def read(bag: ShardedEmbeddingBag) -> list[float]:
    with torch.no_grad():
        return sorted(set(bag(torch.arange(EMBEDDINGS)[:, None]).flatten().tolist()))


def update(bag: ShardedEmbeddingBag, count: int) -> None:
    for _ in range(count):
        bag(torch.arange(EMBEDDINGS)[:, None]).sum().neg().backward()
        bag.step()
        bag.wait()


def update_as(servers: Any, trainer: int, count: int) -> None:
    """Make some updates; then die as trainer 1, and leave as trainer 2."""
    bag = ShardedEmbeddingBag(EMBEDDINGS, 1, servers, mode="sum", trainer=trainer)
    marker_file(f"present{trainer}").touch()
    update(bag, count)
    if trainer == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    bag.leave()


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("staleness", [None, 3])
def test_trainers_come_and_go(ranks: RankServer, staleness: int | None, replicated: bool) -> None:
    run = ranks.start(
        TRAINERS + SERVERS,
        run_workers,
        train_while_trainers_change,
        staleness,
        replicated,
        timeout=None,
    )
    ended = run.join()
    codes = [each.code for each in ended]
    assert codes == [0, -signal.SIGKILL, 0, 0, 0], ended[0].report()
