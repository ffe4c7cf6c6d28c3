"""send, recv, isend, irecv: every pair, dtype and size, tags, any source, any order."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

# Below, at and above the capacity of a channel (256 KiB), with and without the envelope.
SIZES = (0, 1, 3, 1000, 8192, 65_520, 65_536, 65_537, 200_000)


def message(seed: int, source: int, number: int, dtype: str = "float32", size: int = -1) -> Tensor:
    size = SIZES[number % len(SIZES)] if size < 0 else size
    return cases.data(dtype, size, seed, source, number)


def every_pair(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in range(len(SIZES)):
        for source in range(world_size):
            for target in range(world_size):
                sent = message(seed, source, number)
                if rank == source != target:
                    before = sent.clone()
                    assert dist.send(sent, target, tag=number) is None
                    cases.check_bits(sent, before, "what was sent")
                elif rank == target != source:
                    received = cases.poisoned(sent)
                    assert dist.recv(received, source, tag=number) == source
                    cases.check_bits(received, sent, f"{source} to {target}, {sent.numel()}")


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_every_pair(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, every_pair, fresh_seed())


def every_dtype(seed: int) -> None:
    for number, dtype in enumerate(cases.DTYPES):
        for size in (0, 1, 1001, 40_000):
            sent = message(seed, 0, number, dtype, size)
            if dist.get_rank() == 0:
                dist.send(sent, 1)
            else:
                received = cases.poisoned(sent)
                dist.recv(received, 0)
                cases.check_bits(received, sent, f"{dtype}[{size}]")


def test_every_dtype(ranks: RankServer) -> None:
    ranks.run(2, every_dtype, fresh_seed())


def sub_group_messages(seed: int) -> None:
    group = dist.new_group([1, 3])
    sent = message(seed, 1, 3)
    if dist.get_rank() == 1:
        dist.send(sent, 3, group)
        dist.send(sent, group=group, group_dst=1, tag=2)
    elif dist.get_rank() == 3:
        for tag, source in ((0, {"src": 1}), (2, {"group_src": 0})):
            received = cases.poisoned(sent)
            assert dist.recv(received, group=group, tag=tag, **source) == 1
            cases.check_bits(received, sent, "in a sub-group")


def test_in_a_sub_group(ranks: RankServer) -> None:
    ranks.run(4, sub_group_messages, fresh_seed())


def tags_out_of_order(seed: int) -> None:
    """Send with tags 0, 1, 2, ... and receive in reverse order; both sides block."""
    count = len(SIZES)
    if dist.get_rank() == 0:
        works = [dist.isend(message(seed, 0, number), 1, tag=number) for number in range(count)]
        for work in works:
            work.wait()
    else:
        for number in reversed(range(count)):
            sent = message(seed, 0, number)
            received = cases.poisoned(sent)
            dist.recv(received, 0, tag=number)
            cases.check_bits(received, sent, f"tag {number}")


def test_tags_out_of_order(ranks: RankServer) -> None:
    ranks.run(2, tags_out_of_order, fresh_seed())


def same_tag_in_order(seed: int) -> None:
    size = 1000
    sent = [message(seed, 0, number, "int32", size) for number in range(200)]
    if dist.get_rank() == 0:
        for tensor in sent:
            dist.isend(tensor, 1, tag=9)
    else:
        received = [cases.poisoned(tensor) for tensor in sent]
        works = [dist.irecv(tensor, 0, tag=9) for tensor in received]
        for work in reversed(works):
            work.wait()
        for number, tensor in enumerate(received):
            cases.check_bits(tensor, sent[number], f"message {number} of one tag")
    dist.barrier()


def test_messages_of_one_tag_keep_their_order(ranks: RankServer) -> None:
    """This includes messages whose isend work was dropped."""
    ranks.run(2, same_tag_in_order, fresh_seed())


def from_any_source(seed: int) -> list[int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sources = []
    if rank == 0:
        for _ in range(5 * (world_size - 1)):
            received = torch.full((1001,), float("nan"))
            source = dist.recv(received, tag=4)
            number = sources.count(source)
            expected = message(seed, source, number, size=1001)
            cases.check_bits(received, expected, f"message {number} of rank {source}")
            sources.append(source)
    else:
        for number in range(5):
            dist.send(message(seed, rank, number, size=1001), 0, tag=4)
    return sources


@pytest.mark.parametrize("world_size", (2, 4))
def test_from_any_source(ranks: RankServer, world_size: int) -> None:
    sources = ranks.run(world_size, from_any_source, fresh_seed())[0]
    assert sorted(sources) == sorted(5 * list(range(1, world_size)))


def any_source_beside_a_named_one(seed: int) -> int:
    """A recv from any rank does not match a message of another tag or group."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    if rank == 0:
        named, anyone = torch.zeros(10), torch.zeros(10)
        work = dist.irecv(anyone, tag=1)
        dist.recv(named, 1, tag=2)
        cases.check_bits(named, message(seed, 1, 2, size=10), "named")
        in_group = torch.zeros(10)
        dist.recv(in_group, 1, group, tag=1)
        cases.check_bits(in_group, message(seed, 1, 3, size=10), "in the other group")
        dist.barrier()
        work.wait()
        source = work._source_rank()
        cases.check_bits(anyone, message(seed, source, 1, size=10), "anyone")
        return source
    if rank == 1:
        dist.send(message(seed, 1, 2, size=10), 0, tag=2)
        dist.send(message(seed, 1, 3, size=10), 0, group, tag=1)
    dist.barrier()
    if rank == 2:
        dist.send(message(seed, 2, 1, size=10), 0, tag=1)
    return 2


