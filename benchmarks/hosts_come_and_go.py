"""Hosts that join and leave a training at random, through the relay, over slow links.

    python benchmarks/hosts_come_and_go.py --events 100 --output benchmarks/hosts_come_and_go.json

Trains with DiLoCo and `phalanx.train.Elastic` on hosts in network namespaces (root is required),
whose links have the given rate. Host 0 stays. The others are killed, or ended by SIGTERM, and
started again at random times; one in five events is followed by the next one at once. After each
exchange, each rank writes a digest of the common parameters: they must be the same on all ranks.
Other hosts must be able to connect to one port only, on host 0. Prints the times from an event to
the first exchange of the new ranks.

`--outage`: then a host's link is down for some time. `--restart`: then host 0, which has the store
and the relay, is killed and started again; the training begins anew. `--clocks`: the clock of host
1 is ahead and that of host 2 behind by some seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import nn

from phalanx import key
from phalanx.bench.machine import machine, versions
from phalanx.parallel import DiLoCo
from phalanx.train import Elastic

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clocks import skew
from tests.networks import Network

PORT = 29500
LIMIT = 120.0
"""Seconds after which a job that has not gone on counts as one that hangs."""


def run_rank(folder: Path, width: int) -> None:
    """Train until the file `stop` names an exchange; write a line for each exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DiLoCo(inner, 16, overlap=2, compress="int8", early=True, elastic=True)
    log = os.open(folder / "exchanges", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    logged = -1
    for step in Elastic(model, optimizer, 10**9, wait=0.0):
        with step:
            optimizer.zero_grad()
            inputs = torch.randn(8, 64)
            nn.functional.mse_loss(step.model(inputs), inputs.sin()).backward()
            optimizer.step()
            time.sleep(0.02)  # as if the model were larger: the cores are for the launchers
            if optimizer.exchanges != logged:
                logged = optimizer.exchanges
                common = torch.cat([each.outer.detach() for each in optimizer._fragments])
                digest = hashlib.sha256(common.numpy().tobytes()).hexdigest()
                line = {
                    "exchange": logged,
                    "digest": digest,
                    "size": dist.get_world_size(),
                    "pid": os.environ["PHALANX_HOST_ID"] + str(os.getpid()),
                    "time": time.monotonic(),
                }
                os.write(log, (json.dumps(line) + "\n").encode())
                stop = folder / "stop"
                if stop.exists() and logged >= int(stop.read_text()):
                    break
    optimizer.synchronize()
    dist.destroy_process_group()


class Job:
    """A training on hosts that come and go."""

    def __init__(self, network: Network, folder: Path, options: argparse.Namespace) -> None:
        self._network, self._folder, self._options = network, folder, options
        self._hosts: dict[int, subprocess.Popen[str]] = {}
        self._starts = 0
        off = options.clocks
        self._clocks = {1: skew(off, folder), 2: skew(-off, folder)} if off else {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._hosts.values():
            process.kill()

    def start(self, host: int) -> None:
        """Start the launcher of a host."""
        self._starts += 1
        command = [
            *(sys.executable, "-m", "phalanx", "run", "--elastic"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", "--rejoin", "120"),
            *("--nnodes", f"1:{self._options.hosts}", "--node-rank", str(host)),
            *("--key-file", str(self._folder / "key")),
            *("--master-addr", self._network.addresses[0], "--master-port", str(PORT)),
            *(__file__, "--rank", str(self._folder), "--width", str(self._options.width)),
        ]
        environment = {
            "PHALANX_TRANSPORT": "relay",
            "PHALANX_HOST_ID": f"host-{host}.{self._starts}.",
            "OMP_NUM_THREADS": "1",
            **self._clocks.get(host, {}),
        }
        with open(self._folder / f"log-{host}", "a", encoding="utf-8") as log:
            self._hosts[host] = self._network.start(host, command, environment, output=log)

    def end(self, host: int, number: signal.Signals) -> None:
        """End the launcher of a host, and its rank with it."""
        process = self._hosts.pop(host)
        for _ in range(10):
            if number == signal.SIGKILL:
                process.kill()
            else:  # `unshare`, the parent of the launcher, ignores it
                for launcher in psutil.Process(process.pid).children():
                    launcher.send_signal(number)
            # A launcher that is just starting ignores it too, as the first process of a namespace.
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT / 10)
                return
        self._fail(f"host {host} did not end")

    @property
    def alive(self) -> list[int]:
        """The hosts whose launchers run, except for host 0."""
        return [host for host in self._hosts if host]

    def restart_first(self) -> None:
        """Kill host 0, and start it again a moment later; the ranks write into a new file."""
        self.end(0, signal.SIGKILL)
        path = self._folder / "exchanges"
        path.rename(path.with_name("exchanges-before"))
        time.sleep(3)
        self.start(0)

    def check_ports(self) -> None:
        """Check that other hosts can connect to one port in the whole job, on host 0."""
        for host, process in self._hosts.items():
            ports = listening_ports(process.pid)
            if ports != ([PORT] if host == 0 else []):
                self._fail(f"host {host} listens on the ports {ports}")

    def lines(self) -> list[dict[str, Any]]:
        """Return what the ranks have written so far."""
        path = self._folder / "exchanges"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def wait_until_settled(self, since: float) -> float:
        """Wait for an exchange of exactly the hosts that are there; return its time."""
        end = time.monotonic() + LIMIT
        while True:
            for host, process in self._hosts.items():
                if process.poll() is not None:
                    self._fail(f"host {host} ended with exit code {process.returncode}")
            found = [
                line["time"]
                for line in self.lines()[-50:]
                if line["time"] > since and line["size"] == len(self._hosts)
            ]
            if found:
                return float(found[0])
            if time.monotonic() > end:
                self._fail(f"no exchange of {len(self._hosts)} hosts within {LIMIT:g} s")
            time.sleep(0.05)

    def _fail(self, reason: str) -> NoReturn:
        logs = "\n".join(
            f"---- {path.name}\n" + path.read_text()[-3000:]
            for path in sorted(self._folder.glob("log-*"))
        )
        raise SystemExit(f"{logs}\n{reason}")

    def stop(self) -> None:
        """Let all ranks end after the same exchange."""
        newest = max(line["exchange"] for line in self.lines())
        stop = self._folder / "stop.new"
        stop.write_text(str(newest + 5))
        stop.rename(self._folder / "stop")
        for host, process in self._hosts.items():
            if process.wait(LIMIT) != 0:
                self._fail(f"host {host} ended with exit code {process.returncode}")


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which processes listen in the network of one, beyond loopback."""
    found = set()
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            if state == "0A" and address != loopback:
                found.add(int(port, 16))
    return sorted(found)


def check_digests(lines: list[dict[str, Any]]) -> int:
    """Check that all ranks had the same parameters after each exchange; return their number.

    The training must not have begun anew either. A rank that is lost may have finished its last
    exchange before the others, which then repeat it: that one is left out.
    """
    last = {line["pid"]: line["exchange"] for line in lines}
    digests: dict[int, set[str]] = defaultdict(set)
    newest, end = 0, max(last.values())
    for line in lines:
        if last[line["pid"]] != line["exchange"] or line["exchange"] > end - 5:
            digests[line["exchange"]].add(line["digest"])
        if line["exchange"] < newest - 5:  # ranks write in any order
            raise SystemExit(f"exchange {line['exchange']} came after exchange {newest}")
        newest = max(newest, line["exchange"])
    if different := [number for number, each in digests.items() if len(each) > 1]:
        raise SystemExit(f"ranks differ after the exchanges {different}")
    return len(digests)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job and return the record."""
    choose = random.Random(options.seed)
    times = defaultdict[str, list[float]](list)
    counts = {"join": 0, "leave": 0, "not waited for": 0}
    with ExitStack() as stack:
        network = stack.enter_context(Network(options.hosts, options.rate))
        job = stack.enter_context(Job(network, folder, options))
        for host in range(options.hosts):
            job.start(host)
        job.wait_until_settled(0.0)
        for number in range(options.events):
            time.sleep(choose.uniform(0.0, 2.0))
            absent = sorted(set(range(1, options.hosts)) - set(job.alive))
            joins = bool(absent) and (not job.alive or choose.random() < 0.5)
            begin = time.monotonic()
            if joins:
                job.start(choose.choice(absent))
            else:
                ending = choose.choice([signal.SIGKILL, signal.SIGTERM])
                job.end(choose.choice(job.alive), ending)
            kind = "join" if joins else "leave"
            counts[kind] += 1
            if choose.random() < 0.2 and number < options.events - 1:
                counts["not waited for"] += 1
                continue
            seconds = job.wait_until_settled(begin) - begin
            times[kind].append(seconds)
            print(
                f"{number + 1:4} {kind:6} {len(job.alive) + 1} hosts {seconds:6.2f} s", flush=True
            )
        for host in sorted(set(range(1, options.hosts)) - set(job.alive)):
            job.start(host)
        job.wait_until_settled(time.monotonic())
        if options.outage:
            network.disconnect(host := options.hosts - 1)
            time.sleep(options.outage)
            network.reconnect(host)
            begin = time.monotonic()
            times["outage"] = [job.wait_until_settled(begin) - begin]
        exchanges = check_digests(job.lines())
        job.check_ports()
        if options.restart:
            begin = time.monotonic()
            job.restart_first()
            times["restart"] = [job.wait_until_settled(begin) - begin]
        job.stop()
        check_digests(job.lines())
    return {
        "events": counts,
        "exchanges": exchanges,
        **{
            f"{kind}_seconds": {
                "median": statistics.median(values),
                "largest": max(values),
            }
            for kind, values in times.items()
        },
    }


def main() -> None:
    """Run the job and print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--rate", default="100mbit", help="of each link, in the syntax of `tc`")
    parser.add_argument("--width", type=int, default=2000, help="of the hidden layer")
    parser.add_argument("--outage", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--restart", action="store_true", help="of host 0")
    parser.add_argument("--clocks", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--folder", type=Path, help="a new folder for the logs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.width)
        return
    folder = options.folder or Path(f"come-and-go-{options.seed}").resolve()
    folder.mkdir(parents=True)
    key.create_file(str(folder / "key"))
    print(f"seed {options.seed}, logs in {folder}")
    found = run(options, folder.resolve())
    print(json.dumps(found, indent=1))
    if options.output:
        command = f"python benchmarks/hosts_come_and_go.py {' '.join(sys.argv[1:])}"
        record = {"command": command, "machine": {**machine(), **versions()}, **found}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
