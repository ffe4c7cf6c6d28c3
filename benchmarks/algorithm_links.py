"""The all-reduces of `phalanx.parallel` over links of 1 Gbit/s, with one rank on each host.

    python benchmarks/algorithm_links.py --hosts 3,4,5 --output benchmarks/algorithm_links.json

Hosts are network namespaces of this machine, which requires root. The backend is Gloo. Bytes cost
as much as in the model, however busy the machine is, because the links are slower than the machine.
For each size it prints the median of each algorithm, half the distance of the quartiles, and the
share of the link: the time of the bytes of the path at 125 MB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.algorithm_costs import cost
from phalanx.bench.machine import machine, versions
from phalanx.bench.plan import format_size
from phalanx.parallel.algorithms import ALGORITHMS
from tests.networks import Network

SIZES = (8, 1 << 16, 1 << 20, 8 << 20)
RATE = 1e9 / 8
LIMIT = 600


def measure_rank(rounds: int) -> None:
    """Measure on this rank; rank 0 prints the results."""
    dist.init_process_group("gloo")
    algorithms = {"own": dist.all_reduce, **ALGORITHMS}
    results = []
    for size in SIZES:
        tensor = torch.empty(size // 4)
        times: dict[str, list[float]] = {name: [] for name in algorithms}
        for number in range(rounds + 1):
            for name, algorithm in algorithms.items():
                tensor.fill_(number)
                dist.barrier()
                start = time.perf_counter()
                algorithm(tensor)
                slowest = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if tensor[-1].item() != number * dist.get_world_size():
                    raise SystemExit(f"{name} gave {tensor[-1].item()} in round {number}")
                if number:  # the first round warms up
                    times[name].append(slowest.item())
        results.append({"bytes": size, "seconds": times})
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def start(hosts: int, rounds: int) -> list[dict[str, object]]:
    """Run the measurement on a number of hosts; return the results of rank 0."""
    command = [sys.executable, __file__, "--rank", "--rounds", str(rounds)]
    with Network(hosts, "1gbit") as network:
        variables = {
            "WORLD_SIZE": str(hosts),
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        ranks = [
            network.start(rank, command, {**variables, "RANK": str(rank)}, subprocess.PIPE)
            for rank in range(hosts)
        ]
        outputs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("\n".join(outputs))
    return json.loads(outputs[0].splitlines()[-1])


def print_results(hosts: int, results: list[dict[str, object]]) -> None:
    """Print a line for each size and algorithm."""
    print(f"\n{hosts} hosts, links of 1 Gbit/s, Gloo; ms")
    for result in results:
        size = result["bytes"]
        for name, seconds in result["seconds"].items():
            low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
            link = "" if name == "own" else cost(name, hosts).path_lengths * size / RATE
            share = "" if name == "own" else f"link {link / median:4.0%}"
            print(
                f"{format_size(size):>8}  {name:28} {median * 1e3:8.2f} "
                f"±{(high - low) / 2 * 1e3:.2f}  {share}"
            )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", default="4", help="numbers of hosts, such as 3,4,5")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure_rank(options.rounds)
        return
    record = {
        "command": " ".join(["python", "benchmarks/algorithm_links.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "hosts": {},
    }
    for hosts in map(int, options.hosts.split(",")):
        record["hosts"][str(hosts)] = results = start(hosts, options.rounds)
        print_results(hosts, results)
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
