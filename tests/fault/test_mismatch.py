"""Ranks that disagree raise CollectiveMismatch, which names both, before data moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CollectiveMismatch
from tests.ranks import RankOutcome, RankServer

Call = Callable[[], object]


def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


# The call of rank 0, that of the other ranks, and the descriptions of both.
CASES: dict[str, tuple[Call, Call, str, str]] = {
    "size": (
        lambda: dist.all_reduce(zeros(10)),
        lambda: dist.all_reduce(zeros(11)),
        "all_reduce #1 float32[10] SUM",
        "all_reduce #1 float32[11] SUM",
    ),
    "small and large": (
        lambda: dist.all_reduce(zeros(10)),
        lambda: dist.all_reduce(zeros(1_000_000)),
        "all_reduce #1 float32[10] SUM",
        "all_reduce #1 float32[1000000] SUM",
    ),
    "two large sizes": (
        lambda: dist.broadcast(zeros(1_000_001), 0),
        lambda: dist.broadcast(zeros(1_000_000), 0),
        "broadcast #1 float32[1000001] root 0",
        "broadcast #1 float32[1000000] root 0",
    ),
    "empty": (
        lambda: dist.all_reduce(zeros(0)),
        lambda: dist.all_reduce(zeros(1)),
        "all_reduce #1 float32[0] SUM",
        "all_reduce #1 float32[1] SUM",
    ),
    "dtype": (
        lambda: dist.all_reduce(zeros(10)),
        lambda: dist.all_reduce(zeros(10, torch.int32)),
        "all_reduce #1 float32[10] SUM",
        "all_reduce #1 int32[10] SUM",
    ),
    "operator": (
        lambda: dist.all_reduce(zeros(10), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(zeros(10)),
        "all_reduce #1 float32[10] MAX",
        "all_reduce #1 float32[10] SUM",
    ),
    "root": (
        lambda: dist.broadcast(zeros(10), 0),
        lambda: dist.broadcast(zeros(10), 1),
        "broadcast #1 float32[10] root 0",
        "broadcast #1 float32[10] root 1",
    ),
    "root of reduce": (
        lambda: dist.reduce(zeros(10), 0),
        lambda: dist.reduce(zeros(10), 1),
        "reduce #1 float32[10] SUM root 0",
        "reduce #1 float32[10] SUM root 1",
    ),
    "operation": (
        lambda: dist.barrier(),
        lambda: dist.all_reduce(zeros(10)),
        "barrier #1",
        "all_reduce #1 float32[10] SUM",
    ),
    "gather and all_gather": (
        lambda: dist.gather(zeros(4), [zeros(4) for _ in range(dist.get_world_size())], 0),
        lambda: dist.all_gather([zeros(4) for _ in range(dist.get_world_size())], zeros(4)),
        "gather #1 float32[4] root 0",
        "all_gather #1 float32[4]",
    ),
    "scatter": (
        lambda: dist.scatter(zeros(4), [zeros(4) for _ in range(dist.get_world_size())], 0),
        lambda: dist.scatter(zeros(5), None, 0),
        "scatter #1 float32[4] root 0",
        "scatter #1 float32[5] root 0",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(zeros(4), zeros(4 * dist.get_world_size())),
        lambda: dist.reduce_scatter_tensor(zeros(5), zeros(5 * dist.get_world_size())),
        "reduce_scatter #1 float32[4] SUM",
        "reduce_scatter #1 float32[5] SUM",
    ),
    "large reduce_scatter": (
        lambda: dist.reduce_scatter(zeros(10**6), [zeros(10**6)] * dist.get_world_size()),
        lambda: dist.reduce_scatter(zeros(10), [zeros(10)] * dist.get_world_size()),
        "reduce_scatter #1 float32[1000000] SUM",
        "reduce_scatter #1 float32[10] SUM",
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(zeros(4 * dist.get_world_size()), zeros(4)),
        lambda: dist.all_gather_into_tensor(zeros(8 * dist.get_world_size()), zeros(8)),
        "all_gather #1 float32[4]",
        "all_gather #1 float32[8]",
    ),
    "coalesced": (
        lambda: dist.all_reduce_coalesced([zeros(4), zeros(2)]),
        lambda: dist.all_reduce_coalesced([zeros(4), zeros(3)]),
        "all_reduce #2 float32[2] SUM",
        "all_reduce #2 float32[3] SUM",
    ),
    "asynchronous": (
        lambda: dist.all_reduce(zeros(10), async_op=True).wait(),
        lambda: dist.all_reduce(zeros(20), async_op=True).get_future().wait(),
        "all_reduce #1 float32[10] SUM",
        "all_reduce #1 float32[20] SUM",
    ),
}


def disagree(name: str) -> None:
    first, others, _, _ = CASES[name]
    (first if dist.get_rank() == 0 else others)()


def check(outcomes: list[RankOutcome], first: str, other: str) -> None:
    for rank in outcomes:
        assert rank.code == 1
        assert isinstance(rank.error, CollectiveMismatch), rank.report()
        message = str(rank.error)
        assert first in message, message
        assert other in message, message
        assert f"[rank {rank.rank}/{len(outcomes)} on " in message
        assert "test_mismatch.py:" in message, message


@pytest.mark.sampled(12)
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("name", CASES)
def test_ranks_disagree(ranks: RankServer, name: str, world_size: int) -> None:
    _, _, first, other = CASES[name]
    check(ranks.start(world_size, disagree, name).join(), first, other)


def exchange(form: str, given: list[int], taken: list[int], async_op: bool) -> None:
    if form == "list":
        inputs, outputs = [list(map(zeros, counts)) for counts in (given, taken)]
        work = dist.all_to_all(outputs, inputs, async_op=async_op)
    else:
        work = dist.all_to_all_single(
            zeros(sum(taken)), zeros(sum(given)), taken, given, async_op=async_op
        )
    if work is not None:
        work.wait()


def splits_disagree(form: str, unit: int, async_op: bool) -> None:
    """Rank 1 sends two units to rank 2, which expects three."""
    rank = dist.get_rank()
    given = [unit, unit, (2 if rank == 1 else 1) * unit]
    taken = [unit, (3 if rank == 2 else 1) * unit, unit]
    if rank == 2:
        given[2] = taken[2] = 0
    exchange(form, given, taken, async_op)


# One element is sent inline, 100,000 elements in chunks.
@pytest.mark.parametrize(
    ("form", "unit", "async_op"),
    [
        ("list", 1, False),
        ("list", 100_000, True),
        ("single", 1, True),
        ("single", 100_000, False),
    ],
)
def test_splits_disagree(ranks: RankServer, form: str, unit: int, async_op: bool) -> None:
    """Rank 0 raises too, although its own splits agree with the others'."""
    outcomes = ranks.start(3, splits_disagree, form, unit, async_op).join()
    gives = f"in all_to_all #1: rank 1 gives rank 2 {2 * unit} elements"
    check(outcomes, gives, f"which expects {3 * unit}")


