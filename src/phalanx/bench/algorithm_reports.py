"""`phalanx bench --algorithms`: the all-reduces of `phalanx.parallel` beside each backend's own.

The measurement is that of `phalanx.bench`, but with several algorithms for one operation on the
processes of each system, and for several world sizes one after another. This module stores the
reports of all world sizes in one file and shows them. docs/algorithms.md interprets the results.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.plot import NAMES, SETTINGS, check_plot
from phalanx.bench.results import parse_report, read_document
from phalanx.bench.systems import SYSTEMS
from phalanx.bench.table import Display, format_timing
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from phalanx.bench.results import Report, Result

__all__ = [
    "FORMAT",
    "SHORT",
    "STYLES",
    "AlgorithmsDisplay",
    "as_json",
    "fastest_algorithm",
    "plot",
    "read",
    "write",
]

FORMAT = "phalanx bench algorithms 2"

SHORT = {
    "": "own",
    "ring_all_reduce_simple": "ring, simple",
    "ring_all_reduce": "ring",
    "halving_doubling_all_reduce": "halving",
    "tree_all_reduce": "tree",
}
"""Short names of the algorithms, for the table."""

STYLES = {
    "": ("#000000", "x", "the backend's own"),
    "ring_all_reduce_simple": ("#D55E00", "v", "ring, simple"),
    "ring_all_reduce": ("#0072B2", "o", "ring"),
    "halving_doubling_all_reduce": ("#009E73", "s", "halving and doubling"),
    "tree_all_reduce": ("#CC79A7", "^", "tree"),
}
"""Colour, marker and name of each algorithm; the colours are of Okabe and Ito's palette."""


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the reports, one for each world size, as a JSON object; times are in seconds."""
    entries = [asdict(report) for report in reports]
    return {"format": FORMAT, "unit": "seconds", "reports": entries}


def write(reports: Sequence[Report], path: Path) -> None:
    """Store the reports as JSON."""
    path.write_text(json.dumps(as_json(reports), indent=1) + "\n")


def read(path: Path) -> list[Report]:
    """Load what `write` stored.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    document = read_document(path, FORMAT, "phalanx bench --algorithms --output")
    return [parse_report(entry) for entry in document["reports"]]


def fastest_algorithm(result: Result, system: str) -> str | None:
    """Return the algorithm with the lowest median on a system; None if there is no timing."""
    labels = {Variant(system, name).label: name for name in ALGORITHMS}
    medians = {
        name: result.timings[label].median
        for label, name in labels.items()
        if label in result.timings
    }
    return min(medians, key=medians.__getitem__) if medians else None


class AlgorithmsDisplay(Display):
    """A display of a run of `--algorithms`, for one world size.

    Shows a line for each size and system, and a column for each algorithm.
    """

    legend = (
        "all take turns\n"
        "own: the backend's all_reduce; the others are those of phalanx.parallel, by messages\n"
        "fastest: the fastest of the latter on that system"
    )

    def header(self) -> list[str]:
        """Return the headings of the columns."""
        return ["size", "system", *SHORT.values(), "fastest"]

    def widths(self) -> list[int]:
        """Return the widths of the columns for output without a terminal."""
        return [8, 14, *(13 for _ in SHORT), 12]

    def rows(self, result: Result, *, wide: bool) -> list[list[str]]:
        """Return a line for each system that has timings."""
        lines = []
        for system in self._systems:
            labels = [Variant(system, name).label for name in ("", *ALGORITHMS)]
            timings = [result.timings.get(label) for label in labels]
            if any(timings):
                cells = [format_timing(each, wide=wide) for each in timings]
                best = SHORT[fastest_algorithm(result, system) or ""]
                lines.append([format_size(result.size), system, *cells, best])
        return lines


def plot(reports: Sequence[Report], path: Path) -> None:
    """Plot time against size, with a row for each system and a column for each world size.

    Both axes are logarithmic.

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
