"""All-reduce between hosts by encoding, over links of a given rate.

    python benchmarks/compression.py --rates 20mbit,100mbit --output benchmarks/compression.json

Hosts are network namespaces with one rank each (root is required). `gloo`: PyTorch's Gloo.
`float32`: Phalanx without compression. `bfloat16`, `int8`, `int4`: `phalanx.Options(compress=...)`.
`connections`: float32 over four connections. The methods take turns on the same ranks, each with
new random values; the time is that of the slowest rank. With `--transport relay`, all hosts but
the first are reached through the relay only; `send` is a transfer from host 1 to host 2, through
both links of host 0.

Prints the median, its ratio to float32, the bytes that a host sends, and the share of the link's
rate that these bytes fill.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import phalanx
from phalanx import key
from phalanx.bench.machine import machine, versions

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.networks import Network

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """Return a rate in the syntax of `tc` as a number."""
    return float(rate[:-4]) * UNITS[rate[-4:]]


def bytes_sent() -> int:
    """Return the bytes that this host's interface has sent."""
    return int(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent)


def form_groups(transport: str) -> dict[str, Any]:
    """Return the group of each method; the name of a new group's backend is its first word."""
    groups: dict[str, Any] = {"float32": dist.group.WORLD}
    for encoding in ("bfloat16", "int8", "int4"):
        groups[encoding] = dist.new_group(pg_options=phalanx.Options(compress=encoding))
    groups["connections"] = dist.new_group(pg_options=phalanx.Options(connections=4))
    if transport != "relay":  # its hosts do not reach each other
        groups["gloo"] = dist.new_group(backend="gloo")
    return groups


def measure(call: Any, tensor: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of the slowest rank, and the bytes that the host which sends most sent."""
    tensor.normal_()
    dist.barrier()
    sent, begin = bytes_sent(), time.perf_counter()
    call(tensor)
    figures = torch.tensor([time.perf_counter() - begin, 0.0], dtype=torch.float64)
    dist.barrier()
    figures[1] = bytes_sent() - sent
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    seconds, most = figures.tolist()
    return seconds, most


def send_to_next(tensor: torch.Tensor) -> None:
    """Send a tensor from rank 1 to rank 2, which answers."""
    if dist.get_rank() == 1:
        dist.send(tensor, 2)
        dist.recv(torch.empty(1), 2)
    elif dist.get_rank() == 2:
        dist.recv(tensor, 1)
        dist.send(torch.empty(1), 1)


def run_rank(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    groups = form_groups(options.transport)
    calls: dict[str, Any] = {
        name: lambda tensor, group=group: dist.all_reduce(tensor, group=group)
        for name, group in groups.items()
    }
    if options.transport == "relay":
        calls["send"] = send_to_next
    chosen = random.Random(1)
    for size in options.sizes:
        tensor = torch.empty(size)
        figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for round_number in range(options.rounds + 1):
            for name in chosen.sample(sorted(calls), len(calls)):
                found = measure(calls[name], tensor)
                if round_number:  # the first one connects
                    figures[name].append(found)
        if dist.get_rank() == 0:
            print("figures " + json.dumps([size, figures]), flush=True)
    dist.destroy_process_group()


def run_job(rate: str, options: argparse.Namespace) -> list[Any]:
    """Measure with links of a rate; return what rank 0 has printed."""
    with (
        Network(options.hosts, rate, options.delay) as network,
        tempfile.TemporaryDirectory() as at,
    ):
        key.create_file(f"{at}/key")
        processes = []
        for host in range(options.hosts):
            command = [
                *(sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "1"),
                *("--nnodes", str(options.hosts), "--node-rank", str(host)),
                *("--master-addr", network.addresses[0], "--master-port", "29500"),
                *("--key-file", f"{at}/key"),
                *(__file__, "--rank", *sys.argv[1:]),
            ]
            environment = {
                "PHALANX_TRANSPORT": options.transport,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            processes.append(network.start(host, command, environment, output=subprocess.PIPE))
        outputs = [process.communicate(timeout=options.limit)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(outputs))
    marked = [line.partition("figures ")[2] for line in outputs[0].splitlines()]
    return [json.loads(line) for line in marked if line]


def summarize(figures: list[tuple[float, float]]) -> dict[str, float]:
    """Return the medians and the spread of a method."""
    seconds = sorted(each[0] for each in figures)
    return {
        "seconds": statistics.median(seconds),
        "smallest": seconds[0],
        "largest": seconds[-1],
        "bytes": statistics.median(each[1] for each in figures),
    }


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [int(float(part)) for part in text.split(",")]


def main() -> None:
    """Run the benchmark and print a table for each rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", default="20mbit,100mbit,1gbit", help="in the syntax of `tc`")
    parser.add_argument("--sizes", type=numbers, default=[1_000_000, 8_000_000], help="in elements")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.0, help="from host to host, in seconds")
    parser.add_argument("--transport", choices=("gloo", "relay"), default="gloo")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for one rate")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return
    results = []
    for rate in options.rates.split(","):
        for size, figures in run_job(rate, options):
            print(f"\n{rate}, {size:,} elements, {options.hosts} hosts, {options.transport}")
            print(
                f"{'':12} {'seconds':>9} {'spread':>17} {'ratio':>6} {'MB sent':>8} {'of rate':>8}"
            )
            found = {name: summarize(each) for name, each in figures.items()}
            for name, each in sorted(found.items(), key=lambda item: item[1]["seconds"]):
                each["ratio"] = each["seconds"] / found["float32"]["seconds"]
                each["share"] = each["bytes"] * 8 / each["seconds"] / bits_per_second(rate)
                spread = f"{each['smallest']:.3f} to {each['largest']:.3f}"
                print(
                    f"{name:12} {each['seconds']:9.3f} {spread:>17} {each['ratio']:6.2f} "
                    f"{each['bytes'] / 1e6:8.2f} {each['share']:8.1%}",
                    flush=True,
                )
            results.append({"rate": rate, "elements": size, "methods": found})
    if options.output:
        command = f"python benchmarks/compression.py {' '.join(sys.argv[1:])}"
        record = {"command": command, "machine": {**machine(), **versions()}, "results": results}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
