"""Operations as events of PyTorch's profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankServer


def profile() -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )


def operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, parts = torch.ones(2, 3), [torch.empty(2, 3) for _ in range(size)]
    with profile() as recorded:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce_coalesced([tensor, tensor.flatten().clone()])
        dist.all_gather(parts, tensor)
        dist.scatter(tensor, parts if rank == 0 else None)
        dist.all_to_all_single(torch.empty(2, 3), tensor)
        dist.barrier()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor)
    # No longer recorded.
    dist.all_reduce(tensor)
    found = [event for event in recorded.events() if event.name.startswith("phalanx:")]
    message = "phalanx:recvAnySource" if rank else "phalanx:send"
    assert Counter(event.name for event in found) == {
        "phalanx:all_reduce": 3,
        "phalanx:all_gather": 1,
        "phalanx:scatter": 1,
        "phalanx:all_to_all": 1,
        "phalanx:barrier": 1,
        message: 1,
    }
    shapes: dict[str, list[object]] = {}
    for event in found:
        assert event.is_async
        shapes.setdefault(event.name, []).append(event.input_shapes)
    assert sorted(map(str, shapes["phalanx:all_reduce"])) == ["[[2, 3], [6]]", *["[[2, 3]]"] * 2]
    assert shapes["phalanx:scatter"] == [[] if rank else [[2, 3]] * size]
    assert shapes["phalanx:barrier"] == [[]]
    assert shapes[message] == [[[2, 3]]]


def test_operations_are_events(ranks: RankServer) -> None:
    ranks.run(2, operations)


def a_failing_operation() -> None:
    with profile() as recorded:
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistBackendError):
                dist.barrier()
    ended = [event.name for event in recorded.events() if event.name.startswith("phalanx:")]
    assert ended == ["phalanx:barrier"] * (dist.get_rank() == 0)


def test_an_event_ends_with_a_failure(ranks: RankServer) -> None:
    ranks.run(2, a_failing_operation, timeout=0.3)
