"""Findings as text, for people."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from phalanx.observe.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from phalanx.doctor.finding import Finding

__all__ = ["print_findings", "print_summary"]

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_MAX_LENGTH = 600


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings under their headings, each followed by its advice."""
    from rich.padding import Padding
    from rich.text import Text

    for area, group in groupby(findings, key=lambda finding: finding.area):
        console.print(Text(area, style="bold"))
        for finding in group:
            mark = Text(f"  {finding.level:<8}", style=_COLORS[finding.level])
            line = mark.append(escape(finding.message, _MAX_LENGTH), style="default")
            console.print(line, soft_wrap=True)
            if finding.advice:
                advice = Text(escape(finding.advice, _MAX_LENGTH), style="dim")
                if console.is_terminal:
                    console.print(Padding(advice, (0, 0, 0, 10), expand=False))
                else:
                    console.print(Text(" " * 10).append(advice), soft_wrap=True)


def print_summary(findings: Sequence[Finding], console: Console) -> None:
    """Print one line that says whether this machine is fit for Phalanx."""
    problems, notes = (
        sum(finding.level == level for finding in findings) for level in ("problem", "note")
    )
    suffix = f", {_count_of(notes, 'note')}" if notes else ""
    if problems:
        console.print(f"[red]not fit: {_count_of(problems, 'problem')}{suffix}[/]")
    else:
        console.print(f"[green]fit: no problem{suffix}[/]")


def _count_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
