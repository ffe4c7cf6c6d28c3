"""The costs of the all-reduces of `phalanx.parallel` in the alpha-beta model.

    python benchmarks/algorithm_costs.py benchmarks/algorithms.json --map docs/algorithms/model.png

The model has two parameters: alpha, the seconds of a message of any size, and beta, the seconds of
a byte. An all-reduce takes as long as its path, the messages that follow one another, each at
alpha + bytes beta. If ranks share cores, it also takes at least the time of all messages divided by
the number of cores, because a message keeps a core busy at both ends. This script fits both
parameters to a record of `phalanx bench --algorithms` for each backend, and prints the deviation.
It draws the fastest algorithm by the model. See docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench import results
from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.plot import ALGORITHM_STYLES


@dataclass(frozen=True)
class Cost:
    """Numbers of messages and of tensor lengths sent, on the path and by all ranks together."""

    path_messages: float
    path_lengths: float
    all_messages: float
    all_lengths: float

    def seconds(self, size: float, alpha: float, beta: float, cores: float = math.inf) -> float:
        """Return the predicted seconds of an all-reduce of `size` bytes.

        Args:
            size: Bytes of the tensor.
            alpha: Seconds of a message.
            beta: Seconds of a byte.
            cores: Number of cores that all ranks share.
        """
        path = self.path_messages * alpha + self.path_lengths * size * beta
        work = self.all_messages * alpha + self.all_lengths * size * beta
        # A message is work at both ends.
        return max(path, work / cores)


def cost(name: str, ranks: int) -> Cost:
    """Return the cost of an all-reduce, as in its docstring."""
    other_ranks = ranks - 1
    power = 1 << (ranks.bit_length() - 1)
    rounds, excess_ranks = power.bit_length() - 1, ranks - power
    depth = other_ranks.bit_length()
    if name == "ring_all_reduce_simple":
        return Cost(other_ranks, other_ranks, ranks * other_ranks, ranks * other_ranks)
    if name == "ring_all_reduce":
        return Cost(
            2 * other_ranks, 2 * other_ranks / ranks, 2 * ranks * other_ranks, 2 * other_ranks
        )
    if name == "tree_all_reduce":
        return Cost(2 * depth, 2 * depth, 2 * other_ranks, 2 * other_ranks)
    extra_steps = 2 if excess_ranks else 0
    return Cost(
        2 * rounds + extra_steps,
        2 * (power - 1) / power + extra_steps,
        2 * rounds * power + 2 * excess_ranks,
        2 * (power - 1) + 2 * excess_ranks,
    )


@dataclass(frozen=True)
class Measured:
    """A median measured by `phalanx bench --algorithms`."""

    name: str
    ranks: int
    size: int
    seconds: float

    def predict(self, alpha: float, beta: float, cores: float) -> float:
        """Return the prediction of the model."""
        return cost(self.name, self.ranks).seconds(self.size, alpha, beta, cores)


def read(path: Path, system: str) -> list[Measured]:
    """Return the medians of a system."""
    return [
        Measured(name, report.settings["ranks"], result.bytes, result.timings[label].median)
        for report in results.read(path, algorithms=True)
        for result in report.results
        for name in ALGORITHMS
        if (label := Variant(system, name).label) in result.timings
    ]


def fit(measured: Sequence[Measured], cores: float) -> tuple[float, float]:
    """Return the alpha and beta for which the model is nearest to all measurements, by ratio."""

    def distance(candidate: tuple[float, float]) -> float:
        return sum(
            math.log(each.predict(*candidate, cores) / each.seconds) ** 2 for each in measured
        )

    alphas = [1e-6 * 1.1**power for power in range(100)]
    betas = [1e-11 * 1.1**power for power in range(100)]
    return min(((alpha, beta) for alpha in alphas for beta in betas), key=distance)


def print_fit(path: Path, system: str, cores: int) -> None:
    """Print the fitted parameters, and each measurement with the prediction."""
    measured = read(path, system)
    if not measured:
        print(f"{system}: not measured")
        return
    alpha, beta = fit(measured, cores)
    ratios = [each.predict(alpha, beta, cores) / each.seconds for each in measured]
    print(f"{system}: {alpha * 1e6:.0f} us for a message, {1e-9 / beta:.2f} GB/s")
    for each, ratio in zip(measured, ratios, strict=True):
        print(
            f"  {each.ranks} ranks {format_size(each.size):>8}  {each.name:28} "
            f"{each.seconds * 1e6:9.0f} us, model {ratio:5.2f} of it"
        )


def fastest(ranks: int, size: float, alpha: float, beta: float, cores: float) -> str:
    """Return the fastest algorithm by the model; of equal ones, that with fewer messages."""

    def sort_key(name: str) -> tuple[float, float]:
        required = cost(name, ranks)
        # Rounded, so that rounding errors do not hide equality.
        return float(f"{required.seconds(size, alpha, beta, cores):.9g}"), required.all_messages

    return min(ALGORITHMS, key=sort_key)


def draw_map(path: Path, alpha: float, beta: float) -> None:
    """Draw the fastest algorithm by size and world size, with a core per rank or two in all."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    worlds = range(2, 34)
    sizes = [2.0 ** (power / 4) for power in range(2 * 4, 30 * 4)]
    with mpl.rc_context({"font.size": 10}):
        picture = Figure(figsize=(10.5, 4.6), layout="constrained", facecolor="white")
        panels = picture.subplots(1, 2, sharey=True)
        titles = {math.inf: "each rank has a core and a link", 2.0: "all ranks share two cores"}
        for axes, (cores, title) in zip(panels, titles.items(), strict=True):
            winners = [
                [ALGORITHMS.index(fastest(ranks, size, alpha, beta, cores)) for size in sizes]
                for ranks in worlds
            ]
            axes.pcolormesh(
                sizes,
                list(worlds),
                winners,
                cmap=ListedColormap([ALGORITHM_STYLES[name][0] for name in ALGORITHMS]),
                vmin=0,
                vmax=len(ALGORITHMS) - 1,
                alpha=0.75,
            )
            axes.set_xscale("log", base=2)
            ticks = [2**power for power in (2, 8, 14, 20, 26)]
            axes.set_xticks(ticks, [format_size(size) for size in ticks])
            axes.minorticks_off()
            axes.set_yticks([2, 4, 8, 16, 32])
            axes.set_title(title, loc="left")
            axes.set_xlabel("size of the tensor")
        panels[0].set_ylabel("ranks")
        keys = [
            Patch(color=ALGORITHM_STYLES[name][0], alpha=0.75, label=ALGORITHM_STYLES[name][2])
            for name in ALGORITHMS
        ]
        picture.legend(handles=keys, loc="outside upper center", ncols=4, frameon=False)
        picture.savefig(path, dpi=110)


def main() -> None:
    """Fit the parameters, and draw the map."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measured", type=Path, help="a record of phalanx bench --algorithms")
    parser.add_argument(
        "--alpha", type=float, default=20.0, help="alpha of the map in microseconds"
    )
    parser.add_argument("--rate", type=float, default=1.25, help="1 / beta of the map in GB/s")
    parser.add_argument("--map", type=Path, help="draw a map of the fastest algorithms")
    options = parser.parse_args()
    cores = results.read(options.measured, algorithms=True)[0].machine["cores"]
    for system in ("phalanx", "gloo"):
        print_fit(options.measured, system, cores)
    if options.map:
        draw_map(options.map, options.alpha / 1e6, 1e-9 / options.rate)


if __name__ == "__main__":
    main()
