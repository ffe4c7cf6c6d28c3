"""How an all-reduce over many hosts scales: a simulation of what `src/phalanx/hierarchical` does.

    python benchmarks/scale.py benchmarks/hosts_[23]_block.json --plot docs/scale.png

Fits the costs of a step and of memory to what `benchmarks/hosts.py --json` has measured, says how
far off the fit is, and predicts up to 10,000 ranks on links of another speed, each rank with a core
of its own (`--copying`: what `phalanx bench` measures for a reduce-scatter). What is simulated is
each chunk of the tensor on its way through one host: all hosts do the same at the same time, since
layout and sizes are the same on all, so that what a host waits for is what it sends itself. The
formula beside it is the usual one (latency, bandwidth), which knows no chunks. See
docs/design/scale.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MIB = 1 << 20
CHUNK = 4 * MIB  # hierarchical/execution.py: CHUNK_BYTES
WINDOW = 4  # hierarchical/execution.py: _WINDOW
SMALL = 64 * 1024  # hierarchical/reductions.py: _SMALL_BYTES
MEASURED_RATE = 1e9 / 8  # benchmarks/hosts.py: RATE
MEASURED_RANKS = 2  # benchmarks/hosts.py: RANKS, of each host
SIZES = (SMALL, MIB, 64 * MIB, 1024 * MIB)


@dataclass(frozen=True)
class Costs:
    """Of a host and its link."""

    latency: float
    """Seconds that a message is on its way, of the wire alone."""
    rate: float
    """Bytes per second of the link of a host, in each direction."""
    step: float
    """Seconds of a rank for one step: post, sleep, wake, and what a transport does for it."""
    copying: float
    """Bytes of the tensor per second that a rank passes in a step in memory."""
    bus: float = math.inf
    """The same of all ranks of a host together: its memory's own limit."""

    def in_memory(self, size: float, local: int) -> float:
        """Seconds of a reduce-scatter, or an all-gather, of so many bytes on a host.

        A rank stages and reads about as much as the tensor has, however many there are.
        """
        return size * max(1 / self.copying, local / self.bus)


@dataclass(frozen=True)
class Plan:
    """How hosts talk: "ring", or "halving" (recursive halving and doubling), and in what chunks."""

    algorithm: str = "ring"
    chunk: int = CHUNK

    def steps(self, hosts: int, size: float) -> list[float]:
        """Bytes that a host sends in each step, for a chunk of this size."""
        if self.algorithm == "ring":
            return [size / hosts] * (2 * (hosts - 1))
        halves = [size / 2**step for step in range(1, math.ceil(math.log2(hosts)) + 1)]
        return [*halves, *reversed(halves)]


NOW = Plan()
PLANS = {
    "as it is": NOW,
    "larger chunks": Plan("ring"),  # whose size follows the hosts: see `adapted`
    "halving": Plan("halving"),
}


def adapted(name: str, hosts: int) -> Plan:
    """A plan of `PLANS` for so many hosts."""
    if name == "larger chunks":
        return replace(PLANS[name], chunk=max(CHUNK, hosts * 256 * 1024))
    return PLANS[name]


