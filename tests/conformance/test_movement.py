"""broadcast, gather, scatter, all_gather and barrier: every dtype, size, root and world size."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed

WORLD_SIZES = (1, 2, 3, 4)
# 16 KiB of every dtype and one element more are among them.
SIZES = (0, 1, 3, 1000, 1024, 1025, 4096, 4097, 16_384, 16_385, 65_536, 66_560)


class Check:
    """A check that runs each operation once, with reproducible inputs, and compares all bits."""

    def __init__(self, dtype: str, size: int, seed: int, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.inputs = [cases.data(dtype, size, seed, rank, size) for rank in range(len(self.ranks))]
        self.own = self.inputs[self.rank].clone()
        self.what = f"of {dtype}[{size}] on rank {self.rank} of {len(self.ranks)}"

    def outputs(self) -> list[Tensor]:
        return [cases.poisoned(self.own) for _ in self.ranks]

    def finish(self, work: dist.Work | None, async_op: bool) -> None:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        cases.check_bits(self.own, self.inputs[self.rank], f"input {self.what}")

    def broadcast(self, root: int, async_op: bool) -> None:
        is_root = root == self.rank
        tensor = self.own if is_root else cases.poisoned(self.own)
        work = dist.broadcast(tensor, self.ranks[root], self.group, async_op)
        self.finish(work, async_op)
        cases.check_bits(tensor, self.inputs[root], f"broadcast from {root} {self.what}")

    def all_gather(self, async_op: bool) -> None:
        outputs = self.outputs()
        self.finish(dist.all_gather(outputs, self.own, self.group, async_op), async_op)
        for peer, output in enumerate(outputs):
            cases.check_bits(output, self.inputs[peer], f"all_gather, part {peer} {self.what}")

    def gather(self, root: int, async_op: bool) -> None:
        outputs = self.outputs() if root == self.rank else None
        work = dist.gather(self.own, outputs, self.ranks[root], self.group, async_op)
        self.finish(work, async_op)
        for peer, output in enumerate(outputs or []):
            cases.check_bits(output, self.inputs[peer], f"gather to {root}, {peer} {self.what}")

    def scatter(self, root: int, async_op: bool) -> None:
        parts = [tensor.clone() for tensor in self.inputs] if root == self.rank else None
        output = cases.poisoned(self.own)
        work = dist.scatter(output, parts, self.ranks[root], self.group, async_op)
        self.finish(work, async_op)
        cases.check_bits(output, self.inputs[self.rank], f"scatter from {root} {self.what}")
        for peer, part in enumerate(parts or []):
            cases.check_bits(part, self.inputs[peer], f"scatter's input {peer} {self.what}")


def move_all(dtype: str, seed: int) -> None:
    for number, size in enumerate(SIZES):
        check = Check(dtype, size, seed, None)
        root, async_op = number % dist.get_world_size(), bool(number % 2)
        check.broadcast(root, async_op)
        check.all_gather(async_op)
        check.gather(root, async_op)
        check.scatter(root, async_op)


def move_from_each_root(members: list[int], seed: int) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for size in (1, 5000, 300_000):
            check = Check("float32", size, seed, group)
            check.all_gather(async_op=False)
            tensor = check.own.clone()
            dist.all_reduce(tensor, group=group)
            cases.check_bits(tensor, cases.folded("SUM", check.inputs), "all_reduce in a sub-group")
            for root in range(len(members)):
                check.broadcast(root, async_op=False)
                check.gather(root, async_op=True)
                check.scatter(root, async_op=False)
                tensor = check.own.clone()
                dist.reduce(tensor, check.ranks[root], group=group)
                if check.rank == root:
                    cases.check_bits(tensor, cases.folded("SUM", check.inputs), "reduce")
    dist.barrier()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_dtype_and_size(ranks: RankServer, dtype: str, world_size: int) -> None:
    ranks.run(world_size, move_all, dtype, fresh_seed())


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [0, 2, 3], [1, 3], [2], [3, 0]], ids=str)
def test_each_root_of_groups_and_sub_groups(ranks: RankServer, members: list[int]) -> None:
    ranks.run(4, move_from_each_root, members, fresh_seed())


def move_large(seed: int) -> None:
    check = Check("float32", cases.LARGE, seed, None)
    root = dist.get_world_size() - 1
    check.broadcast(root, async_op=False)
    check.all_gather(async_op=False)
    check.gather(root, async_op=False)
    check.scatter(root, async_op=False)


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_large(ranks: RankServer, world_size: int) -> None:
    ranks.run(world_size, move_large, fresh_seed())


def pass_barriers() -> list[tuple[float, float]]:
    times = []
    for turn in range(6):
        if turn % dist.get_world_size() == dist.get_rank():
            time.sleep(0.05)  # a delay of this rank, not a synchronisation
        came = time.monotonic()
        work = dist.barrier(async_op=bool(turn % 2))
        if work is not None:
            work.wait()
        times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_rank_leaves_a_barrier_before_all_enter(ranks: RankServer, world_size: int) -> None:
    for turn in zip(*ranks.run(world_size, pass_barriers), strict=True):
        last_came = max(came for came, _ in turn)
        assert all(left >= last_came for _, left in turn)


def mixed_operations(seed: int) -> str:
    """Run a random program of all kinds of operations in three groups, the same on all ranks."""
    random = cases.np.random.default_rng(seed)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    results = []
    for step in range(150):
        size = int(random.choice([0, 1, 100, 4096, 5000, 70_000]))
        kind, async_op = random.choice(["sum", "move", "barrier"]), bool(random.integers(2))
        group = [None, *pairs][int(random.integers(3))]
        choice = int(random.integers(100))
        if dist.get_rank(group) < 0:
            continue
        if kind == "barrier":
            dist.barrier(group)
            continue
        check = Check("float32", size, seed + step, group)
        root = choice % len(check.ranks)
        if kind == "sum":
            tensor = check.own.clone()
            work = dist.all_reduce(tensor, group=group, async_op=async_op)
            if work is not None:
                work.wait()
            cases.check_bits(tensor, cases.folded("SUM", check.inputs), f"step {step}")
            results.append(tensor)
        else:
            check.broadcast(root, async_op)
            check.gather(root, async_op)
            check.scatter(root, async_op)
    assert torch.isfinite(torch.cat([torch.zeros(1), *results])).all()
    return "done"


def test_a_random_program_in_overlapping_groups(ranks: RankServer) -> None:
    assert ranks.run(3, mixed_operations, fresh_seed()) == ["done"] * 3
