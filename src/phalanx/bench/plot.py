"""Plots of latency and bandwidth against size, with a line for each system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.bench.operations import OPERATIONS
from phalanx.bench.plan import format_size
from phalanx.bench.systems import SYSTEMS
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from phalanx.bench.results import Report, Result

__all__ = ["NAMES", "SETTINGS", "check_plot", "plot"]

# Okabe and Ito's palette, which is safe for colour-blind readers, with a marker each.
_STYLES = {
    "phalanx": ("#0072B2", "o"),
    "phalanx-shared": ("#56B4E9", "s"),
    "gloo": ("#D55E00", "v"),
    "openmpi": ("#009E73", "^"),
    "mpich": ("#CC79A7", "D"),
}
NAMES = {"phalanx": "Phalanx", "phalanx-shared": "Phalanx, shared tensors", "gloo": "Gloo"}
NAMES |= {"openmpi": "Open MPI", "mpich": "MPICH"}
SETTINGS: dict[Any, Any] = {
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
        raise UsageError('plotting requires matplotlib: pip install "phalanx[bench]"') from None
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
    with mpl.rc_context(SETTINGS):
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
        handles, labels = _legend(axes.flat)
        figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)
        ranks, processor = report.settings["ranks"], report.machine["processor"]
        figure.supxlabel(
            f"size of the largest buffer of a rank · {ranks} ranks, {processor}, "
            f"{report.machine['cores']} cores",
            fontsize="medium",
        )
        figure.savefig(path, dpi=150)


def _draw_latency(axes: Axes, results: list[Result]) -> None:
    for name in SYSTEMS:
        points = [f for f in results if name in f.timings]
        if points:
            color, marker = _STYLES[name]
            timings = [f.timings[name] for f in points]
            sizes = [f.bytes for f in points]
            axes.plot(
                sizes,
                [t.median * 1e6 for t in timings],
                color=color,
                marker=marker,
                label=NAMES[name],
            )
            axes.fill_between(
                sizes,
                [t.low * 1e6 for t in timings],
                [t.high * 1e6 for t in timings],
                color=color,
                alpha=0.2,
                linewidth=0,
            )
    limited = _limited(results)
    limits = [(f.limit or 0) * 1e6 for f in limited]
    axes.plot([f.bytes for f in limited], limits, color="black", linestyle="--", linewidth=1.2)
    axes.set_yscale("log")
    _finish(axes, results, "us")


def _draw_bandwidth(axes: Axes, results: list[Result]) -> None:
    for name in SYSTEMS:
        points = [f for f in results if name in f.timings]
        if points:
            color, marker = _STYLES[name]
            speeds = [f.bytes / f.timings[name].median / 1e9 for f in points]
            axes.plot([f.bytes for f in points], speeds, color=color, marker=marker)
    limited = _limited(results)
    axes.plot(
        [f.bytes for f in limited],
        [f.bytes / f.limit / 1e9 for f in limited if f.limit],
        color="black",
        linestyle="--",
        linewidth=1.2,
        label="memory bandwidth limit",
    )
    axes.set_ylim(bottom=0)
    _finish(axes, results, "GB/s")


def _limited(results: list[Result]) -> list[Result]:
    return [result for result in results if result.limit and not result.cached]


def _finish(axes: Axes, results: list[Result], unit: str) -> None:
    axes.set_visible(True)
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    sizes = sorted({result.bytes for result in results})
    step = -(-len(sizes) // 4)
    ticks = sizes[::-1][::step]
    axes.set_xticks(ticks, [format_size(size) for size in ticks], fontsize="small")
    axes.minorticks_off()


def _legend(panels: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