def simulate(costs: Costs, hosts: int, local: int, size: float, plan: Plan = NOW) -> float:
    """Seconds of an all-reduce of `size` bytes by the rails, chunk by chunk, step by step.

    The loop is that of `hosts.run.pipelined`: each round takes the next step of every chunk under
    way, oldest first, and waits for what that one waits for, whatever others could do meanwhile.
    """
    left = size
    source: Iterator[float] = iter([plan.chunk] * int(size // plan.chunk) + [size % plan.chunk])
    active: deque[tuple[Iterator[tuple[float, float]], float]] = deque()
    now = link_free = 0.0
    while left > 0 or active:
        if len(active) < WINDOW and left > 0:
            chunk = next(source)
            left -= chunk
            active.append((_stages(costs, hosts, local, chunk, plan), 0.0))
        for _ in range(len(active)):
            stages, awaited = active.popleft()
            now = max(now, awaited)
            stage = next(stages, None)
            if stage is None:
                continue
            busy, sent = stage
            now += busy
            if sent:
                link_free = max(link_free, now) + sent / costs.rate
                active.append((stages, link_free + costs.latency))
    return now


def _stages(
    costs: Costs, hosts: int, local: int, chunk: float, plan: Plan
) -> Iterator[tuple[float, float]]:
    """Of a chunk on a host: seconds of work, and the bytes that all its rails send after it."""
    memory = costs.in_memory(chunk, local)
    steps = plan.steps(hosts, chunk)
    for number, sent in enumerate(steps):
        # A rank combines its rail's share of what has come, in the first half of the steps.
        combined = sent / local / costs.copying if 0 < number <= len(steps) // 2 else 0.0
        yield costs.step + (combined if number else memory), sent
    yield costs.step + memory, 0.0


def formula(costs: Costs, hosts: int, size: float) -> float:
    """The same by latency and bandwidth alone, all of it at once: the least a ring can take."""
    steps = 2 * (hosts - 1)
    return steps * (costs.latency + costs.step) + steps / hosts * size / costs.rate


def by_leaders(costs: Costs, hosts: int, size: float) -> float:
    """A small all-reduce: each leader sends all that its host has to every other leader."""
    others = hosts - 1
    posted = others * costs.step
    return posted + costs.latency + others * size / costs.rate + hosts * size / costs.copying


@dataclass(frozen=True)
class Measured:
    """One figure of `benchmarks/hosts.py`."""

    hosts: int
    local: int
    size: int
    seconds: float


def read(paths: Sequence[Path]) -> list[Measured]:
    """The medians of all-reduces by the rails, from files that `benchmarks/hosts.py` wrote."""
    found = []
    for path in paths:
        record = json.loads(path.read_text())
        for result in record["results"]:
            seconds = statistics.median(result["seconds"]["phalanx"])
            local = record.get("ranks", MEASURED_RANKS)
            found.append(Measured(record["hosts"], local, result["bytes"], seconds))
    return found


def said(costs: Costs, each: Measured) -> float:
    """What the simulation says of a figure."""
    return simulate(costs, each.hosts, each.local, each.size)


def fit(measured: Sequence[Measured], rate: float) -> Costs:
    """The costs with which the simulation is nearest to all figures, by ratio."""

    def distance(costs: Costs) -> float:
        ratios = (said(costs, each) / each.seconds for each in measured)
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    # On namespaces of one machine the wire takes no time of its own.
    start = Costs(0.0, rate, 0.0, 1.0)
    tried = (
        replace(start, step=1e-5 * 1.15**one, copying=1e8 * 1.15**two)
        for one in range(45)
        for two in range(35)
    )
    return min(tried, key=distance)


def show_fit(costs: Costs, measured: Sequence[Measured]) -> None:
    """Print the costs, and each figure beside what the simulation says."""
    print(
        f"fitted: {costs.step * 1e6:.0f} us for a step, {costs.copying / 1e9:.2f} GB/s of the "
        "tensor through memory"
    )
    print("  hosts      size  measured  simulated  formula")
    for each in measured:
        by_formula = formula(costs, each.hosts, each.size)
        print(
            f"  {each.hosts:5} {each.size / MIB:6.0f} MiB {each.seconds * 1e3:6.0f} ms "
            f"{said(costs, each) * 1e3:7.0f} ms {by_formula * 1e3:5.0f} ms"
        )


def predict(costs: Costs, ranks: int, local: int) -> list[list[str]]:
    """Rows for a job of so many ranks: size, how it is done, seconds, of the link's best."""
    hosts = max(2, ranks // local)
    rows = []
    for size in SIZES:
        best = 2 * (hosts - 1) / hosts * size / costs.rate
        if size <= SMALL:
            ways = {"leaders": by_leaders(costs, hosts, size)}
            plan = replace(NOW, algorithm="halving")
            ways["halving"] = simulate(costs, hosts, local, size, plan)
        else:
            ways = {
                name: simulate(costs, hosts, local, size, adapted(name, hosts)) for name in PLANS
            }
        for name, seconds in ways.items():
            where = [f"{ranks}", f"{local}", f"{hosts}", _size(size), name]
            rows.append([*where, f"{seconds * 1e3:,.0f}", f"{best / seconds:.1%}"])
    return rows


def _size(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size / 1024:.0f} KiB"


def plot(costs: Costs, local: int, path: Path) -> None:
    """Draw seconds over hosts, for 64 MiB and 1 GiB, for each plan."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=False)
    counts = [2**power for power in range(1, 11)] + [1250]
    for axis, size in zip(axes, (64 * MIB, 1024 * MIB), strict=True):
        for name in PLANS:
            times = [simulate(costs, hosts, local, size, adapted(name, hosts)) for hosts in counts]
            axis.plot(counts, times, marker="o", markersize=3, label=name)
        least = [2 * (hosts - 1) / hosts * size / costs.rate for hosts in counts]
        axis.plot(counts, least, color="grey", linestyle="--", label="what the link allows")
        axis.set(xscale="log", yscale="log", xlabel="hosts", ylabel="seconds")
        axis.set_title(f"all_reduce of {_size(size)}, {costs.rate * 8 / 1e9:g} Gbit/s per host")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"simulated: {local} ranks a host, {costs.latency * 1e6:g} us")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the command line, fit, predict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "measured", nargs="+", type=Path, help="files of benchmarks/hosts.py --json"
    )
    parser.add_argument("--gbit", type=float, default=25.0, help="of the links to predict for")
    parser.add_argument("--latency", type=float, default=20.0, help="of these, in microseconds")
    parser.add_argument("--step", type=float, help="in microseconds, instead of what was fitted")
    parser.add_argument("--copying", type=float, default=12.0, help="of a rank, in GB/s")
    parser.add_argument("--bus", type=float, default=100.0, help="of a host's memory, in GB/s")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    measured = read(options.measured)
    costs = fit(measured, MEASURED_RATE)
    show_fit(costs, measured)
    there = replace(
        costs,
        rate=options.gbit * 1e9 / 8,
        latency=options.latency / 1e6,
        step=options.step / 1e6 if options.step else costs.step,
        copying=options.copying * 1e9,
        bus=options.bus * 1e9,
    )
    print(
        f"\npredicted for {options.gbit:g} Gbit/s and {options.latency:g} us, "
        f"{there.step * 1e6:.0f} us for a step, {options.copying:g} GB/s through memory by a rank, "
        f"{options.bus:g} by all"
    )
    print("   ranks  a host  hosts      size  way                 ms  of the link")
    for ranks in (64, 1024, 10_000):
        for local in (8, 16, 64):
            if ranks >= 2 * local:
                for row in predict(there, ranks, local):
                    print("{:>8}{:>8}{:>7}{:>10}  {:<14}{:>8}{:>9}".format(*row))
    if options.plot:
        plot(there, 8, options.plot)


if __name__ == "__main__":
    main()
