"""`python -m tests.fuzz --frames 100000 --seed 7`: half on one host, half between two."""

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
from tests.fuzz.attack import under_attack
from tests.ranks import in_a_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="how many things are sent")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"{options.frames} frames, --seed {options.seed}", flush=True)
    for hosts in ("", "aba"):
        run(options.frames // 2, options.seed, hosts)
    print("nothing crashed, hung or leaked, and nothing of a stranger's was executed")


def run(frames: int, seed: int, hosts: str) -> None:
    function = partial(in_a_group, 60.0, under_attack, frames, seed)
    call = cloudpickle.dumps((function, (), {}))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server = processes.ForkServer(["phalanx.rpc"], {"OMP_NUM_THREADS": "1"})
        places = [{"RANK": str(rank), "WORLD_SIZE": "3", "FOLDER": folder} for rank in range(3)]
        for place, host in zip(places, hosts, strict=False):
            place["PHALANX_HOST_ID"] = host
        ranks = server.start([Task(call, folder, rank, place) for rank, place in enumerate(places)])
        hung = ranks.wait(3600.0)
        ranks.kill(hung)
        ended = ranks.collect(hung)
        server.close()
    for end in ended:
        if end.code:
            sys.exit(str(end))
    outcome = ended[0].outcome
    lines, before, after = outcome.value if outcome else ([], {}, {})
    where = "between two hosts" if hosts else "on one host"
    print(f"{frames} {where} in {time.monotonic() - begun:.0f} s; logged:")
    for line in lines:
        print(f"  {line}")
    print(f"  before {before}\n  after  {after}", flush=True)


if __name__ == "__main__":
    main()
