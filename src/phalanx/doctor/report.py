"""Reports of the findings and of the network between hosts: text for people, JSON for programs.

The page "The doctor" of the documentation describes the JSON schema.
"""

from __future__ import annotations

import socket
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Any

from phalanx.doctor.peers.links import format_bandwidth, format_latency
from phalanx.system.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

    from phalanx.doctor.finding import Finding
    from phalanx.doctor.peers.links import Host, Link, Network

SCHEMA = 1
"""Version of the schema; additions do not change it."""

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_MAX_LENGTH = 600
_MAX_COLUMNS = 12


def is_fit(findings: Sequence[Finding]) -> bool:
    """Return whether no finding is a problem."""
    return all(finding.level != "problem" for finding in findings)


def as_json(findings: Sequence[Finding], network: Network | None) -> dict[str, Any]:
    """Return all findings and measurements as a JSON object.

    Args:
        findings: Findings about this machine and about other hosts.
        network: Measurements between hosts; None if there are none.
    """
    return {
        "schema": SCHEMA,
        "phalanx": metadata.version("phalanx"),
        "host": socket.gethostname(),
        "fit": is_fit(findings),
        "findings": [asdict(finding) for finding in findings],
        "network": network.as_json() if network else None,
    }


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


def print_matrix(network: Network, console: Console) -> None:
    """Print a matrix with a row for each sending host and a column for each receiving host.

    Args:
        network: The measurements.
        console: The console to print to.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    hosts = network.hosts
    console.print(
        Text("between hosts", style="bold").append(
            ": round trip of 64 bytes, and bandwidth of one connection", style="not bold"
        )
    )
    if len(hosts) > _MAX_COLUMNS:
        console.print(f"  {len(hosts)} hosts are too many for a table: use --json for all pairs")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("from \\ to", no_wrap=True)
    for host in hosts:
        table.add_column(Text(escape(host.name)), justify="right")
    for source, host in enumerate(hosts):
        cells = [_format_cell(network, source, target) for target in range(len(hosts))]
        table.add_row(Text(_format_host(host)), *cells)
    console.print(table)


def _format_host(host: Host) -> str:
    if not host.ranks:
        return escape(host.name)
    from phalanx.topology.layout import format_rank_ranges  # needs the core

    noun = "ranks" if len(host.ranks) > 1 else "rank"
    return f"{escape(host.name)} ({noun} {format_rank_ranges(host.ranks)})"


def _format_cell(network: Network, source: int, target: int) -> Text:
    from rich.text import Text

    if network.hosts[source].error or network.hosts[target].error:
        return Text("absent", style="red" if source != target else "dim")
    link: Link | None = network.link(source, target)
    if link is None:
        return Text("-", style="dim")
    if link.error:
        return Text("blocked" if link.via == "network" else "broken", style="red")
    cell = Text(format_latency(link), style="yellow" if network.is_late(link) else "")
    cell.append("\n")
    cell.append(format_bandwidth(link), style="yellow" if network.is_slow(link) else "")
    if link.via == "memory":
        cell.append("\nmemory", style="dim")
    return cell
