"""A simulation of how the all-reduce of `src/phalanx/hierarchical` scales to many hosts.

    python benchmarks/scale.py benchmarks/hosts_[23]_block.json --plot docs/scale.png

Fits the costs of a step and of memory to the measurements of `benchmarks/hosts.py --output`, prints
the error of the fit, and predicts up to 10,000 ranks with a core each, on links of another speed.
`--rank-bandwidth` is the result of `phalanx bench` for a reduce-scatter. Each chunk of the tensor
is simulated on its way through one host. All hosts do the same at the same time, since layout and
sizes are the same on all: a host waits for as much as it sends itself. The usual formula (latency,
bandwidth), which does not include chunks, is printed for comparison. See docs/design/scale.md.
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
CHUNKS_IN_FLIGHT = 4  # hierarchical/execution.py: _CHUNKS_IN_FLIGHT
SMALL = 64 * 1024  # hierarchical/reductions.py: _SMALL_BYTES
MEASURED_RATE = 1e9 / 8  # benchmarks/hosts.py: RATE
MEASURED_RANKS = 2  # benchmarks/hosts.py: RANKS, of each host
SIZES = (SMALL, MIB, 64 * MIB, 1024 * MIB)


@dataclass(frozen=True)
class Costs:
    """The costs of a host and its link."""

    latency: float
    """The latency of a message in seconds, of the wire alone."""
    rate: float
    """The bytes per second of a host's link, in each direction."""
    step: float
    """Seconds of a rank for one step: post, sleep, wake, and the work of the transport."""
    rank_bandwidth: float
    """The bytes of the tensor per second that a rank processes in a step in memory."""
    host_bandwidth: float = math.inf
    """The limit of the host's memory: the same for all ranks of a host together."""

    def in_memory(self, size: float, local: int) -> float:
        """Return the seconds of a reduce-scatter or an all-gather of `size` bytes on a host.

        A rank stages and reads about the size of the tensor, regardless of the number of ranks.
        """
        return size * max(1 / self.rank_bandwidth, local / self.host_bandwidth)


@dataclass(frozen=True)
class Plan:
    """An algorithm, "ring" or "halving" (recursive halving and doubling), and its chunk size."""

    algorithm: str = "ring"
    chunk: int = CHUNK

    def steps(self, hosts: int, size: float) -> list[float]:
        """Return the bytes that a host sends in each step, for a chunk of this size."""
        if self.algorithm == "ring":
            return [size / hosts] * (2 * (hosts - 1))
        halves = [size / 2**step for step in range(1, math.ceil(math.log2(hosts)) + 1)]
        return [*halves, *reversed(halves)]


CURRENT = Plan()
PLANS = {
    "as it is": CURRENT,
    "larger chunks": Plan("ring"),  # the chunk size depends on the hosts: see `adapt_plan`
    "halving": Plan("halving"),
}


def adapt_plan(name: str, hosts: int) -> Plan:
    """Return a plan of `PLANS` for a number of hosts."""
    if name == "larger chunks":
        return replace(PLANS[name], chunk=max(CHUNK, hosts * 256 * 1024))
    return PLANS[name]


