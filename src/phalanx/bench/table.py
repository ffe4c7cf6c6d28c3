"""Display of the figures: a table for each operation, filled during the measurement.

On a terminal, the table is redrawn with a progress bar below it. If stdout is no terminal, each
figure is a plain line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from phalanx.bench.operations import OPERATIONS
from phalanx.bench.plan import label_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from phalanx.bench.plan import Plan
    from phalanx.bench.results import Figure, Report, Timing

__all__ = ["Display", "microseconds", "row", "timing"]

# Columns of a terminal from which the spread is shown beside the median rather than below it.
_WIDE = 100
_LIMITED = ("phalanx", "phalanx-shared")
_HEADINGS = {"phalanx-shared": "shared"}
_ABSENT = "-"


def microseconds(seconds: float) -> str:
    """Format a time in microseconds with about three digits."""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def timing(value: Timing | None, *, wide: bool = True) -> str:
    """Format the median and half the interquartile range, in microseconds; "-" for none."""
    if value is None:
        return _ABSENT
    spread = f"±{microseconds((value.high - value.low) / 2)}"
    return f"{microseconds(value.median)}{' ' if wide else chr(10)}{spread}"


def row(figure: Figure, systems: list[str], *, wide: bool = True) -> list[str]:
    """Return the cells of a figure: size, every system, both ratios, and fraction of the limit."""
    cells = [label_of(figure.size) if figure.size else _ABSENT]
    cells += [timing(figure.timings.get(name), wide=wide) for name in systems]
    cells += [_ratio(figure.ratio("phalanx", ["gloo"])), _ratio(figure.over_mpi("phalanx"))]
    return [*cells, _reached(figure, systems)]


def header(systems: list[str]) -> list[str]:
    """Return the column headings for `row`."""
    return ["size", *(_HEADINGS.get(name, name) for name in systems), "vs Gloo", "vs MPI", "limit"]


class Display:
    """A display of a run on the terminal; a context manager, and the `Audience` of `measure`."""

    legend = (
        "the systems take turns\n"
        "vs Gloo, vs MPI: how many times faster phalanx is than Gloo, than the better MPI\n"
        "limit: the part of the memory's speed that phalanx reaches, in parentheses with "
        f"shared tensors; {_ABSENT} for what fits the caches"
    )
    """The end of the sentence about the method, and descriptions of the columns."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        """Create a display on `console`, by default stdout."""
        self._console = console or Console(highlight=False)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finish_table()
        self._live.stop()

    def begin(self, report: Report, figures: int) -> None:
        """Print the machine and the method of the measurement."""
        machine = report.machine
        self._print(
            f"{machine['processor']}, {machine['cores']} cores, "
            f"{machine['caches'] // 2**20} MiB of caches; {self._ranks} ranks; memory moves "
            f"{report.limit / 1e9:.1f} GB/s (read + written)"
        )
        rounds, least = report.settings["rounds"], report.settings["rounds_at_least"]
        how = rounds or f"{least} or more, for {report.settings['seconds']:g} s,"
        self._print(
            f"us: median ± half the distance of the quartiles, over {how} rounds in which "
            f"{self.legend}"
        )
        if machine["load"] > machine["cores"] / 4:
            self.note(f"the machine is busy (load {machine['load']}): don't trust these figures")
        self._progress.update(self._task, total=figures)

    def working(self, what: str) -> None:
        """Show the current activity beside the progress bar."""
        self._progress.update(self._task, description=what)

    def section(self, operation: str, dtype: str, systems: Sequence[str]) -> None:
        """Begin the table of an operation, with a column for each remaining system."""
        self._finish_table()
        self._systems = list(systems)
        name = f"{operation}, {dtype}" if OPERATIONS[operation].has_size else operation
        title = f"{name}, {self._ranks} ranks, us"
        if not self._console.is_terminal:
            self._print(f"\n{title}")
            self._print(_line(self.header(), self.widths()))
            return
        self._table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for heading in self.header():
            style = "bold" if heading == "phalanx" else None
            self._table.add_column(heading, justify="right", style=style, no_wrap=True)

    def figure(self, figure: Figure) -> None:
        """Add a row to the table."""
        self._progress.advance(self._task)
        if self._table is None:
            for cells in self.rows(figure, wide=True):
                self._print(_line(cells, self.widths()))
            return
        for cells in self.rows(figure, wide=self._console.width >= _WIDE):
            self._table.add_row(*cells)
        self._refresh()

    def note(self, text: str) -> None:
        """Show a note below the current table; without a table, print it at once."""
        if self._table is None:
            self._console.print(_note(text), soft_wrap=not self._console.is_terminal)
        else:
            self._notes.append(text)
            self._refresh()

    def header(self) -> list[str]:
        """Return the headings of the columns."""
        return header(self._systems)

    def widths(self) -> list[int]:
        """Return the widths of the columns for output without a terminal."""
        return [8, *(13 for _ in self._systems), 8, 8, 9]

    def rows(self, figure: Figure, *, wide: bool) -> list[list[str]]:
        """Return the rows of cells that show a figure."""
        return [row(figure, self._systems, wide=wide)]

    def _refresh(self) -> None:
        shown: list[RenderableType] = [] if self._table is None else [self._table]
        shown += map(_note, self._notes)
        self._live.update(Group(*shown, self._progress))

    def _finish_table(self) -> None:
        table, notes = self._table, self._notes
        self._table, self._notes = None, []
        self._refresh()
        if table is not None:
            self._console.print(table, *map(_note, notes))

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)


def _note(text: str) -> Text:
    return Text(f"note: {text}", style="yellow")


def _line(cells: list[str], widths: list[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _ratio(value: float | None) -> str:
    if value is None:
        return _ABSENT
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:.{digits}f}x"


def _reached(figure: Figure, systems: list[str]) -> str:
    """Format the fractions of the limit, that of shared tensors in parentheses."""
    plain, shared = (figure.reached(name) if name in systems else None for name in _LIMITED)
    words = [] if plain is None else [f"{plain:.0%}"]
    words += [] if shared is None else [f"({shared:.0%})"]
    return " ".join(words) or _ABSENT