def equal_and_uneven_splits() -> None:
    """Rank 0 sends two rows to each rank; rank 1 sends one to rank 0 and three to itself."""
    if dist.get_rank() == 0:
        dist.all_to_all_single(zeros(4), zeros(4))
    else:
        dist.all_to_all_single(zeros(5), zeros(4), [2, 3], [1, 3])


def test_equal_and_uneven_splits(ranks: RankServer) -> None:
    outcomes = ranks.start(2, equal_and_uneven_splits).join()
    check(outcomes, "rank 1 gives rank 0 1 elements at test_mismatch.py:", "split sizes disagree")
    assert all(", which expects 2 at test_mismatch.py:" in str(rank.error) for rank in outcomes)


def uneven_parts_disagree() -> None:
    """The part of rank 1 has five elements; rank 0 expects four."""
    if dist.get_rank() == 0:
        dist.all_gather([zeros(3), zeros(4)], zeros(3))
    else:
        dist.all_gather([zeros(3), zeros(5)], zeros(5))


def test_uneven_parts(ranks: RankServer) -> None:
    outcomes = ranks.start(2, uneven_parts_disagree).join()
    check(outcomes, "broadcast #2 float32[4] root 1", "broadcast #2 float32[5] root 1")


def inputs_are_unchanged() -> None:
    tensor = torch.arange(100_000.0)[dist.get_rank() :]
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(100_000.0)[dist.get_rank() :])


