"""Random programs of remote references: no value is lost, and none is left in the end."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from phalanx import rpc
from phalanx.rpc.agent import Agent, agent
from phalanx.rpc.event_loop import Reactor
from phalanx.rpc.reference_counting import OwnedValues
from phalanx.rpc.server import RpcServer
from phalanx.system.polling import wait_until
from tests.fault_injection.pauses import LIMIT, WORKERS, HandOvers

HAND_OVERS: HandOvers = (
    (Agent, "_on_answer"),
    (Agent, "_send"),
    (Reactor, "submit"),
    (OwnedValues, "apply"),
    (OwnedValues, "begin"),
    (RpcServer, "_begin"),
    (RpcServer, "_handle"),
    (RpcServer, "_read"),
    (RpcServer, "_receive"),
)


def create(owner: int, number: int, size: int) -> rpc.RRef[torch.Tensor]:
    """Return a reference to a value on a worker."""
    return rpc.remote(owner, torch.full, args=((size,), float(number)))


def pass_on(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    """Return the reference."""
    return rref


def fetch(rref: rpc.RRef[torch.Tensor]) -> float:
    """Return the number in a value, or NaN if it has several."""
    value = rref.to_here(timeout=LIMIT)
    return float(value[0]) if (value == value[0]).all() else float("nan")


def count_owned() -> int:
    """Return how many values this worker owns."""
    return len(agent().owned_values)


def run_program(chosen: Random) -> str:
    """Run a program; return what went wrong, or nothing."""
    rref: rpc.RRef[torch.Tensor] | None = None
    try:
        for rref, number in _steps(chosen):
            if (found := fetch(rref)) != number:
                return f"the value {number} is {found}"
        del rref
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    left: list[int] = []

    def is_empty() -> bool:
        left[:] = [rpc.rpc_sync(each, count_owned, timeout=LIMIT) for each in range(WORKERS)]
        return not any(left)

    return "" if wait_until(is_empty, LIMIT) else f"values are left on the workers: {left}"


def _steps(chosen: Random) -> Iterator[tuple[rpc.RRef[torch.Tensor], int]]:
    """Make references, pass them around and drop them; yield those to fetch, and their values."""
    held: list[tuple[rpc.RRef[torch.Tensor], int]] = []
    for _ in range(chosen.randint(5, 25)):
        step, worker = chosen.randrange(6), chosen.randrange(WORKERS)
        if step == 0 or not held:
            owner, number = chosen.randrange(WORKERS), chosen.randrange(1000)
            call = owner, number, chosen.choice((1, 100, 100_000))
            held.append((rpc.rpc_sync(worker, create, call, timeout=LIMIT), number))
            continue
        rref, number = held.pop(chosen.randrange(len(held)))
        if step == 1:
            held.append((_send_around(worker, rref), number))
        elif step == 2:
            futures = [
                rpc.rpc_async(each, fetch, (rref,), timeout=LIMIT) for each in range(WORKERS)
            ]
            assert [each.wait() for each in futures] == [number] * WORKERS
            held.append((rref, number))
        elif step == 3:
            yield rref, number
        elif step == 4:
            held += [(rref, number), (_send_around(worker, rref), number)]
        del rref  # dropped in steps 3 and 5
    yield from held


def _send_around(worker: int, rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    passed: rpc.RRef[torch.Tensor] = rpc.rpc_sync(worker, pass_on, (rref,), timeout=LIMIT)
    return passed