def test_any_source_beside_a_named_one(ranks: RankServer) -> None:
    assert ranks.run(3, any_source_beside_a_named_one, fresh_seed())[0] == 2


def random_order(seed: int) -> int:
    """Exchange messages between all pairs; each rank posts isends and irecvs in its own order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = random.Random(seed)
    messages = [
        (source, target, number, plan.choice((0, 1, 500, 5000, 70_000)))
        for number in range(60)
        for source, target in [plan.sample(range(world_size), 2)]
    ]
    own_order = random.Random(seed + rank)
    posts = [entry for entry in messages if rank in entry[:2]]
    own_order.shuffle(posts)
    works, expected = [], []
    for source, target, number, size in posts:
        sent = message(seed, source, number, "int32", size)
        if rank == source:
            works.append(dist.isend(sent, target, tag=number))
        else:
            received = cases.poisoned(sent)
            expected.append((received, sent, number))
            works.append(dist.irecv(received, source, tag=number))
    own_order.shuffle(works)
    for work in works:
        work.wait()
        assert work.is_completed()
    for received, sent, number in expected:
        cases.check_bits(received, sent, f"message {number}")
    return len(posts)


@pytest.mark.parametrize("world_size", (2, 3, 4))
@pytest.mark.parametrize("repetition", range(3))
def test_random_order(ranks: RankServer, world_size: int, repetition: int) -> None:
    assert sum(ranks.run(world_size, random_order, fresh_seed())) == 120


def batch(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for size in (0, 10, 300_000):
        sent = message(seed, rank, 0, size=size)
        received = cases.poisoned(sent)
        operations = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, sent, right)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        cases.check_bits(received, message(seed, left, 0, size=size), f"ring of {size}")


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_batch_isend_irecv(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, batch, fresh_seed())


def non_contiguous(seed: int) -> None:
    sent = message(seed, 0, 0, size=60).reshape(6, 10)
    if dist.get_rank() == 0:
        dist.send(sent.t(), 1)
        dist.send(sent[:, ::3], 1)
    else:
        whole = torch.full((10, 12), float("nan"))
        dist.recv(whole[:, ::2], 0)
        assert torch.equal(whole[:, ::2], sent.t())
        assert whole[:, 1::2].isnan().all()
        other = torch.full((4, 6), float("nan")).t()
        work = dist.irecv(other, 0)
        work.wait()
        assert torch.equal(other, sent[:, ::3])


def test_non_contiguous(ranks: RankServer) -> None:
    ranks.run(2, non_contiguous, fresh_seed())