def simulate(costs: Costs, hosts: int, local: int, size: float, plan: Plan = CURRENT) -> float:
    """Return the seconds of an all-reduce of `size` bytes by the rails.

    The loop is that of `hierarchical.execution.run_pipeline`: each round runs the next step of
    every chunk in flight, the oldest first, and waits for the transfers of that chunk, even if
    other chunks could continue.
    """
    remaining = size
    source: Iterator[float] = iter([plan.chunk] * int(size // plan.chunk) + [size % plan.chunk])
    active: deque[tuple[Iterator[tuple[float, float]], float]] = deque()
    now = link_free = 0.0
    while remaining > 0 or active:
        if len(active) < CHUNKS_IN_FLIGHT and remaining > 0:
            chunk = next(source)
            remaining -= chunk
            active.append((_stages(costs, hosts, local, chunk, plan), 0.0))
        for _ in range(len(active)):
            stages, arrival = active.popleft()
            now = max(now, arrival)
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
    """Yield the stages of a chunk on a host: seconds of work, and the bytes that are then sent."""
    memory = costs.in_memory(chunk, local)
    steps = plan.steps(hosts, chunk)
    for number, sent in enumerate(steps):
        # In the first half of the steps, a rank combines its rail's share of the received data.
        combined = sent / local / costs.rank_bandwidth if 0 < number <= len(steps) // 2 else 0.0
        yield costs.step + (combined if number else memory), sent
    yield costs.step + memory, 0.0


def formula(costs: Costs, hosts: int, size: float) -> float:
    """Return the lower bound of a ring, by latency and bandwidth alone, without chunks."""
    steps = 2 * (hosts - 1)
    return steps * (costs.latency + costs.step) + steps / hosts * size / costs.rate


def leaders_formula(costs: Costs, hosts: int, size: float) -> float:
    """Return the seconds of a small all-reduce: each leader sends to every other leader."""
    others = hosts - 1
    posting = others * costs.step
    return (
        posting + costs.latency + others * size / costs.rate + hosts * size / costs.rank_bandwidth
    )


@dataclass(frozen=True)
class Measurement:
    """One result of `benchmarks/hosts.py`."""

    hosts: int
    local: int
    size: int
    seconds: float


def read_measurements(paths: Sequence[Path]) -> list[Measurement]:
    """Return the medians of all-reduces by the rails, from files of `benchmarks/hosts.py`."""
    measurements = []
    for path in paths:
        record = json.loads(path.read_text())
        for result in record["results"]:
            seconds = statistics.median(result["seconds"]["phalanx"])
            local = record.get("ranks", MEASURED_RANKS)
            measurements.append(Measurement(record["hosts"], local, result["bytes"], seconds))
    return measurements


def simulate_measurement(costs: Costs, measurement: Measurement) -> float:
    """Return the simulated seconds of a measurement."""
    return simulate(costs, measurement.hosts, measurement.local, measurement.size)


def fit(measured: Sequence[Measurement], rate: float) -> Costs:
    """Return the costs with which the simulation is closest to all measurements, by ratio."""

    def distance(costs: Costs) -> float:
        ratios = (simulate_measurement(costs, each) / each.seconds for each in measured)
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    # Between namespaces of one machine, the wire has no latency.
    start = Costs(0.0, rate, 0.0, 1.0)
    candidates = (
        replace(start, step=1e-5 * 1.15**one, rank_bandwidth=1e8 * 1.15**two)
        for one in range(45)
        for two in range(35)
    )
    return min(candidates, key=distance)


def print_fit(costs: Costs, measured: Sequence[Measurement]) -> None:
    """Print the costs, and each measurement with its simulation."""
    print(
        f"fitted: {costs.step * 1e6:.0f} us for a step, {costs.rank_bandwidth / 1e9:.2f} GB/s of "
        "the tensor through memory"
    )
    print("  hosts      size  measured  simulated  formula")
    for each in measured:
        by_formula = formula(costs, each.hosts, each.size)
        print(
            f"  {each.hosts:5} {each.size / MIB:6.0f} MiB {each.seconds * 1e3:6.0f} ms "
            f"{simulate_measurement(costs, each) * 1e3:7.0f} ms {by_formula * 1e3:5.0f} ms"
        )


def predict(costs: Costs, ranks: int, local: int) -> list[list[str]]:
    """Return table rows for a job: size, variant, milliseconds, share of the link's limit."""
    hosts = max(2, ranks // local)
    rows = []
    for size in SIZES:
        best = 2 * (hosts - 1) / hosts * size / costs.rate
        if size <= SMALL:
            variants = {"leaders": leaders_formula(costs, hosts, size)}
            plan = replace(CURRENT, algorithm="halving")
            variants["halving"] = simulate(costs, hosts, local, size, plan)
        else:
            variants = {
                name: simulate(costs, hosts, local, size, adapt_plan(name, hosts)) for name in PLANS
            }
        for name, seconds in variants.items():
            labels = [f"{ranks}", f"{local}", f"{hosts}", _format_size(size), name]
            rows.append([*labels, f"{seconds * 1e3:,.0f}", f"{best / seconds:.1%}"])
    return rows


def _format_size(size: float) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size / 1024:.0f} KiB"


def plot(costs: Costs, local: int, path: Path) -> None:
    """Plot seconds over hosts, for 64 MiB and 1 GiB, for each plan."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=False)
    counts = [2**power for power in range(1, 11)] + [1250]
    for axis, size in zip(axes, (64 * MIB, 1024 * MIB), strict=True):
        for name in PLANS:
            times = [
                simulate(costs, hosts, local, size, adapt_plan(name, hosts)) for hosts in counts
            ]
            axis.plot(counts, times, marker="o", markersize=3, label=name)
        limits = [2 * (hosts - 1) / hosts * size / costs.rate for hosts in counts]
        axis.plot(counts, limits, color="grey", linestyle="--", label="limit of the link")
        axis.set(xscale="log", yscale="log", xlabel="hosts", ylabel="seconds")
        axis.set_title(
            f"all_reduce of {_format_size(size)}, {costs.rate * 8 / 1e9:g} Gbit/s per host"
        )
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"simulated: {local} ranks a host, {costs.latency * 1e6:g} us")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Fit the model to measurements and print its predictions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "measured", nargs="+", type=Path, help="files of benchmarks/hosts.py --output"
    )
    parser.add_argument(
        "--gbit", type=float, default=25.0, help="Gbit/s of the links to predict for"
    )
    parser.add_argument("--latency", type=float, default=20.0, help="their latency in microseconds")
    parser.add_argument(
        "--step", type=float, help="microseconds of a step, instead of the fitted ones"
    )
    parser.add_argument("--rank-bandwidth", type=float, default=12.0, help="GB/s of a rank")
    parser.add_argument(
        "--host-bandwidth", type=float, default=100.0, help="GB/s of a host's memory"
    )
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    measured = read_measurements(options.measured)
    costs = fit(measured, MEASURED_RATE)
    print_fit(costs, measured)
    predicted = replace(
        costs,
        rate=options.gbit * 1e9 / 8,
        latency=options.latency / 1e6,
        step=options.step / 1e6 if options.step else costs.step,
        rank_bandwidth=options.rank_bandwidth * 1e9,
        host_bandwidth=options.host_bandwidth * 1e9,
    )
    print(
        f"\npredicted for {options.gbit:g} Gbit/s and {options.latency:g} us, "
        f"{predicted.step * 1e6:.0f} us for a step, {options.rank_bandwidth:g} GB/s through memory "
        f"by a rank, {options.host_bandwidth:g} by all"
    )
    print("   ranks  a host  hosts      size  variant             ms  of the link")
    for ranks in (64, 1024, 10_000):
        for local in (8, 16, 64):
            if ranks >= 2 * local:
                for row in predict(predicted, ranks, local):
                    print("{:>8}{:>8}{:>7}{:>10}  {:<14}{:>8}{:>9}".format(*row))
    if options.plot:
        plot(predicted, 8, options.plot)


if __name__ == "__main__":
    main()
