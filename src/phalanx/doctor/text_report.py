"""Findings as text, for people."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from phalanx.observe.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from phalanx.doctor.finding import Finding

__all__ = ["show", "verdict"]

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_MOST = 600


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings under their headings, each followed by its advice."""
    from rich.padding import Padding
    from rich.text import Text

    for area, group in groupby(findings, key=lambda finding: finding.area):
        console.print(Text(area, style="bold"))
        for finding in group:
            mark = Text(f"  {finding.level:<8}", style=_COLORS[finding.level])
            line = mark.append(escape(finding.words, _MOST), style="default")
            console.print(line, soft_wrap=True)
            if finding.advice:
                advice = Text(escape(finding.advice, _MOST), style="dim")
                if console.is_terminal:
                    console.print(Padding(advice, (0, 0, 0, 10), expand=False))
                else:
                    console.print(Text(" " * 10).append(advice), soft_wrap=True)


def verdict(findings: Sequence[Finding], console: Console) -> None:
    """Print one line that says whether this machine is fit for Phalanx."""
    problems, notes = (
        sum(finding.level == level for finding in findings) for level in ("problem", "note")
    )
    noted = f", {_counted(notes, 'note')}" if notes else ""
    if problems:
        console.print(f"[red]not fit: {_counted(problems, 'problem')}{noted}[/]")
    else:
        console.print(f"[green]fit: no problem{noted}[/]")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
