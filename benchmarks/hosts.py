"""All-reduce over hosts with links of 1 Gbit/s: Phalanx and flat Gloo in turns, in one run.

    python benchmarks/hosts.py --hosts 2 --order block --json benchmarks/hosts_block.json

Hosts are network namespaces of this machine with 2 ranks each (so it needs root). `--order block`
numbers the ranks host after host, `alternate` in turns. Prints per size the median of both, what
the link allows for the bytes that have to cross it, 2(h-1)/h of the tensor per host, and the bytes
that each host's interface has sent.
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


def sent() -> int:
    """Bytes that this host's interface has sent."""
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent


def rank_of(rounds: int) -> None:
    """What each rank runs; rank 0 writes what came out."""
    dist.init_process_group("phalanx")
    groups = {"phalanx": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    results = []
    for size in SIZES:
        tensor = torch.empty(size // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        wire: dict[str, list[int]] = {name: [] for name in groups}
        for number in range(rounds + 1):
            for name, group in groups.items():
                tensor.fill_(number)
                dist.barrier()
                before, start = sent(), time.perf_counter()
                dist.all_reduce(tensor, group=group)
                took = time.perf_counter() - start
                dist.barrier()
                crossed = torch.tensor([sent() - before])
                slowest = torch.tensor([took])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                dist.all_reduce(crossed, dist.ReduceOp.MAX)
                if number:
                    times[name].append(slowest.item())
                    wire[name].append(int(crossed.item()))
        results.append({"bytes": size, "seconds": times, "sent": wire})
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def start(hosts: int, order: str, rounds: int) -> list[dict[str, object]]:
    """Run it on so many hosts; what rank 0 wrote."""
    size = hosts * RANKS
    processes = []
    with Network(hosts, "1gbit") as network:
        machines = [Host(network, host) for host in range(hosts)]
        for rank in range(size):
            host = rank // RANKS if order == "block" else rank % hosts
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": network.addresses[0],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            processes.append(machines[host].start(place, rounds))
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
        for machine in machines:
            machine.end()
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(outputs))
    return json.loads(outputs[0].splitlines()[-1])


class Host:
    """A process in whose namespaces the ranks of a host are, which see each other's so."""

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
        raise SystemExit("a host didn't start")

    def end(self) -> None:
        """Kill all that runs on it."""
        self._anchor.kill()
        self._anchor.wait()

    def start(self, place: dict[str, str], rounds: int) -> subprocess.Popen[str]:
        """Start a rank."""
        inside = ["nsenter", "--target", str(self._pid), "--net", "--pid", "--mount", "--uts"]
        command = [sys.executable, __file__, "--rank", "--rounds", str(rounds)]
        return subprocess.Popen(
            [*inside, *command],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def main() -> None:
    """Read the command line, run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--order", choices=("block", "alternate"), default="block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_of(options.rounds)
        return
    results = start(options.hosts, options.order, options.rounds)
    hosts = options.hosts
    print(f"{hosts} hosts x {RANKS} ranks, ranks in {options.order} order, links of 1 Gbit/s")
    print("     size   phalanx      gloo  gloo/phalanx  of the link  sent / least (phalanx, gloo)")
    for result in results:
        size = result["bytes"]
        least = 2 * (hosts - 1) / hosts * size
        ours, theirs = (statistics.median(result["seconds"][name]) for name in ("phalanx", "gloo"))
        wires = [statistics.median(result["sent"][name]) / least for name in ("phalanx", "gloo")]
        print(
            f"{size >> 20:5} MiB {ours * 1e3:6.0f} ms {theirs * 1e3:6.0f} ms {theirs / ours:13.2f} "
            f"{least / RATE / ours:12.0%}  {wires[0]:.3f} {wires[1]:.3f}"
        )
    if options.json:
        record = {"command": sys.argv, "hosts": hosts, "order": options.order, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
