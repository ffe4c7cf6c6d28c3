"""What people see of training: a bar or lines from rank 0, TensorBoard, `phalanx watch`."""

from __future__ import annotations

import importlib.util
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.errors import UsageError
from phalanx.observe.own import waited
from phalanx.observe.recording import report

__all__ = ["Display", "check_tensorboard", "tensorboard"]

# Seconds between two looks at speed and waiting share, and between two lines where there is no bar.
_REFRESH = 1.0
_LINES = 10.0


class Display:
    """A context that shows training while it lasts; silent on all ranks but the first.

    Args:
        main: Whether this is rank 0.
        shown: Whether to show anything.
        reporting: Whether the ranks have black boxes, to which `phalanx.report` writes.
    """

    def __init__(self, *, main: bool, shown: bool, reporting: bool) -> None:
        self._console = Console(stderr=True, quiet=not (main and shown), highlight=False)
        self._bar: Progress | None = None
        self._main, self._reporting = main, reporting
        self._writer: Any = None
        self._samples, self._blocked, self._text = 0, 0.0, ""
        self._since = self._said = time.monotonic_ns()

    def __enter__(self) -> Display:
        self._since = self._said = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._writer is not None:
            self._writer.close()

    def begin(self, step: int, steps: int, writer: Any) -> None:
        """Show a bar from `step` of `steps`, where there is a terminal.

        Args:
            step: Steps that are made already.
            steps: How many there will be.
            writer: TensorBoard's, on rank 0, or None; closed at the end.
        """
        self._steps, self._writer = steps, writer
        if self._console.is_terminal and not self._console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._bar.add_task("training", completed=step, total=steps, text="")
            self._bar.start()

    def flush(self) -> None:
        """Have on the disk what TensorBoard was given: the steps that a snapshot stands for."""
        if self._writer is not None:
            self._writer.flush()

    def note(self, text: str) -> None:
        """Tell `phalanx watch` what the ranks do."""
        if self._reporting:
            report(note=text)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(
        self, step: int, epoch: int, metrics: dict[str, float], samples: int, blocked: float
    ) -> None:
        """Show a finished step.

        Args:
            step: Its number, from 1.
            epoch: The epoch that it belongs to, from 0.
            metrics: The loss and whatever else, over the step's samples.
            samples: How many these are.
            blocked: Seconds that the trainer itself was blocked by other ranks.
        """
        if self._reporting:
            report(step=step, loss=metrics["loss"])
        if not self._main:
            return
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(f"train/{name}", value, step)
        self._samples += samples
        self._blocked += blocked
        now = time.monotonic_ns()
        if now - self._since >= _REFRESH * 1e9:
            self._refresh(now, step)
        if self._bar is not None:
            text = f"loss {metrics['loss']:.4f}  {self._text}"
            self._bar.update(self._bar.task_ids[0], completed=step, text=text)
        elif now - self._said >= _LINES * 1e9:
            self._said = now
            self.say(
                f"epoch {epoch + 1}  step {step}/{self._steps}  loss {metrics['loss']:.4f}  "
                f"{self._text}"
            )

    def _refresh(self, now: int, step: int) -> None:
        """Work out speed and waiting share since the last time."""
        seconds = (now - self._since) / 1e9
        speed = self._samples / seconds
        share = waited(self._since, now) if self._reporting else None
        share = self._blocked / seconds if share is None else share
        self._text = f"{speed:,.0f} samples/s  waiting {share:.0%}"
        if self._writer is not None:
            self._writer.add_scalar("train/samples_per_second", speed, step)
            self._writer.add_scalar("train/waiting", share, step)
        self._since, self._samples, self._blocked = now, 0, 0.0

    def end_epoch(self, step: int, epoch: int, loss: float, found: dict[str, float]) -> None:
        """Show the end of an epoch; `found` is what evaluation gave, empty if there was none."""
        words = "".join(f"  {name} {value:.4f}" for name, value in found.items())
        words = f"  evaluated:{words}" if words else ""
        speed = f"  {self._text}" if self._text else ""
        self.say(f"epoch {epoch + 1}  step {step}/{self._steps}  loss {loss:.4f}{speed}{words}")
        self._said = time.monotonic_ns()
        if self._writer is not None:
            for name, value in found.items():
                self._writer.add_scalar(f"evaluate/{name}", value, step)


def check_tensorboard() -> None:
    """Raise UsageError where TensorBoard isn't installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            'tensorboard is missing: pip install "phalanx[tensorboard]", or leave the argument out'
        )


def tensorboard(directory: Any, step: int) -> Any:
    """Return TensorBoard's writer of a directory.

    Args:
        directory: Made if it isn't there.
        step: The first that will be written. TensorBoard shows no more what a run wrote there of
            this step and later ones, before it was restarted.

    Raises:
        OSError: It can't be written.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=step)
