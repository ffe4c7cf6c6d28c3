"""Point-to-point operations: single messages, many in any order, from any source."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.soak.operations import Task

# Disjoint tags of the kinds. Messages of one tag are received in the order of the plan.
_FEW_TAGS = 3
_EXCHANGE = 100
_ANY_SOURCE = 10_000


def message(task: Task) -> object:
    """Send one message; each side blocks or not, independently of the other."""
    source, target = task.common.sample(range(task.size), 2)
    tag = task.common.randrange(_FEW_TAGS)
    values, blocking = task.values(source), task.own.random() < 0.4
    if task.rank == source:
        call: Any = dist.send if blocking else dist.isend
        return task.post(call, task.input(values), task.members[target], task.group, tag)
    if task.rank == target:
        call = dist.recv if blocking else dist.irecv
        output = task.output(values, len(values))
        return task.post(call, output, task.members[source], task.group, tag)
    return None


def exchange(task: Task) -> object:
    """Send several messages between any ranks, posted in a random order on each rank."""
    posts = []
    for number in range(task.common.randint(2, 10)):
        source, target = task.common.sample(range(task.size), 2)
        values = task.values(source, number, task.operation.count // (1 + number))
        tag = _EXCHANGE + number
        if task.rank == source:
            posts.append((dist.isend, task.input(values), target, tag))
        elif task.rank == target:
            posts.append((dist.irecv, task.output(values, len(values)), source, tag))
    task.own.shuffle(posts)
    if posts and task.own.random() < 0.5:
        batch = [
            dist.P2POp(call, tensor, task.members[peer], task.group, tag)
            for call, tensor, peer, tag in posts
        ]
        return dist.batch_isend_irecv(batch)
    return [
        task.post(call, tensor, task.members[peer], task.group, tag)
        for call, tensor, peer, tag in posts
    ]


def any_source(task: Task) -> object:
    """Receive from any source on one rank; messages of each source must arrive in order."""
    target = task.common.randrange(task.size)
    others = [rank for rank in range(task.size) if rank != target]
    sources = [task.common.choice(others) for _ in range(task.common.randint(1, 6))]
    tag = _ANY_SOURCE + task.operation.number
    if task.rank != target:
        return [
            dist.isend(
                task.input(task.values(source, number)), task.members[target], task.group, tag
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

        output = task.output(from_its_source, task.operation.count)
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
        task.check_equal(objects, expected, "objects")
