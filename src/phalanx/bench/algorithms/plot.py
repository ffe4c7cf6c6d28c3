"""Plots of time against size, with a panel for each world size and system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.plot import NAMES, SETTINGS, check_plot
from phalanx.bench.systems import SYSTEMS
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phalanx.bench.results import Report

__all__ = ["STYLES", "plot"]

STYLES = {
    "": ("#000000", "x", "the backend's own"),
    "ring_all_reduce_simple": ("#D55E00", "v", "ring, simple"),
    "ring_all_reduce": ("#0072B2", "o", "ring"),
    "halving_doubling_all_reduce": ("#009E73", "s", "halving and doubling"),
    "tree_all_reduce": ("#CC79A7", "^", "tree"),
}
"""Colour, marker and name of each algorithm; the colours are of Okabe and Ito's palette."""


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw a row for each system and a column for each world size; both axes are logarithmic.

    Raises:
        UsageError: `check_plot` fails, or there is no result.
    """
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    labels = {label for report in reports for each in report.results for label in each.timings}
    systems = [name for name in SYSTEMS if {label.split()[0] for label in labels} & {name}]
    if not systems:
        raise UsageError("nothing to plot: no algorithm was measured")
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(1 + 3.4 * len(reports), 1.2 + 3 * len(systems)))
        panels = figure.subplots(
            len(systems), len(reports), squeeze=False, sharex=True, sharey="row"
        )
        for column, report in enumerate(reports):
            for line, system in enumerate(systems):
                _draw(panels[line][column], report, system)
                title = f"{NAMES.get(system, system)}, {report.settings['ranks']} ranks"
                panels[line][column].set_title(title, loc="left", fontsize="medium")
        for line in panels:
            line[0].set_ylabel("us")
        columns = 5 if len(reports) > 2 else 2
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False)
        machine = reports[0].machine
        figure.supxlabel(
            f"size of the tensor · {machine['processor']}, {machine['cores']} cores",
            fontsize="medium",
        )
        figure.savefig(path, dpi=110)


def _draw(axes: Axes, report: Report, system: str) -> None:
    for name in ("", *ALGORITHMS):
        label = Variant(system, name).label
        points = [each for each in report.results if label in each.timings]
        if not points:
            continue
        color, marker, words = STYLES[name]
        sizes, timings = [each.bytes for each in points], [each.timings[label] for each in points]
        axes.plot(
            sizes,
            [timing.median * 1e6 for timing in timings],
            color=color,
            marker=marker,
            label=words,
            linestyle="-" if name else "--",
        )
        axes.fill_between(
            sizes,
            [timing.low * 1e6 for timing in timings],
            [timing.high * 1e6 for timing in timings],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({each.bytes for each in report.results})
    ticks = sizes[:: -(-len(sizes) // 4)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks], fontsize="small")
    axes.minorticks_off()
