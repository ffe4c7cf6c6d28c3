"""Faults of the matrix: ranks that call different operations, finish early or arrive late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from tests.fault_injection.faults import (
    DUMPS,
    Body,
    leave_and_sleep,
    make_case,
    make_group,
    mark_fault,
)

_BRANCH = "conditions that lead"
_TENSOR = "needs tensors of one dtype"
_MORE = "call more operations than it does"


def _all_reduce(count: int = 100, **options: Any) -> Any:
    return dist.all_reduce(torch.ones(count), **options)


def _disagree(victim: int, odd: Callable[[], object], others: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        if rank == victim:
            mark_fault()
            odd()
        else:
            others()
        dist.barrier()

    return body


def _order_differently(rank: int) -> None:
    first, second = make_group(), make_group()
    mark_fault()
    for group in (second, first) if rank == 1 else (first, second):
        _all_reduce(group=group)


def _order_in_ring(rank: int) -> None:
    pairs = [make_group([0, 1]), make_group([1, 2]), make_group([0, 2])]
    mark_fault()
    _all_reduce(group=pairs[rank])
    _all_reduce(group=pairs[(rank + 2) % 3])


def _finish_early(victim: int, leave: Callable[[], object] = lambda: None) -> Body:
    def body(rank: int) -> None:
        for _ in range(5 if rank == victim else 8):
            _all_reduce()
        if rank == victim:
            mark_fault()
            leave()

    return body


def _arrive_late(seconds: float) -> Body:
    def body(rank: int) -> None:
        if rank == 1:
            mark_fault()
            time.sleep(seconds)
        try:
            _all_reduce()
        finally:
            # A launcher may end the late rank before it arrives.
            if rank == 0 and DUMPS not in os.environ:
                time.sleep(seconds)

    return body


def _abort(rank: int) -> None:
    if rank == 1:
        mark_fault()
        phalanx.abort(dist.group.WORLD, "the loss is not finite")
    _all_reduce()


def _stop_in_own_code(rank: int) -> None:
    if rank == 1:
        mark_fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    _all_reduce()


def _expect_abort(rank: int) -> tuple[str, str, str]:
    """Return what is known on Gloo, which ends a rank before its call has been recorded."""
    cause = f"Rank {rank} .*SIGABRT.*data size doesn't match"
    return "killed", cause, "a smaller tensor than another"


_SUM, _MAX = _all_reduce, lambda: _all_reduce(op=dist.ReduceOp.MAX)
_DOUBLE = lambda: dist.all_reduce(torch.ones(100).double())  # noqa: E731
_ROOT = [lambda root=root: dist.broadcast(torch.ones(4), root) for root in (0, 1)]

CASES = (
    make_case(
        "operation",
        3,
        _disagree(1, dist.barrier, _SUM),
        1,
        "branch",
        "Rank 1 .*different branch.*barrier.*all_reduce",
        _BRANCH,
    ),
    make_case(
        "operation_of_2",
        2,
        _disagree(1, dist.barrier, _SUM),
        (0, 1),
        "branch",
        "different branches.*barrier",
        _BRANCH,
    ),
    make_case(
        "count",
        4,
        _disagree(2, lambda: _all_reduce(99), _SUM),
        2,
        "tensor",
        r"different sizes.*rank 2 float32\[99\].*\[100\]",
        _TENSOR,
        elsewhere=_expect_abort(2),
    ),
    make_case("dtype", 3, _disagree(0, _DOUBLE, _SUM), 0, "branch", "Rank 0 .*float64", _BRANCH),
    make_case(
        "operator",
        3,
        _disagree(1, _MAX, _SUM),
        1,
        "branch",
        "Rank 1 .*MAX.*SUM",
        _BRANCH,
        is_general=False,  # Gloo computes something
    ),
    make_case(
        "root", 3, _disagree(2, *_ROOT[::-1]), 2, "branch", "Rank 2 .*root 1.*root 0", _BRANCH
    ),
    make_case(
        "missing_collective",
        3,
        _disagree(1, lambda: None, _SUM),
        1,
        "branch",
        "Rank 1 .*barrier #2.*all_reduce #2",
        _BRANCH,
    ),
    make_case(
        "extra_collective",
        4,
        _disagree(3, _SUM, lambda: None),
        3,
        "branch",
        "Rank 3 .*all_reduce #2.*barrier #2",
        _BRANCH,
    ),
    make_case(
        "asynchronous_count",
        3,
        _disagree(
            1,
            lambda: _all_reduce(9, async_op=True).wait(),
            lambda: _all_reduce(async_op=True).wait(),
        ),
        1,
        "tensor",
        r"different sizes.*rank 1 float32\[9\].*\[100\]",
        _TENSOR,
        elsewhere=_expect_abort(1),
    ),
    make_case(
        "order_of_groups",
        3,
        _order_differently,
        1,
        "order",
        "different orders.*[Rr]ank 1 .*minority",
        "same order on every rank",
    ),
    make_case(
        "ring_of_groups",
        3,
        _order_in_ring,
        (0, 1, 2),
        "order",
        "different orders",
        "same order on every rank",
    ),
    make_case(
        "fewer_batches", 2, _finish_early(0), 0, "finished", "Rank 0 .*after 6 collectives", _MORE
    ),
    make_case("early_end", 3, _finish_early(1), 1, "finished", "Rank 1 .*finished early", _MORE),
    make_case(
        "early_leave", 4, _finish_early(2, leave_and_sleep), 2, "finished", "Rank 2 .*left", _MORE
    ),
    make_case(
        "late", 2, _arrive_late(4.5), 1, "late", "Rank 1 .*arrived too late", "more time", timeout=3
    ),
    make_case(
        "stopped_until_deadline",
        3,
        _stop_in_own_code,
        1,
        "stopped",
        "Rank 1 .*stopped",
        "kill -(CONT|STOP)",
        timeout=3,
    ),
    make_case(
        "abort",
        3,
        _abort,
        1,
        "aborted",
        "aborted.*loss is not finite",
        "rank that aborted",
        is_general=False,
    ),
)
