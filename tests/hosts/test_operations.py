"""Groups that span hosts, simulated on one host: the same results as on one host."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch
import torch.distributed as dist

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed
from tests.soak.plan import Plan
from tests.soak.rank import soak

# Block order, alternating, uneven, one rank per host.
LAYOUTS = ("aabb", "abab", "aab", "abcb", "ab", "abc", "aabbcc")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_random_operations(ranks: RankServer, hosts: str) -> None:
    """All kinds, dtypes and sizes, in overlapping groups, with messages beside them."""
    plan, count = Plan(fresh_seed(), len(hosts)), 250
    results = ranks.run(len(hosts), soak, plan, 0, count, 60.0, hosts=hosts)
    assert all(result.operations == count for result in results)
    assert all(result.checked > 0 for result in results)


def large_operations(seed: int) -> None:
    """Several chunks, of sizes without small divisors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = Random(seed)
    for dtype, count in (("float32", 3_000_017), ("bfloat16", 2_500_001), ("int64", 600_011)):
        inputs = [cases.data(dtype, count, seed, other) for other in range(size)]
        root = random.randrange(size)
        total = cases.folded("SUM", inputs)
        mine = inputs[rank].clone()
        dist.all_reduce(mine)
        cases.check_bits(mine, total, "all_reduce")
        mine = inputs[rank].clone()
        dist.reduce(mine, root)
        cases.check_bits(mine, total if rank == root else inputs[rank], "reduce")
        mine = cases.poisoned(inputs[0]) if rank != root else inputs[root].clone()
        dist.broadcast(mine, root)
        cases.check_bits(mine, inputs[root], "broadcast")
        everyone = [cases.poisoned(inputs[0]) for _ in inputs]
        dist.all_gather(everyone, inputs[rank])
        for other, tensor in enumerate(everyone):
            cases.check_bits(tensor, inputs[other], f"all_gather of {other}")
        part = cases.poisoned(inputs[0])
        dist.reduce_scatter(part, [tensor * (rank + 1) for tensor in inputs])
        expected = cases.folded("SUM", [inputs[rank] * (other + 1) for other in range(size)])
        cases.check_bits(part, expected, "reduce_scatter")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ("aabb", "abcb", "abc"))
def test_large_operations(ranks: RankServer, hosts: str) -> None:
    ranks.run(len(hosts), large_operations, fresh_seed(), timeout=60, hosts=hosts)


def repeated_sums(seed: int) -> list[str]:
    """Return digests of repeated sums of floats."""
    data = torch.randn(700_001, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    digests = []
    for _ in range(3):
        tensor = data.clone()
        dist.all_reduce(tensor)
        digests.append(cases.digest([tensor]))
    small = data[:100].clone()
    dist.all_reduce(small)
    exact = torch.stack(
        [
            torch.randn(700_001, generator=torch.Generator().manual_seed(seed + rank))[:100]
            for rank in range(dist.get_world_size())
        ]
    ).double()
    assert torch.allclose(small.double(), exact.sum(0), rtol=0, atol=1e-5)
    return [*digests, cases.digest([small])]


@pytest.mark.parametrize("hosts", ("aabb", "aab", "abc"))
def test_results_are_reproducible_and_equal_on_all_ranks(ranks: RankServer, hosts: str) -> None:
    seed = fresh_seed()
    first = ranks.run(len(hosts), repeated_sums, seed, hosts=hosts)
    again = ranks.run(len(hosts), repeated_sums, seed, hosts=hosts)
    assert len({tuple(each) for each in (*first, *again)}) == 1
    assert len(set(first[0][:3])) == 1


def group_types() -> tuple[str, list[str]]:
    """Return the types of the native groups of the default group and of subgroups."""
    world = type(dist.group.WORLD._membership.native).__name__  # type: ignore[union-attr]
    kinds = []
    for members in ([0, 1], [2, 3], [1, 2], [0, 1, 2], [3]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            kinds.append(type(group._membership.native).__name__)  # type: ignore[union-attr]
            tensor = torch.ones(5)
            dist.all_reduce(tensor, group=group)
            assert (tensor == len(members)).all()
    return world, kinds


def test_subgroups_on_one_host_use_memory_only(ranks: RankServer) -> None:
    answers = ranks.run(4, group_types, hosts="aabb")
    assert [world for world, _ in answers] == ["HierarchicalGroup"] * 4
    assert [kinds for _, kinds in answers] == [
        ["Group", "HierarchicalGroup"],
        ["Group", "HierarchicalGroup", "HierarchicalGroup"],
        ["Group", "HierarchicalGroup", "HierarchicalGroup"],
        ["Group", "Group"],
    ]


def listening_ports() -> list[int]:
    """Return the ports that this process listens on."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def test_no_listening_ports_on_one_host(ranks: RankServer) -> None:
    assert ranks.run(2, listening_ports) == [[], []]
    assert all(ranks.run(2, listening_ports, hosts="ab"))
