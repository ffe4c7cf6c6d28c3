"""The bytes that links carry, and the progress of large operations, in the flight recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.hierarchical import execution
from tests.ranks import RankServer

COUNT = 6 * 2**20
"""Elements of 4 bytes: several chunks."""


def recorder(group: Any = None) -> dict[str, Any]:
    membership = (group or dist.group.WORLD)._membership
    found: dict[str, Any] = membership.native.flight_recorder(membership.rank, 100)
    return found


def carried(group: Any = None) -> tuple[int, int]:
    """Return the bytes that this rank has sent to the other host, and received."""
    links = recorder(group)["links"]
    assert len(links) <= 1
    return tuple(links[0]["now"][:2]) if links else (0, 0)


def exchange() -> tuple[int, int]:
    dist.barrier()
    before = carried()
    seen = set[int]()
    record = execution.Operation.record_progress

    def recording(self: execution.Operation, done: int, total: int) -> None:
        record(self, done, total)
        seen.add(recorder()["open"][-1]["progress"])

    execution.Operation.record_progress = recording  # type: ignore[method-assign]
    dist.all_reduce(torch.ones(COUNT))
    assert max(seen) == 100, seen
    assert len(seen) > 2, seen
    if dist.get_rank() == 0:
        dist.send(torch.ones(1000), 1)
    else:
        dist.recv(torch.empty(1000), 0)
    dist.barrier()
    sent, received = (now - old for now, old in zip(carried(), before, strict=True))
    assert recorder()["done"][-1]["progress"] == 0
    return sent, received


def test_bytes_of_a_link(ranks: RankServer) -> None:
    """Each rank sends half of an all-reduce twice: as its part, and as the result."""
    first, second = ranks.run(2, exchange, hosts="ab")
    headers = 5_000
    for (sent, received), message in ((first, (4000, 0)), (second, (0, 4000))):
        assert 0 <= sent - 4 * COUNT - message[0] < headers
        assert 0 <= received - 4 * COUNT - message[1] < headers
    assert first == second[::-1]


def reduce_compressed(encoding: str) -> list[float]:
    """Return the bytes that this rank sends for a value in each operation."""
    options = phalanx.Options(compress=encoding)
    group = dist.new_group(backend="phalanx", pg_options=options)
    whole, part = torch.randn(COUNT), torch.empty(COUNT // 2)
    found = []
    for values, reduce in (
        (COUNT, lambda: dist.all_reduce(whole, group=group)),
        (COUNT // 2, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
    ):
        before, _ = carried(group)
        reduce()
        found.append((carried(group)[0] - before) / values)
    return found


@pytest.mark.parametrize(
    ("encoding", "most"), (("bfloat16", 2.0), ("int8", 4 * 0.254), ("int4", 4 * 0.141))
)
def test_bytes_of_an_encoding(ranks: RankServer, encoding: str, most: float) -> None:
    for found in ranks.run(2, reduce_compressed, encoding, hosts="ab"):
        for each in found:
            assert 0.98 * most < each < 1.01 * most, found
