"""Plots of the results against size, with a line for each system or algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.bench.operations import OPERATIONS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.systems import SYSTEMS
from phalanx.errors import UsageError
from phalanx.system.extras import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from phalanx.bench.results import Report, Result

# Colours of Okabe and Ito's palette, which is safe for colour-blind readers, markers and names.
_STYLES = {
    "phalanx": ("#0072B2", "o", "Phalanx"),
    "phalanx-prepared": ("#000000", "o", "Phalanx, prepared operations"),
    "phalanx-shared": ("#56B4E9", "s", "Phalanx, shared tensors"),
    "gloo": ("#D55E00", "v", "Gloo"),
    "openmpi": ("#009E73", "^", "Open MPI"),
    "mpich": ("#CC79A7", "D", "MPICH"),
}
ALGORITHM_STYLES = {
    "": ("#000000", "x", "the backend's own"),
    "ring_all_reduce_simple": ("#D55E00", "v", "ring, simple"),
    "ring_all_reduce": ("#0072B2", "o", "ring"),
    "halving_doubling_all_reduce": ("#009E73", "s", "halving and doubling"),
    "tree_all_reduce": ("#CC79A7", "^", "tree"),
}
"""Colour, marker and name of each algorithm."""
_SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "figure.constrained_layout.use": True,
}


def check_plot(path: Path) -> None:
    """Check that a plot can be written to `path`, before a measurement that takes minutes.

    Raises:
        UsageError: Matplotlib is not installed, or does not support the file format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError(f"plotting requires matplotlib: {install_command('bench')}") from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise UsageError(f"plot {str(path)!r} given, expected a name that ends with .png or .svg")


def plot(report: Report, path: Path) -> None:
    """Draw two panels for each operation and dtype: latency and bandwidth. A barrier has none.

    Bandwidth is the size divided by the time: the algorithm bandwidth of nccl-tests. The dashed
    line is the limit, drawn over the sizes that do not fit into the caches.

    Raises:
        UsageError: `check_plot` fails, or the report has no result with a size.
    """
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Result]] = {}
    for result in report.results:
        if OPERATIONS[result.operation].has_size:
            panels.setdefault((result.operation, result.dtype), []).append(result)
    if not panels:
        raise UsageError("nothing to plot: no operation with a size was measured")
    across = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // across)
    with mpl.rc_context(_SETTINGS):
        # Shown at half its width in pixels, the text is as large as that of a page.
        figure = Figure(figsize=((4.5 if across == 1 else 3) * 2 * across, 2.5 * rows + 1))
        axes = figure.subplots(rows, 2 * across, squeeze=False)
        for panel in axes.flat:
            panel.set_visible(False)
        for number, ((operation, dtype), results) in enumerate(panels.items()):
            line, column = divmod(number, across)
            latency, bandwidth = axes[line][2 * column : 2 * column + 2]
            latency.set_title(f"{operation}, {dtype}", loc="left", fontsize="medium")
            _draw_latency(latency, results)
            _draw_bandwidth(bandwidth, results)
        _add_legend(figure, axes.flat)
        ranks, processor = report.settings["ranks"], report.machine["processor"]
        figure.supxlabel(
            f"size of the largest buffer of a rank · {ranks} ranks, {processor}, "
            f"{report.machine['cores']} cores",
            fontsize="medium",
        )
        figure.savefig(path, dpi=150)


def plot_algorithms(reports: Sequence[Report], path: Path) -> None:
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
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(1 + 3.4 * len(reports), 1.2 + 3 * len(systems)))
        panels = figure.subplots(
            len(systems), len(reports), squeeze=False, sharex=True, sharey="row"
        )
        for column, report in enumerate(reports):
            for line, system in enumerate(systems):
                axes = panels[line][column]
                for name, style in ALGORITHM_STYLES.items():
                    label = Variant(system, name).label
                    _draw_times(axes, report.results, label, style, linestyle="-" if name else "--")
                _set_scales(axes, report.results, "us" if column == 0 else "")
                title = f"{_STYLES[system][2]}, {report.settings['ranks']} ranks"
                axes.set_title(title, loc="left", fontsize="medium")
        _add_legend(figure, panels.flat)
        machine = reports[0].machine
        figure.supxlabel(
            f"size of the tensor · {machine['processor']}, {machine['cores']} cores",
            fontsize="medium",
        )
        figure.savefig(path, dpi=110)


def _draw_latency(axes: Axes, results: list[Result]) -> None:
    for name in SYSTEMS:
        _draw_times(axes, results, name, _STYLES[name])
    limited = _limited(results)
    limits = [(each.limit or 0) * 1e6 for each in limited]
    axes.plot(
        [each.bytes for each in limited], limits, color="black", linestyle="--", linewidth=1.2
    )
    _set_scales(axes, results, "us")


def _draw_times(
    axes: Axes,
    results: list[Result],
    label: str,
    style: tuple[str, str, str],
    *,
    linestyle: str = "-",
) -> None:
    """Draw the medians of a label's timings as a line, and their quartiles as an area around it."""
    points = [each for each in results if label in each.timings]
    if not points:
        return
    color, marker, name = style
    sizes, timings = [each.bytes for each in points], [each.timings[label] for each in points]
    low, median, high = (
        [getattr(timing, part) * 1e6 for timing in timings] for part in ("low", "median", "high")
    )
    axes.plot(sizes, median, color=color, marker=marker, label=name, linestyle=linestyle)
    axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_yscale("log")


def _draw_bandwidth(axes: Axes, results: list[Result]) -> None:
    for name in SYSTEMS:
        points = [each for each in results if name in each.timings]
        if points:
            color, marker, _ = _STYLES[name]
            speeds = [each.bytes / each.timings[name].median / 1e9 for each in points]
            axes.plot([each.bytes for each in points], speeds, color=color, marker=marker)
    limited = _limited(results)
    axes.plot(
        [each.bytes for each in limited],
        [each.bytes / each.limit / 1e9 for each in limited if each.limit],
        color="black",
        linestyle="--",
        linewidth=1.2,
        label="memory bandwidth limit",
    )
    axes.set_ylim(bottom=0)
    _set_scales(axes, results, "GB/s")


def _limited(results: list[Result]) -> list[Result]:
    return [result for result in results if result.limit and not result.cached]


def _set_scales(axes: Axes, results: list[Result], unit: str) -> None:
    axes.set_visible(True)
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    sizes = sorted({result.bytes for result in results})
    ticks = sizes[:: -(-len(sizes) // 4)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks], fontsize="small")
    axes.minorticks_off()


def _add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Add a legend above the panels, in as few lines as the width of the figure allows."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    for lines in range(1, len(found) + 1):
        columns = -(-len(found) // lines)
        legend = figure.legend(
            [*found.values()], [*found], loc="outside upper center", ncols=columns, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
