"""The display of progress: a bar or lines from rank 0, TensorBoard, and `phalanx watch`.

A terminal has a bar on stderr, below the lines, and a notebook has one below the cell. There the
lines are on stdout, because notebooks show stderr as errors, in red.
"""

from __future__ import annotations

import importlib.util
import io
import time
import uuid
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.diagnosis.wait_time import measure_wait_share
from phalanx.errors import UsageError
from phalanx.recorder.flight_recorder import report
from phalanx.system.console import make_console
from phalanx.system.extras import install_command
from phalanx.system.notebook import find_cell

if TYPE_CHECKING:
    from phalanx.system.notebook import Cell

# Seconds between updates of speed and wait share, and between lines if there is no bar.
_REFRESH_SECONDS = 1.0
_LINE_SECONDS = 10.0
# Seconds between two drawings of a notebook's bar.
_DRAW_SECONDS = 0.2
_CELL_WIDTH = 120


class Display:
    """A context manager that displays the progress of training. Only rank 0 prints.

    Args:
        is_main: True on rank 0.
        enabled: True to print progress.
        has_recorder: True if the ranks have flight recorders, to which `phalanx.report` writes.
    """

    def __init__(self, *, is_main: bool, enabled: bool, has_recorder: bool) -> None:
        is_quiet = not (is_main and enabled)
        self._cell = None if is_quiet else find_cell()
        self._console = make_console(stderr=self._cell is None, quiet=is_quiet)
        self._bar: _TerminalBar | _CellBar | None = None
        self._is_main, self._has_recorder = is_main, has_recorder
        self._writer: Any = None
        self._samples, self._blocked, self._text = 0, 0.0, ""
        self._last_refresh = self._last_line = time.monotonic_ns()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop(is_done=kind is None)
            self._bar = None
        if self._writer is not None:
            self._writer.close()

    def begin(self, step: int, steps: int, writer: Any) -> None:
        """Start a progress bar at `step` of `steps` in a terminal or a notebook.

        Args:
            step: Number of steps completed so far.
            steps: Total number of steps.
            writer: The TensorBoard writer on rank 0, or None. It is closed on exit.
        """
        self._steps, self._writer = steps, writer
        if self._cell is not None:
            self._bar = _CellBar(self._cell, step, steps)
        elif self._console.is_terminal and not self._console.quiet:
            self._bar = _TerminalBar(self._console, step, steps)

    def flush(self) -> None:
        """Flush the TensorBoard writer, so that its files cover the next checkpoint's steps."""
        if self._writer is not None:
            self._writer.flush()

    def set_activity(self, text: str) -> None:
        """Report the current activity to `phalanx watch`."""
        if self._has_recorder:
            report(note=text)

    def print_line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(
        self, step: int, epoch: int, metrics: dict[str, float], samples: int, blocked: float
    ) -> None:
        """Display a completed step.

        Args:
            step: The number of the step, from 1.
            epoch: The epoch of the step, from 0.
            metrics: The means over the step's samples: "loss" and the metrics.
            samples: Number of samples in the step, on all ranks together.
            blocked: Seconds that the trainer itself was blocked by other ranks.
        """
        if self._has_recorder:
            report(step=step, loss=metrics["loss"])
        if not self._is_main:
            return
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(f"train/{name}", value, step)
        self._samples += samples
        self._blocked += blocked
        now = time.monotonic_ns()
        if now - self._last_refresh >= _REFRESH_SECONDS * 1e9:
            self._refresh(now, step)
        if self._bar is not None:
            text = f"loss {metrics['loss']:.4f}  {self._text}"
            self._bar.update(step, text)
        elif now - self._last_line >= _LINE_SECONDS * 1e9:
            self._last_line = now
            self.print_line(
                f"epoch {epoch + 1}  step {step}/{self._steps}  loss {metrics['loss']:.4f}  "
                f"{self._text}"
            )

    def _refresh(self, now: int, step: int) -> None:
        """Update the speed and the wait share since the last update."""
        seconds = (now - self._last_refresh) / 1e9
        speed = self._samples / seconds
        share = measure_wait_share(self._last_refresh, now) if self._has_recorder else None
        share = self._blocked / seconds if share is None else share
        self._text = f"{speed:,.0f} samples/s  waiting {share:.0%}"
        if self._writer is not None:
            self._writer.add_scalar("train/samples_per_second", speed, step)
            self._writer.add_scalar("train/waiting", share, step)
        self._last_refresh, self._samples, self._blocked = now, 0, 0.0

    def end_epoch(self, step: int, epoch: int, loss: float, evaluation: dict[str, float]) -> None:
        """Display the end of an epoch.

        Args:
            step: Number of steps completed so far.
            epoch: The completed epoch, from 0.
            loss: The loss of the last step.
            evaluation: The results of the evaluation; empty if there was none.
        """
        results = "".join(f"  {name} {value:.4f}" for name, value in evaluation.items())
        results = f"  evaluated:{results}" if results else ""
        speed = f"  {self._text}" if self._text else ""
        self.print_line(
            f"epoch {epoch + 1}  step {step}/{self._steps}  loss {loss:.4f}{speed}{results}"
        )
        self._last_line = time.monotonic_ns()
        if self._writer is not None:
            for name, value in evaluation.items():
                self._writer.add_scalar(f"evaluate/{name}", value, step)


