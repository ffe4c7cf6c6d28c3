"""Fuzz one host and two hosts: `python -m tests.fuzz --frames 100000 --seed 7`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from functools import partial

import cloudpickle

from phalanx.testing import processes
from phalanx.testing.fork_server import Task
from tests.fuzz.attack import run_attack
from tests.ranks import run_in_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="number of frames to send")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"{options.frames} frames, --seed {options.seed}", flush=True)
    for hosts in ("", "aba"):
        run(options.frames // 2, options.seed, hosts)
    print("nothing crashed, hung or leaked, and no unauthenticated data was executed")


def run(frames: int, seed: int, hosts: str) -> None:
    function = partial(run_in_group, 60.0, run_attack, frames, seed)
    call = cloudpickle.dumps((function, (), {}))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server = processes.ForkServer(["phalanx.rpc"], {"OMP_NUM_THREADS": "1"})
        environments = [
            {"RANK": str(rank), "WORLD_SIZE": "3", "FOLDER": folder} for rank in range(3)
        ]
        for environment, host in zip(environments, hosts, strict=False):
            environment["PHALANX_HOST_ID"] = host
        ranks = server.start(
            [Task(call, folder, rank, environment) for rank, environment in enumerate(environments)]
        )
        hung = ranks.wait(3600.0)
        ranks.kill(hung)
        exits = ranks.collect(hung)
        server.close()
    for each in exits:
        if each.code:
            sys.exit(str(each))
    outcome = exits[0].outcome
    lines, before, after = outcome.value if outcome else ([], {}, {})
    placement = "between two hosts" if hosts else "on one host"
    print(f"{frames} {placement} in {time.monotonic() - start:.0f} s; logged:")
    for line in lines:
        print(f"  {line}")
    print(f"  before {before}\n  after  {after}", flush=True)


if __name__ == "__main__":
    main()
