"""The matrix of all links between hosts, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.doctor.peers.links import format_bandwidth, format_latency
from phalanx.observe.escape import escape
from phalanx.topology.layout import format_rank_ranges

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from phalanx.doctor.peers.links import Host, Link, Network

__all__ = ["print_matrix"]

_MAX_COLUMNS = 12


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
