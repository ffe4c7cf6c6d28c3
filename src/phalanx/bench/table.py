"""Display of the results: a table for each operation, filled during the measurement.

On a terminal, the table is redrawn with a progress bar below it. If stdout is not a terminal, each
result is a plain line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from phalanx.bench.operations import ALGORITHMS, OPERATIONS
from phalanx.bench.plan import Variant, format_size
from phalanx.bench.systems import MPI
from phalanx.system.console import make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.bench.plan import Plan
    from phalanx.bench.results import Report, Result, Timing

SHORT_NAMES = {
    "": "own",
    "ring_all_reduce_simple": "ring, simple",
    "ring_all_reduce": "ring",
    "halving_doubling_all_reduce": "halving",
    "tree_all_reduce": "tree",
}
"""Short names of the algorithms."""

# Columns of a terminal from which the spread is shown beside the median rather than below it.
_WIDE = 100
_LIMITED = ("phalanx", "phalanx-shared")
_HEADINGS = {"phalanx-prepared": "prepared", "phalanx-shared": "shared"}
_ABSENT = "-"


def _format_microseconds(seconds: float) -> str:
    """Format a time in microseconds with about three digits."""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _format_timing(value: Timing | None, *, wide: bool) -> str:
    """Format the median and half the interquartile range, in microseconds; "-" for none."""
    if value is None:
        return _ABSENT
    spread = f"±{_format_microseconds((value.high - value.low) / 2)}"
    return f"{_format_microseconds(value.median)}{' ' if wide else chr(10)}{spread}"


class Display:
    """A display of a run on the terminal; a context manager that `measure` informs."""

    legend = (
        "the systems take turns\n"
        "vs Gloo, vs MPI: how many times faster phalanx is than Gloo and than the faster MPI, in "
        "parentheses with prepared operations\n"
        "limit: fraction of the memory bandwidth that phalanx reaches, in parentheses with "
        f"shared tensors; {_ABSENT} if the buffers fit into the caches"
    )
    """The end of the sentence about the method, and descriptions of the columns."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        """Create a display on `console`, by default stdout."""
        self._console = console or make_console()
        self._systems = list(plan.systems)
        self._ranks = plan.ranks
        self._table: Table | None = None
        self._notes: list[str] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("measuring the memory", total=None)
        self._live = Live(self._progress, console=self._console, transient=True)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_table()
        self._live.stop()

    def begin(self, report: Report, total: int) -> None:
        """Print the machine and the method of the measurement."""
        machine = report.machine
        self._print(
            f"{machine['processor']}, {machine['cores']} cores, "
            f"{machine['caches'] // 2**20} MiB of caches; {self._ranks} ranks; memory bandwidth "
            f"{report.limit / 1e9:.1f} GB/s (reads + writes)"
        )
        rounds, least = report.settings["rounds"], report.settings["rounds_at_least"]
        rounds_text = rounds or f"{least} or more, for {report.settings['seconds']:g} s,"
        self._print(
            f"us: median ± half the interquartile range, over {rounds_text} rounds in which "
            f"{self.legend}"
        )
        if machine["load"] > machine["cores"] / 4:
            self.add_note(
                f"the machine is busy (load {machine['load']}): these results are unreliable"
            )
        self._progress.update(self._task, total=total)

    def begin_activity(self, activity: str) -> None:
        """Show the current activity beside the progress bar."""
        self._progress.update(self._task, description=activity)

    def begin_section(self, operation: str, dtype: str, systems: Sequence[str]) -> None:
        """Begin the table of an operation, with a column for each remaining system."""
        self._finish_table()
        self._systems = list(systems)
        name = f"{operation}, {dtype}" if OPERATIONS[operation].has_size else operation
        title = f"{name}, {self._ranks} ranks, us"
        if not self._console.is_terminal:
            self._print(f"\n{title}")
            self._print(_format_line(self.header(), self.widths()))
            return
        self._table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in self.header():
            style = "bold" if heading == "phalanx" else None
            self._table.add_column(heading, justify="right", style=style, no_wrap=True)

    def add_result(self, result: Result) -> None:
        """Add a row to the table."""
        self._progress.advance(self._task)
        if self._table is None:
            for cells in self.rows(result, wide=True):
                self._print(_format_line(cells, self.widths()))
            return
        for cells in self.rows(result, wide=self._console.width >= _WIDE):
            self._table.add_row(*cells)
        self._refresh()

    def add_note(self, text: str) -> None:
        """Show a note below the current table; without a table, print it at once."""
        if self._table is None:
            self._console.print(_format_note(text), soft_wrap=not self._console.is_terminal)
        else:
            self._notes.append(text)
            self._refresh()

    def header(self) -> list[str]:
        """Return the headings of the columns."""
        names = [_HEADINGS.get(name, name) for name in self._systems]
        return ["size", *names, "vs Gloo", "vs MPI", "limit"]

    def widths(self) -> list[int]:
        """Return the widths of the columns for output without a terminal."""
        return [8, *(13 for _ in self._systems), 13, 13, 9]

    def rows(self, result: Result, *, wide: bool) -> list[list[str]]:
        """Return the rows of cells that show a result: by default one, with a cell per column."""
        cells = [format_size(result.size) if result.size else _ABSENT]
        cells += [_format_timing(result.timings.get(name), wide=wide) for name in self._systems]
        cells += [
            _format_ratios(result, ["gloo"]),
            _format_ratios(result, MPI),
            _format_limit(result, self._systems),
        ]
        return [cells]

    def _refresh(self) -> None:
        shown: list[RenderableType] = [] if self._table is None else [self._table]
        shown += map(_format_note, self._notes)
        self._live.update(Group(*shown, self._progress))

    def _finish_table(self) -> None:
        table, notes = self._table, self._notes
        self._table, self._notes = None, []
        self._refresh()
        if table is not None:
            self._console.print(table, *map(_format_note, notes))

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)


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
        return ["size", "system", *SHORT_NAMES.values(), "fastest"]

    def widths(self) -> list[int]:
        """Return the widths of the columns for output without a terminal."""
        return [8, 14, *(13 for _ in SHORT_NAMES), 12]

    def rows(self, result: Result, *, wide: bool) -> list[list[str]]:
        """Return a line for each system that has timings."""
        lines = []
        for system in self._systems:
            labels = [Variant(system, name).label for name in ("", *ALGORITHMS)]
            timings = [result.timings.get(label) for label in labels]
            if any(timings):
                cells = [_format_timing(each, wide=wide) for each in timings]
                best = SHORT_NAMES[fastest_algorithm(result, system) or ""]
                lines.append([format_size(result.size), system, *cells, best])
        return lines


def fastest_algorithm(result: Result, system: str) -> str | None:
    """Return the algorithm with the lowest median on a system; None if there is no timing."""
    labels = {Variant(system, name).label: name for name in ALGORITHMS}
    medians = {
        name: result.timings[label].median
        for label, name in labels.items()
        if label in result.timings
    }
    return min(medians, key=medians.__getitem__) if medians else None


def _format_note(text: str) -> Text:
    return Text(f"note: {text}", style="yellow")


def _format_line(cells: list[str], widths: list[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _format_ratio(value: float | None) -> str:
    if value is None:
        return _ABSENT
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:.{digits}f}x"


def _format_ratios(result: Result, others: Sequence[str]) -> str:
    """Format how many times faster phalanx is, with prepared operations in parentheses."""
    prepared = result.speedup("phalanx-prepared", others)
    plain = _format_ratio(result.speedup("phalanx", others))
    return plain if prepared is None else f"{plain} ({_format_ratio(prepared)})"


def _format_limit(result: Result, systems: list[str]) -> str:
    """Format the fractions of the limit, that of shared tensors in parentheses."""
    plain, shared = (
        result.bandwidth_fraction(name) if name in systems else None for name in _LIMITED
    )
    parts = [] if plain is None else [f"{plain:.0%}"]
    parts += [] if shared is None else [f"({shared:.0%})"]
    return " ".join(parts) or _ABSENT
