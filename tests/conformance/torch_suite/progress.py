"""Progress bars for a run of a suite, one for each column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from tests.conformance.torch_suite.runner import Outcome

__all__ = ["SuiteProgress"]


class SuiteProgress(Progress):
    """Progress bars that count the tests that failed."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[bad]} not passed"),
            TimeElapsedColumn(),
            console=console,
        )

    def follow(self, title: str) -> tuple[Callable[[int], None], Callable[[str, Outcome], None]]:
        """Add a bar; return the arguments `begin` and `report` of a run."""
        task = self.add_task(title, total=None, bad=0)
        bad = []

        def begin(count: int) -> None:
            self.update(task, total=count)

        def report(test: str, outcome: Outcome) -> None:
            if outcome.outcome in {"fail", "timeout"}:
                bad.append(test)
            self.update(task, advance=1, bad=len(bad))

        return begin, report
