"""The self-check: operations on real ranks, compared with values computed without Phalanx.

Each check runs on every rank and returns a pair (result, expected result). Inputs are random but
known to all ranks, so each rank can compute its expected result with numpy in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

Pair = tuple[torch.Tensor, np.ndarray[Any, Any]]

# One element, a few, slightly more than one page, and more than the path for small sizes takes.
SIZES = (1, 7, 1031, 70_001)
_POISON = float("nan")
_NOTHING = torch.zeros(0, dtype=torch.float32, device="cpu"), np.zeros(0)


def inputs(count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Return the inputs of all ranks, the same on every rank; float64 [count] each."""
    size = dist.get_world_size()
    return [np.random.default_rng([seed, rank]).uniform(0.5, 2.0, count) for rank in range(size)]


def _own_input(all_inputs: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(all_inputs[dist.get_rank()].copy())


def _empty(count: int) -> torch.Tensor:
    return torch.full((count,), _POISON, dtype=torch.float64, device="cpu")


def _all_reduce(
    op: Any, combine: Callable[..., Any], count: int, seed: int, *, async_op: bool = False
) -> Pair:
    all_inputs = inputs(count, seed)
    tensor = _own_input(all_inputs)
    _wait(dist.all_reduce(tensor, op, async_op=async_op))
    return tensor, combine(np.stack(all_inputs), axis=0)


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _broadcast(count: int, seed: int) -> Pair:
    all_inputs = inputs(count, seed)
    root = dist.get_world_size() - 1
    tensor = _own_input(all_inputs) if dist.get_rank() == root else _empty(count)
    dist.broadcast(tensor, root)
    return tensor, all_inputs[root]


def _reduce(count: int, seed: int) -> Pair:
    all_inputs = inputs(count, seed)
    tensor, rank = _own_input(all_inputs), dist.get_rank()
    dist.reduce(tensor, 0)
    return tensor, np.sum(all_inputs, axis=0) if rank == 0 else all_inputs[rank]


def _all_gather(count: int, seed: int) -> Pair:
    all_inputs = inputs(count, seed)
    outputs = [_empty(count) for _ in all_inputs]
    dist.all_gather(outputs, _own_input(all_inputs))
    return torch.cat(outputs), np.concatenate(all_inputs)


def _gather(count: int, seed: int) -> Pair:
    all_inputs = inputs(count, seed)
    outputs = [_empty(count) for _ in all_inputs] if dist.get_rank() == 0 else None
    dist.gather(_own_input(all_inputs), outputs, dst=0)
    return (torch.cat(outputs), np.concatenate(all_inputs)) if outputs else _NOTHING


def _scatter(count: int, seed: int) -> Pair:
    all_inputs = inputs(count, seed)
    output = _empty(count)
    parts = [torch.from_numpy(part) for part in all_inputs] if dist.get_rank() == 0 else None
    dist.scatter(output, parts, src=0)
    return output, all_inputs[dist.get_rank()]


def _barrier(_count: int, _seed: int) -> Pair:
    dist.barrier()
    return _NOTHING


def _ring(count: int, seed: int, *, blocking: bool) -> Pair:
    """Send to the next rank and receive from the previous rank."""
    all_inputs = inputs(count, seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    output = _empty(count)
    if not blocking:
        _wait(dist.irecv(output, before), dist.isend(_own_input(all_inputs), after))
    elif rank % 2 == 0:
        dist.send(_own_input(all_inputs), after)
        dist.recv(output, before)
    else:
        dist.recv(output, before)
        dist.send(_own_input(all_inputs), after)
    return output, all_inputs[before]


CHECKS: dict[str, Callable[[int, int], Pair]] = {
    "all_reduce SUM": partial(_all_reduce, ReduceOp.SUM, np.sum),
    "all_reduce PRODUCT": partial(_all_reduce, ReduceOp.PRODUCT, np.prod),
    "all_reduce MIN": partial(_all_reduce, ReduceOp.MIN, np.min),
    "all_reduce MAX": partial(_all_reduce, ReduceOp.MAX, np.max),
    "all_reduce AVG": partial(_all_reduce, ReduceOp.AVG, np.mean),
    "all_reduce, asynchronous": partial(_all_reduce, ReduceOp.SUM, np.sum, async_op=True),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "send, recv": partial(_ring, blocking=True),
    "isend, irecv": partial(_ring, blocking=False),
}


def check(seed: int, timeout: float) -> dict[str, str]:
    """Run every check on this rank; return the failure of each check by name, or "" if none.

    Args:
        seed: Seed of the inputs; the same on every rank.
        timeout: Seconds that an operation may wait for its peers.
    """
    dist.init_process_group("phalanx", timeout=timedelta(seconds=timeout))
    try:
        return {name: _run_check(run, seed) for name, run in CHECKS.items()}
    finally:
        dist.destroy_process_group()


def _run_check(run: Callable[[int, int], Pair], seed: int) -> str:
    for count in SIZES:
        result, expected = run(count, seed)
        actual = result.numpy()
        if actual.shape != expected.shape:
            return f"{count} elements: shape {actual.shape}, expected {expected.shape}"
        wrong = np.flatnonzero(~np.isclose(actual, expected, rtol=1e-12, atol=0))
        if wrong.size:
            at = int(wrong[0])
            return (
                f"{count} elements: {wrong.size} are wrong, the first at {at}: "
                f"{actual[at]!r}, expected {expected[at]!r}"
            )
    return ""
