"""Many messages: thousands outstanding, in any order on all sides, beside other operations."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

# Mostly small, some around and above the capacity of a channel (256 KiB).
SIZES = (0, 1, 1, 2, 7, 100, 100, 1000, 5000, 65_520, 65_536, 100_000)
SMALL = SIZES[:-4]


@dataclass(frozen=True)
class PlannedMessage:
    """A message of a plan that all ranks know."""

    source: int
    target: int
    tag: int
    number: int  # among messages of this source, target and tag
    size: int
    any_source: bool

    def data(self, seed: int) -> Tensor:
        names = (self.source, self.target, self.tag, self.number)
        return cases.data("int32", self.size, seed, *names)


def make_plan(
    seed: int, count: int, world_size: int, sizes: tuple[int, ...], unique: int = 1000
) -> list[PlannedMessage]:
    """Return random messages; a recv from any source needs a tag of one source only.

    Those tags begin at `unique`; concurrent plans must not share them.
    """
    choice = random.Random(seed)
    numbers: dict[tuple[int, int, int], int] = {}
    letters = []
    for index in range(count):
        source, target = choice.randrange(world_size), choice.randrange(world_size)
        any_source = choice.random() < 0.2
        tag = unique + index if any_source else choice.randrange(40)
        # All messages of one tag have one size, since a source may be ahead with any of its own.
        size = sizes[tag % len(sizes)]
        number = numbers.get((source, target, tag), 0)
        numbers[source, target, tag] = number + 1
        letters.append(PlannedMessage(source, target, tag, number, size, any_source))
    return letters


def shuffled(letters: list[PlannedMessage], choice: random.Random) -> list[PlannedMessage]:
    """Return a random order that preserves the order within one source, target and tag."""
    order = letters.copy()
    choice.shuffle(order)
    queues: dict[tuple[int, int, int], list[PlannedMessage]] = {}
    for letter in letters:
        queues.setdefault((letter.source, letter.target, letter.tag), []).append(letter)
    return [queues[letter.source, letter.target, letter.tag].pop(0) for letter in order]


class Exchange:
    """The messages of one rank in one plan."""

    def __init__(
        self, seed: int, letters: list[PlannedMessage], group: dist.ProcessGroup | None
    ) -> None:
        self.seed = seed
        self.group = group
        rank = dist.get_rank(group)
        choice = random.Random(seed * 31 + rank)
        sends = [(True, letter) for letter in shuffled(letters, choice) if letter.source == rank]
        recvs = [(False, letter) for letter in shuffled(letters, choice) if letter.target == rank]
        merged = [True] * len(sends) + [False] * len(recvs)
        choice.shuffle(merged)
        queues = {True: iter(sends), False: iter(recvs)}
        self.posts = [next(queues[is_send]) for is_send in merged]
        self.works: list[dist.Work] = []
        self.received: list[tuple[PlannedMessage, Tensor, dist.Work]] = []

    def post(self, is_send: bool, letter: PlannedMessage) -> None:
        if is_send:
            sent = letter.data(self.seed)
            work = dist.isend(sent, group=self.group, group_dst=letter.target, tag=letter.tag)
        else:
            received = cases.poisoned(letter.data(self.seed))
            source = None if letter.any_source else letter.source
            work = dist.irecv(received, group=self.group, group_src=source, tag=letter.tag)
            self.received.append((letter, received, work))
        self.works.append(work)

    def finish(self, choice: random.Random) -> int:
        choice.shuffle(self.works)
        for work in self.works:
            way = choice.randrange(8)
            if way == 0:
                work.get_future().wait()
            elif way == 1:
                while not work.is_completed():
                    pass
            else:
                work.wait()
            assert work.is_success()
        for letter, received, work in self.received:
            cases.check_bits(received, letter.data(self.seed), f"{letter}")
            assert work._source_rank() == letter.source
        return len(self.works)


def rounds(seed: int, count: int, sizes: tuple[int, ...]) -> int:
    """Exchange rounds of messages in the default group and a sub-group, between collectives.

    A round waits for messages of the previous round, which all ranks have posted.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = dist.new_group([0, world_size - 1])
    choice = random.Random(seed * 17 + rank)
    last: list[Exchange] = []
    done = 0
    for number in range(3):
        unique = 10_000 * (number + 1)
        letters = make_plan(seed + number, count, world_size, sizes, unique)
        exchanges = [Exchange(seed + number, letters, None)]
        if rank in (0, world_size - 1):
            letters = make_plan(seed + 50 + number, count // 4, 2, sizes, unique)
            exchanges.append(Exchange(seed + 50 + number, letters, part))
        steps = [(exchange, *post) for exchange in exchanges for post in exchange.posts]
        # Messages of one exchange keep their order; collectives are placed at random.
        collectives = {choice.randrange(len(steps) + 1): async_op for async_op in (False, True)}
        summed = []
        for index, (exchange, is_send, letter) in enumerate(steps):
            if index in collectives and len(collectives) == 2:
                summed.append(sum_of_ranks(collectives[index]))
            exchange.post(is_send, letter)
            if last and choice.random() < 0.02:
                done += last.pop().finish(choice)
        while len(summed) < 2:
            summed.append(sum_of_ranks(async_op=False))
        for exchange in last:
            done += exchange.finish(choice)
        for tensor, work in summed:
            if work is not None:
                work.wait()
            assert (tensor == sum(range(world_size))).all()
        last = exchanges
    return done + sum(exchange.finish(choice) for exchange in last)


def sum_of_ranks(async_op: bool) -> tuple[Tensor, dist.Work | None]:
    tensor = torch.full((20_000,), float(dist.get_rank()))
    return tensor, dist.all_reduce(tensor, async_op=async_op)


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_random_orders_beside_collectives(ranks: RankServer, world_size: int) -> None:
    done = ranks.run(world_size, rounds, fresh_seed(), 250, SIZES)
    assert sum(done) == 3 * 2 * (250 + 62)


@pytest.mark.slow
def test_thousands_outstanding(ranks: RankServer) -> None:
    assert sum(ranks.run(2, rounds, fresh_seed(), 5000, SMALL)) == 3 * 2 * (5000 + 1250)


def from_threads(seed: int) -> None:
    """Exchange messages in threads, in separate groups and a shared one, all at once."""
    world_size = dist.get_world_size()
    shared = dist.new_group()
    groups = [dist.new_group(), shared, shared]
    errors: list[BaseException] = []

    def exchange(index: int) -> None:
        try:
            own, choice = seed + 1000 * index, random.Random(seed + index)
            letters = make_plan(own, 300, world_size, SIZES)
            # In the shared group, each thread has its own tags.
            letters = [
                PlannedMessage(each.source, each.target, each.tag + 10_000 * index, *rest(each))
                for each in letters
            ]
            mine = Exchange(own, letters, groups[index])
            for is_send, letter in mine.posts:
                mine.post(is_send, letter)
            mine.finish(choice)
        except BaseException as error:
            errors.append(error)

    def rest(letter: PlannedMessage) -> tuple[int, int, bool]:
        return letter.number, letter.size, letter.any_source

    threads = [threading.Thread(target=exchange, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        tensor, work = sum_of_ranks(async_op=bool(number % 2))
        if work is not None:
            work.wait()
        assert (tensor == sum(range(world_size))).all()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.parametrize("world_size", (2, 3))
def test_from_several_threads(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, from_threads, fresh_seed())


def hundreds_of_mebibytes(seed: int) -> None:
    count = 75 * 2**20 + seed % 1000
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.arange(count, dtype=torch.int32) + seed % 2**20, 1)
    else:
        received = torch.full((count + 2,), -1, dtype=torch.int32)
        dist.recv(received[1:-1], 0)
        assert received[0] == received[-1] == -1
        expected = torch.arange(count, dtype=torch.int32) + seed % 2**20
        assert torch.equal(received[1:-1], expected)


def test_hundreds_of_mebibytes(ranks: RankServer) -> None:
    ranks.run(2, hundreds_of_mebibytes, fresh_seed())


def compute_after_posting(seed: int) -> None:
    """Compute on a rank that has posted its messages: peers that wait for those are not delayed."""
    folder = Path(os.environ["FOLDER"])
    sent, other = cases.data("int32", 500_000, seed, 0), cases.data("int32", 500_000, seed, 1)
    if dist.get_rank() == 0:
        received = cases.poisoned(sent)
        dist.send(sent, 1)
        dist.recv(received, 1, tag=1)
        cases.check_bits(received, other, "from the rank that computes")
        (folder / "done").touch()
    else:
        received = cases.poisoned(sent)
        works = [dist.irecv(received, 0), dist.isend(other, 0, tag=1)]
        while not (folder / "done").exists():
            torch.ones(1000).sum()
        # Between hosts, a thread of the transport reports the end later.
        end = time.monotonic() + (5 if cases.has_several_hosts() else 0)
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < end
        cases.check_bits(received, sent, "to the rank that computes")


def test_a_rank_that_computes(ranks: RankServer) -> None:
    ranks.run(2, compute_after_posting, fresh_seed())


def pairs_of_threads(seed: int) -> None:
    """Make blocking calls in two threads of each rank in one group, one with long messages."""
    rank = dist.get_rank()
    errors: list[BaseException] = []

    def blocking(tag: int, size: int, count: int) -> None:
        try:
            for number in range(count):
                sent = cases.data("int32", size, seed, tag, number)
                if rank == 0:
                    dist.send(sent, 1, tag=tag)
                else:
                    received = cases.poisoned(sent)
                    dist.recv(received, 0, tag=tag)
                    cases.check_bits(received, sent, f"tag {tag} number {number}")
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=blocking, args=args) for args in ((1, 2**20, 10), (2, 1, 300))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


def test_two_threads_in_blocking_calls(ranks: RankServer) -> None:
    ranks.run(2, pairs_of_threads, fresh_seed())
