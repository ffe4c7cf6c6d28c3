"""Point-to-point operations: single messages, many in any order, from any source."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.soak.operations import Task

# Tags of the kinds, apart from each other. Messages of one tag are taken in the order of the plan.
_FEW_TAGS = 3
_EXCHANGE = 100
_ANY_SOURCE = 10_000


def message(task: Task) -> object:
    """One message; either side blocks or doesn't, whatever the other does."""
    source, target = task.common.sample(range(task.size), 2)
    tag = task.common.randrange(_FEW_TAGS)
    values, blocking = task.values(source), task.own.random() < 0.4
    if task.rank == source:
        call: Any = dist.send if blocking else dist.isend
        return call(task.give(values), task.members[target], task.group, tag)
    if task.rank == target:
        call = dist.recv if blocking else dist.irecv
        done = call(task.take(values, len(values)), task.members[source], task.group, tag)
        return None if blocking else done
    return None


def exchange(task: Task) -> object:
    """Several messages between any ranks, posted on each rank in an order of its own."""
    posts = []
    for number in range(task.common.randint(2, 10)):
        source, target = task.common.sample(range(task.size), 2)
        values = task.values(source, number, task.operation.count // (1 + number))
        tag = _EXCHANGE + number
        if task.rank == source:
            posts.append((dist.isend, task.give(values), target, tag))
        elif task.rank == target:
            posts.append((dist.irecv, task.take(values, len(values)), source, tag))
    task.own.shuffle(posts)
    if posts and task.own.random() < 0.5:
        batch = [
            dist.P2POp(call, tensor, task.members[peer], task.group, tag)
            for call, tensor, peer, tag in posts
        ]
        return dist.batch_isend_irecv(batch)
    return [call(tensor, task.members[peer], task.group, tag) for call, tensor, peer, tag in posts]


def any_source(task: Task) -> object:
    """One rank takes from whichever comes; what it got must be that rank's, in its order."""
    target = task.common.randrange(task.size)
    others = [rank for rank in range(task.size) if rank != target]
    sources = [task.common.choice(others) for _ in range(task.common.randint(1, 6))]
    tag = _ANY_SOURCE + task.operation.number
    if task.rank != target:
        return [
            dist.isend(
                task.give(task.values(source, number)), task.members[target], task.group, tag
            )
            for number, source in enumerate(sources)
            if task.rank == source
        ]
    expected = {
        rank: [task.values(rank, number) for number, source in enumerate(sources) if source == rank]
        for rank in others
    }
    works: list[Any] = []

    def receive() -> None:
        work: Any = None

        def from_its_source() -> Any:
            return expected[work._source_rank()].pop(0)

        output = task.take(from_its_source, task.operation.count)
        work = dist.irecv(output, None, task.group, tag)
        works.append(work)

    for _ in sources:
        receive()
    return works


def send_objects(task: Task) -> None:
    source, target = task.common.sample(range(task.size), 2)
    number = task.operation.number
    expected = [{"number": number, "text": "y" * (number % 5000)}, number]
    if task.rank == source:
        dist.send_object_list(expected, task.members[target], task.group)
    elif task.rank == target:
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, task.members[source], task.group)
        task.expect(objects, expected, "objects")