def test_no_data_is_exchanged(ranks: RankServer) -> None:
    ranks.run(2, inputs_are_unchanged)


def out_of_step() -> None:
    """One rank skips a call, which the sequence numbers reveal."""
    for _ in range(3):
        dist.all_reduce(zeros(4))
    if dist.get_rank() == 0:
        dist.broadcast(zeros(4), 0)
    dist.all_reduce(zeros(4))


def test_skipped_call(ranks: RankServer) -> None:
    outcomes = ranks.start(3, out_of_step).join()
    check(outcomes, "broadcast #4 float32[4] root 0", "all_reduce #4 float32[4] SUM")


def one_rank_leaves(operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    elif operation == "recv":
        dist.recv(zeros(4), 0)
    elif operation == "recv from any":
        dist.recv(zeros(4))
    else:
        dist.all_reduce(zeros(4))


@pytest.mark.parametrize("operation", ("all_reduce", "recv", "recv from any"))
def test_rank_that_left(ranks: RankServer, operation: str) -> None:
    first, second = ranks.start(2, one_rank_leaves, operation).join()
    assert first.code == 0
    assert isinstance(second.error, CollectiveMismatch), second.report()
    assert f"rank 0 (pid {first.pid}) has left the group" in str(second.error)


MESSAGES: dict[str, tuple[torch.Tensor, torch.Tensor, str, str]] = {
    "larger": (zeros(11), zeros(10), "float32[11]", "float32[10]"),
    "much larger": (zeros(1_000_000), zeros(10), "float32[1000000]", "float32[10]"),
    "smaller": (zeros(9), zeros(10), "float32[9]", "float32[10]"),
    "much smaller": (zeros(9), zeros(1_000_000), "float32[9]", "float32[1000000]"),
    "empty": (zeros(0), zeros(1), "float32[0]", "float32[1]"),
    "other dtype": (zeros(10), zeros(10, torch.int32), "float32[10]", "int32[10]"),
    "as many bytes": (zeros(10, torch.float64), zeros(20), "float64[10]", "float32[20]"),
}


def wrong_message(name: str, how: str) -> None:
    sent, received, _, _ = MESSAGES[name]
    if dist.get_rank() == 0:
        dist.send(sent, 1)
        dist.barrier()
    elif how == "blocking":
        dist.recv(received.clone(), 0)
    elif how == "any source":
        dist.recv(received.clone())
    else:
        work = dist.irecv(received.clone(), 0)
        work.wait()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", ("blocking", "any source", "asynchronous"))
@pytest.mark.parametrize("name", MESSAGES)
def test_message_of_another_size(ranks: RankServer, name: str, how: str) -> None:
    _, _, sent, received = MESSAGES[name]
    for rank in ranks.start(2, wrong_message, name, how).join():
        assert isinstance(rank.error, CollectiveMismatch), rank.report()
        assert f"send {sent} to rank 1" in str(rank.error)
        assert f"recv {received} from rank 0" in str(rank.error)


def send_and_meet() -> None:
    dist.send(torch.ones(100_000), 1)  # may be done before the receiver checks
    dist.barrier()


def recv_into_smaller_buffer() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveMismatch):
            send_and_meet()
    else:
        whole = zeros(1000)
        with pytest.raises(CollectiveMismatch):
            dist.recv(whole[:10], 0)
        assert (whole == 0).all()


def test_nothing_is_written_beyond_the_buffer(ranks: RankServer) -> None:
    ranks.run(2, recv_into_smaller_buffer)


def use_broken_group() -> list[str]:
    messages = []
    for _ in range(3):
        with pytest.raises(CollectiveMismatch) as caught:
            dist.all_reduce(zeros(1 + dist.get_rank()))
        messages.append(str(caught.value).split(": ", 1)[1])
    return messages


def test_broken_group_repeats_the_reason(ranks: RankServer) -> None:
    for messages in ranks.run(2, use_broken_group):
        assert len(set(messages)) == 1
