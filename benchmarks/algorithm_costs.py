"""What the all-reduces of `phalanx.parallel` cost by the usual model, and when each wins.

    python benchmarks/algorithm_costs.py benchmarks/algorithms.json --map docs/algorithms/model.png

The model has two numbers: alpha, seconds of a message whatever its size, and beta, seconds of a
byte. An all-reduce takes as long as the messages that follow one another (its path), each at
alpha + bytes beta. Where ranks share cores it can't be faster, either, than all its messages
together, divided by the cores: a message keeps a core busy at both ends. Fits both numbers to what
`phalanx bench --algorithms --output` has measured, for each backend, and shows how far off that is;
draws which algorithm the model takes for the fastest. See docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench.algorithms import record
from phalanx.bench.algorithms.plot import STYLES
from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant, format_size


@dataclass(frozen=True)
class Cost:
    """Messages and tensors' lengths: those that follow one another, and those of all ranks."""

    path_messages: float
    path_lengths: float
    all_messages: float
    all_lengths: float

    def seconds(self, size: float, alpha: float, beta: float, cores: float = math.inf) -> float:
        """How long an all-reduce of `size` bytes takes.

        Args:
            size: bytes of the tensor.
            alpha: seconds of a message.
            beta: seconds of a byte.
            cores: that all ranks share.
        """
        path = self.path_messages * alpha + self.path_lengths * size * beta
        work = self.all_messages * alpha + self.all_lengths * size * beta
        # A message is work at both ends, a step on the path at one after the other.
        return max(path, work / cores)


def cost(name: str, ranks: int) -> Cost:
    """The messages of an all-reduce, as its docstring has them."""
    others = ranks - 1
    core = 1 << (ranks.bit_length() - 1)
    rounds, guests = core.bit_length() - 1, ranks - core
    deep = others.bit_length()
    if name == "ring_all_reduce_simple":
        return Cost(others, others, ranks * others, ranks * others)
    if name == "ring_all_reduce":
        return Cost(2 * others, 2 * others / ranks, 2 * ranks * others, 2 * others)
    if name == "tree_all_reduce":
        return Cost(2 * deep, 2 * deep, 2 * others, 2 * others)
    taken_in = 2 if guests else 0
    return Cost(
        2 * rounds + taken_in,
        2 * (core - 1) / core + taken_in,
        2 * rounds * core + 2 * guests,
        2 * (core - 1) + 2 * guests,
    )


@dataclass(frozen=True)
class Measured:
    """A median of `phalanx bench --algorithms`."""

    name: str
    ranks: int
    size: int
    seconds: float

    def said(self, alpha: float, beta: float, cores: float) -> float:
        """What the model says of it."""
        return cost(self.name, self.ranks).seconds(self.size, alpha, beta, cores)


def read(path: Path, system: str) -> list[Measured]:
    """The medians of a system."""
    return [
        Measured(name, report.settings["ranks"], result.bytes, result.timings[label].median)
        for report in record.read(path)
        for result in report.results
        for name in ALGORITHMS
        if (label := Variant(system, name).label) in result.timings
    ]


def fit(measured: Sequence[Measured], cores: float) -> tuple[float, float]:
    """Alpha and beta with which the model is nearest to all figures, by ratio."""

    def distance(tried: tuple[float, float]) -> float:
        return sum(math.log(each.said(*tried, cores) / each.seconds) ** 2 for each in measured)

    alphas = [1e-6 * 1.1**power for power in range(100)]
    betas = [1e-11 * 1.1**power for power in range(100)]
    return min(((alpha, beta) for alpha in alphas for beta in betas), key=distance)


def show_fit(path: Path, system: str, cores: int) -> None:
    """Print what was fitted, and each figure beside what the model says."""
    measured = read(path, system)
    if not measured:
        print(f"{system}: not measured")
        return
    alpha, beta = fit(measured, cores)
    ratios = [each.said(alpha, beta, cores) / each.seconds for each in measured]
    print(f"{system}: {alpha * 1e6:.0f} us for a message, {1e-9 / beta:.2f} GB/s")
    for each, ratio in zip(measured, ratios, strict=True):
        print(
            f"  {each.ranks} ranks {format_size(each.size):>8}  {each.name:28} "
            f"{each.seconds * 1e6:9.0f} us, model {ratio:5.2f} of it"
        )


def fastest(ranks: int, size: float, alpha: float, beta: float, cores: float) -> str:
    """The algorithm that the model takes for the fastest; of equal ones that of fewer bytes."""

    def order(name: str) -> tuple[float, float]:
        needs = cost(name, ranks)
        # Rounded, so that what is equal doesn't look different.
        return float(f"{needs.seconds(size, alpha, beta, cores):.9g}"), needs.all_messages

    return min(ALGORITHMS, key=order)


def draw_map(path: Path, alpha: float, beta: float) -> None:
    """Draw who wins, over sizes and world sizes: with a core for each rank, and all on two."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    worlds = range(2, 34)
    sizes = [2.0 ** (power / 4) for power in range(2 * 4, 30 * 4)]
    with mpl.rc_context({"font.size": 10}):
        picture = Figure(figsize=(10.5, 4.6), layout="constrained", facecolor="white")
        panels = picture.subplots(1, 2, sharey=True)
        words = {math.inf: "each rank has a core and a link", 2.0: "all ranks share two cores"}
        for axes, (cores, title) in zip(panels, words.items(), strict=True):
            winners = [
                [ALGORITHMS.index(fastest(ranks, size, alpha, beta, cores)) for size in sizes]
                for ranks in worlds
            ]
            axes.pcolormesh(
                sizes,
                list(worlds),
                winners,
                cmap=ListedColormap([STYLES[name][0] for name in ALGORITHMS]),
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
            Patch(color=STYLES[name][0], alpha=0.75, label=STYLES[name][2]) for name in ALGORITHMS
        ]
        picture.legend(handles=keys, loc="outside upper center", ncols=4, frameon=False)
        picture.savefig(path, dpi=110)


def main() -> None:
    """Read the command line, fit, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measured", type=Path, help="a file of phalanx bench --algorithms --output")
    parser.add_argument("--alpha", type=float, default=20.0, help="of the map, in microseconds")
    parser.add_argument("--rate", type=float, default=1.25, help="of the map: 1 / beta, in GB/s")
    parser.add_argument("--map", type=Path, help="draw who wins")
    options = parser.parse_args()
    cores = record.read(options.measured)[0].machine["cores"]
    for system in ("phalanx", "gloo"):
        show_fit(options.measured, system, cores)
    if options.map:
        draw_map(options.map, options.alpha / 1e6, 1e-9 / options.rate)


if __name__ == "__main__":
    main()
