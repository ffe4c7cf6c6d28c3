"""All-reduce over hosts with links of 1 Gbit/s: Phalanx and flat Gloo alternate in one run.

    python benchmarks/hosts.py --hosts 2 --order block --output benchmarks/hosts_block.json

Hosts are network namespaces of this machine with 2 ranks each, so root is required. `--order block`
numbers the ranks host by host, `alternate` round robin. For each size, prints the median time of
both, the share of the link's limit, and the bytes sent by each host's interface relative to the
minimum, 2(h-1)/h of the tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.networks import Network

SIZES = (1 << 20, 16 << 20, 64 << 20)
RATE = 1e9 / 8
RANKS = 2


def bytes_sent() -> int:
    """Return the bytes that this host's interface has sent."""
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent


def run_rank(rounds: int) -> None:
    """Run the benchmark on a rank; rank 0 prints the results."""
    dist.init_process_group("phalanx")
    groups = {"phalanx": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    results = []
    for size in SIZES:
        tensor = torch.empty(size // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        sent: dict[str, list[int]] = {name: [] for name in groups}
        for number in range(rounds + 1):
            for name, group in groups.items():
                tensor.fill_(number)
                dist.barrier()
                before, begin = bytes_sent(), time.perf_counter()
                dist.all_reduce(tensor, group=group)
                seconds = time.perf_counter() - begin
                dist.barrier()
                most_sent = torch.tensor([bytes_sent() - before])
                slowest = torch.tensor([seconds])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                dist.all_reduce(most_sent, dist.ReduceOp.MAX)
                if number:
                    times[name].append(slowest.item())
                    sent[name].append(int(most_sent.item()))
        results.append({"bytes": size, "seconds": times, "sent": sent})
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def run_job(hosts: int, order: str, rounds: int) -> list[dict[str, object]]:
    """Run the benchmark on `hosts` hosts, and return the results that rank 0 printed."""
    size = hosts * RANKS
    processes = []
    with Network(hosts, "1gbit") as network:
        namespaces = [Host(network, host) for host in range(hosts)]
        for rank in range(size):
            host = rank // RANKS if order == "block" else rank % hosts
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": network.addresses[0],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            processes.append(namespaces[host].start(environment, rounds))
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
        for namespace in namespaces:
            namespace.end()
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(outputs))
    return json.loads(outputs[0].splitlines()[-1])


class Host:
    """A process whose namespaces the ranks of a host enter, so that they see each other."""

    def __init__(self, network: Network, host: int) -> None:
        self._anchor = network.start(host, ["sleep", "infinity"], output=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            children = psutil.Process(self._anchor.pid).children(recursive=True)
            named = [child for child in children if child.name() == "sleep"]
            if named:
                self._pid = named[0].pid
                return
            time.sleep(0.01)
        raise SystemExit("a host did not start")

    def end(self) -> None:
        """Kill all processes of the host."""
        self._anchor.kill()
        self._anchor.wait()

    def start(self, environment: dict[str, str], rounds: int) -> subprocess.Popen[str]:
        """Start a rank."""
        inside = ["nsenter", "--target", str(self._pid), "--net", "--pid", "--mount", "--uts"]
        command = [sys.executable, __file__, "--rank", "--rounds", str(rounds)]
        return subprocess.Popen(
            [*inside, *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--order", choices=("block", "alternate"), default="block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rounds)
        return
    results = run_job(options.hosts, options.order, options.rounds)
    hosts = options.hosts
    print(f"{hosts} hosts x {RANKS} ranks, ranks in {options.order} order, links of 1 Gbit/s")
    print("     size   phalanx      gloo  gloo/phalanx  of the link  sent/minimum (phalanx, gloo)")
    for result in results:
        size = result["bytes"]
        minimum = 2 * (hosts - 1) / hosts * size
        phalanx, gloo = (statistics.median(result["seconds"][name]) for name in ("phalanx", "gloo"))
        sent = [statistics.median(result["sent"][name]) / minimum for name in ("phalanx", "gloo")]
        print(
            f"{size >> 20:5} MiB {phalanx * 1e3:6.0f} ms {gloo * 1e3:6.0f} ms "
            f"{gloo / phalanx:13.2f} {minimum / RATE / phalanx:12.0%}  {sent[0]:.3f} {sent[1]:.3f}"
        )
    if options.output:
        record = {"command": sys.argv, "hosts": hosts, "order": options.order, "results": results}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