class _TerminalBar:
    """A progress bar on a terminal, which a thread of rich redraws until it is stopped."""

    def __init__(self, console: Console, step: int, steps: int) -> None:
        self._progress = _make_progress(console, step, steps)
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._progress.task_ids[0], completed=step, text=text)

    def stop(self, *, is_done: bool) -> None:
        # At the end of the training, the last line says the same. After an error, no line does.
        self._progress.live.transient = is_done
        self._progress.stop()


class _CellBar:
    """A progress bar below the cell of a notebook."""

    def __init__(self, cell: Cell, step: int, steps: int) -> None:
        self._cell = cell
        self._id = f"phalanx-{uuid.uuid4().hex}"
        self._page = Console(
            file=io.StringIO(),
            record=True,
            width=_CELL_WIDTH,
            force_terminal=False,
            force_jupyter=False,
            color_system="truecolor",
        )
        self._progress = _make_progress(self._page, step, steps)
        self._draw(replaces=False)

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._progress.task_ids[0], completed=step, text=text)
        if time.monotonic() - self._last_draw >= _DRAW_SECONDS:
            self._draw(replaces=True)

    def stop(self, *, is_done: bool) -> None:  # noqa: ARG002 - a cell keeps its bar
        self._draw(replaces=True)

    def _draw(self, *, replaces: bool) -> None:
        self._page.print(self._progress.get_renderable())
        text = self._page.export_text(clear=False).rstrip()
        html = self._page.export_html(
            inline_styles=True, code_format='<pre style="margin: 0">{code}</pre>'
        )
        self._page.file = io.StringIO()
        self._cell.show(self._id, html, text, replaces=replaces)
        self._last_draw = time.monotonic()


def _make_progress(console: Console, step: int, steps: int) -> Progress:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    )
    progress.add_task("training", completed=step, total=steps, text="")
    return progress


def check_tensorboard() -> None:
    """Check that TensorBoard is installed.

    Raises:
        UsageError: It is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            f"tensorboard is missing: {install_command('tensorboard')}, or leave the argument out"
        )


def open_tensorboard(directory: Any, step: int) -> Any:
    """Return a TensorBoard writer for a directory.

    Args:
        directory: The directory of the event files; created if it does not exist.
        step: The first step to be written. TensorBoard hides values that the run wrote for
            this step and later ones before a restart.

    Raises:
        OSError: The directory cannot be written.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=step)
