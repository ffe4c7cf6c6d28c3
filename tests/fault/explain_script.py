"""The script of the ranks of `test_explain.py`: after two common operations, one rank fails.

Arguments: the scenario, the timeout in seconds, and optionally `stay`, which keeps notified ranks
alive.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

RANK_AT_FAULT = 1


def stay() -> NoReturn:
    while True:
        time.sleep(0.05)


def endless_loop() -> NoReturn:
    while True:
        pass


def finish() -> None:
    dist.destroy_process_group()  # finished
    sys.exit(0)


def other_order() -> None:
    dist.all_reduce(torch.ones(4), group=second)  # order
    dist.all_reduce(torch.ones(4), group=first)


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "busy": endless_loop,
    "branch": lambda: dist.barrier(group=first),  # branch
    "finished": finish,
    "unsent": lambda: dist.recv(torch.zeros(4), 0, tag=7),  # unsent
    "order": other_order,
}


def wait() -> None:
    dist.all_reduce(torch.ones(16), group=first)  # wait
    dist.all_reduce(torch.ones(16), group=second)


def run(scenario: str, rank: int, limit: timedelta) -> None:
    global first, second
    first, second = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    dist.all_reduce(torch.ones(8), group=first)  # together
    dist.all_reduce(torch.ones(8), group=second)  # together
    if rank == RANK_AT_FAULT:
        FAULTS[scenario]()
    else:
        wait()


def main(scenario: str, seconds: str, then: str = "") -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if scenario == "missing" and rank == RANK_AT_FAULT:
        stay()
    url = os.environ.get("STORE", "env://")
    limit = timedelta(seconds=float(seconds))
    dist.init_process_group(  # missing
        "phalanx", init_method=url, rank=rank, world_size=size, timeout=limit
    )
    try:
        run(scenario, rank, limit)
    except dist.DistBackendError:
        if then != "stay":
            raise
        stay()


if __name__ == "__main__":
    main(*sys.argv[1:])
