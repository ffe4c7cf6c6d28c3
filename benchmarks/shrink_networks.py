"""Shrinks over real networks: from the kill of a host to the next collective of the others.

    python benchmarks/shrink_networks.py --output benchmarks/shrink_networks.json

Hosts are network namespaces of this machine with one rank each, so root is required. In each trial
all processes of a host are killed while the ranks run all-reduces. Host 0 has the store, and stays.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.bench.machine import machine, versions

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.networks import Network


def run_rank() -> None:
    """Run all-reduces until a rank is lost, shrink, and print when the next one has ended."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    size, tensor = dist.get_world_size(), torch.ones(100_000)
    print("ready", flush=True)
    try:
        while True:
            tensor.fill_(1.0)
            dist.all_reduce(tensor)
    except phalanx.PhalanxError:
        change = phalanx.shrink()
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    moment = time.monotonic()
    if change.world_size != size - 1 or not bool((tensor == size - 1).all()):
        raise SystemExit(f"wrong: {change}, {tensor[0]}")
    print(json.dumps(moment), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_trial(network: Network, port: int) -> list[float]:
    """Kill a host; return the seconds that each of the others needed."""
    processes = []
    for rank in range(len(network.names)):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(network.names)),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--rank"]
        processes.append(network.start(rank, command, environment, output=subprocess.PIPE))
    try:
        for process in processes:
            _wait_until_ready(process)
        time.sleep(random.uniform(0.05, 0.3))
        victim = random.randrange(1, len(processes))
        start = time.monotonic()
        processes[victim].send_signal(signal.SIGKILL)  # with all processes of its namespace
        others = [process for rank, process in enumerate(processes) if rank != victim]
        texts = [process.communicate(timeout=60)[0] for process in others]
        if any(process.returncode for process in others):
            raise SystemExit("\n".join(texts))
        return [json.loads(text.splitlines()[-1]) - start for text in texts]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    lines = []
    for line in process.stdout or ():
        if line == "ready\n":
            return
        lines.append(line)
    raise SystemExit(f"a rank did not start: {''.join(lines)}")


def main() -> None:
    """Run the trials and print the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank()
        return
    seconds: list[float] = []
    with Network(options.hosts) as network:
        for trial in range(options.trials):
            seconds += run_trial(network, 29600 + trial)
    seconds.sort()
    print(
        f"{len(seconds)} survivors: median {1e3 * statistics.median(seconds):.0f} ms, "
        f"at most {1e3 * seconds[-1]:.0f} ms"
    )
    if options.output:
        command = f"python benchmarks/shrink_networks.py {' '.join(sys.argv[1:])}"
        record = {
            "command": command,
            "machine": {**machine(), **versions()},
            "hosts": options.hosts,
            "seconds": seconds,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
