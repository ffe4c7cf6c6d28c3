"""Groups with several connections between two ranks."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import key
from phalanx.backend.options import MAX_CONNECTIONS
from phalanx.errors import PhalanxError, UsageError
from phalanx.hierarchical.execution import CHUNKS_IN_FLIGHT
from tests.fault.test_shrink import fail_until_lost
from tests.ranks import RankServer, connect_ranks
from tests.seeds import fresh_seed

KEY = bytes(range(32))


def init(transport: str, connections: int) -> None:
    os.environ["PHALANX_KEY_FD"] = str(key.to_sealed_memory(KEY))
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=20),
        pg_options=phalanx.Options(transport, connections=connections),
    )


def count_connections() -> int:
    return sum(
        each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp")
    )


def compare(transport: str, seed: int) -> int:
    """Compare with Gloo; return the number of TCP connections more than with one."""
    init(transport, 1)
    dist.all_reduce(torch.ones(9_000_000))
    before = count_connections()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="phalanx", pg_options=phalanx.Options(transport, connections=3))
    gloo = dist.new_group(backend="gloo")
    for count in (1, 1000, 9_000_001):
        generator = torch.Generator().manual_seed(seed + rank)
        tensor = torch.randint(-99, 99, (count,), generator=generator, dtype=torch.int32)
        expected = tensor.clone()
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(expected, group=gloo)
        assert torch.equal(tensor, expected)
        received = torch.empty_like(tensor)
        work: Any = dist.irecv(received, (rank - 1) % size, group=group)
        dist.send(tensor, (rank + 1) % size, group=group)
        work.wait()
        assert torch.equal(received, expected)
    dist.destroy_process_group(gloo)
    more = count_connections() - before
    dist.barrier()
    dist.destroy_process_group()
    return more


@pytest.mark.parametrize("transport", ("gloo", "relay"))
@pytest.mark.parametrize("hosts", ("ab", "aabb", "aab"))
def test_results(ranks: RankServer, transport: str, hosts: str) -> None:
    """Each rank has more connections; with the relay, two more to it."""
    seed = fresh_seed()
    more = ranks.run(len(hosts), compare, transport, seed, timeout=None, hosts=hosts)
    assert more[-1] >= 2


def loses_a_rank(transport: str) -> None:
    init(transport, 3)
    connect_ranks()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "rank 1" in str(fail_until_lost())
    change = phalanx.shrink()
    assert change.world_size == 2
    dist.all_reduce(tensor := torch.ones(3_000_000))
    assert torch.all(tensor == 2)
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ("gloo", "relay"))
def test_a_rank_is_lost(ranks: RankServer, transport: str) -> None:
    run = ranks.start(3, loses_a_rank, transport, timeout=None, hosts="abc")
    for each in run.join():
        assert each.code == (-signal.SIGKILL if each.rank == 1 else 0), each.report()


def disagrees() -> None:
    for connections in (0, 5, 2.5):
        with pytest.raises(UsageError, match=f"connections={connections} with the transport"):
            dist.new_group(
                backend="phalanx",
                pg_options=phalanx.Options(connections=connections),  # type: ignore[arg-type]
            )
    options = phalanx.Options(connections=1 + dist.get_rank())
    with pytest.raises(PhalanxError, match="with connections=2"):
        dist.new_group(backend="phalanx", pg_options=options)


def test_bad_options(ranks: RankServer) -> None:
    assert MAX_CONNECTIONS == CHUNKS_IN_FLIGHT
    ranks.run(2, disagrees, hosts="ab")


def inherits() -> None:
    init("gloo", 2)
    options = (None, phalanx.Options(), phalanx.Options(compress="int8"))
    groups: list[Any] = [dist.new_group(backend="phalanx", pg_options=each) for each in options]
    assert [each.link.connections for each in groups] == [2, 2, 2]
    others = (phalanx.Options(connections=1), phalanx.Options("relay"))
    groups = [dist.new_group(backend="phalanx", pg_options=each) for each in others]
    assert [each.link.connections for each in groups] == [1, 1]
    dist.destroy_process_group()


def test_groups_inherit_the_number(ranks: RankServer) -> None:
    ranks.run(2, inherits, timeout=None, hosts="ab")
