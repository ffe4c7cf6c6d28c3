"""`phalanx doctor`: check this machine, and the network between machines."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, Output, check_writable, write_json
from phalanx.system.console import make_console
from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from rich.console import Console

    from phalanx.doctor import Finding
    from phalanx.doctor.peers.links import Network

    Measure: TypeAlias = Callable[[Callable[[str], None]], Network | None]

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Check this machine and the network between machines, and suggest fixes.",
            "Checks cores, memory, the required kernel features, network interfaces and the "
            "address for other hosts, MPI libraries, GPUs and versions. Changes nothing. Each line "
            "is ok, a note (it works, with a limitation) or a problem, followed by advice.",
            "[bold]phalanx doctor[/]\n  this machine\n"
            "[bold]phalanx doctor --peers node-a,node-b[/]\n"
            "  these machines, too, over ssh, and the latency and bandwidth of every pair\n"
            "[bold]phalanx run --nproc-per-node 4 -m phalanx doctor[/]\n"
            "  the same for the ranks of a job; with --nnodes and the options of your job, between "
            "its machines\n"
            "[bold]phalanx doctor --json | jq '.findings\\[] | select(.level != \"ok\")'[/]\n"
            "  for programs: fit is true without a problem; findings, and network for peers",
            "A pair of machines takes about three seconds; pairs without a common machine are "
            "measured at the same time. Pairs that can't reach each other are reported, and the "
            "others are still measured.",
        )
    ),
    "epilog": "The exit code is 0 if there is no problem, 1 if there is one, 2 for wrong usage.",
}


def command(
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="Other machines, as names for ssh, which must connect without a prompt.",
        ),
    ] = None,
    remote_python: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Path of Python on the peers; default: the path of this Python.",
            show_default=False,
        ),
    ] = sys.executable,
    ssh: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="Command to use instead of ssh, such as 'ssh -p 2222'."
        ),
    ] = "ssh",
    as_json: AsJson = False,
    output: Output = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the ranks of a job have to join.", min=1)
    ] = 60.0,
    answer: Annotated[
        bool,
        typer.Option("--answer", hidden=True, help="Serve commands of another doctor on stdin."),
    ] = False,
) -> None:
    """Check this machine and its peers."""
    # The doctor reports failed connections itself, without PyTorch's stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from phalanx.doctor.peers import ranks
    from phalanx.doctor.peers.ssh import measure_over_ssh, parse_peer_names, serve_stdin
    from phalanx.system.ssh import parse_ssh_command
    from phalanx.usage_errors import UsageError

    if answer:
        serve_stdin()
        return
    rank = ranks.job_rank()
    if rank is not None and peers is not None:
        raise UsageError("--peers is given, but this is a rank of a job: its hosts are the peers")
    names = parse_peer_names(peers) if peers is not None else []
    if rank:
        ranks.measure_job(timeout)
        return
    check_writable(output)
    measure: Measure | None = None
    if rank == 0:
        measure = partial(ranks.measure_job, timeout)
    elif names:
        measure = partial(measure_over_ssh, names, parse_ssh_command(ssh, "--peers"), remote_python)
    _check(measure, as_json, output)


def _check(measure: "Measure | None", as_json: bool, output: Path | None) -> None:
    """Check this machine and, by `measure`, the network; print the findings; exit 1 if unfit."""
    from phalanx.doctor import report, run_checks
    from phalanx.doctor.report import print_findings, print_matrix, print_summary

    console = make_console(stderr=as_json)
    findings = run_checks()
    if not as_json:
        print_findings(findings, console)
    network, network_findings = _measure_network(measure, console) if measure else (None, [])
    all_findings = [*findings, *network_findings]
    write_json(report.as_json(all_findings, network), as_json, output)
    if not as_json:
        if network is not None:
            print_matrix(network, console)
        print_findings(network_findings, console)
        print_summary(all_findings, console)
    if not report.is_fit(all_findings):
        raise typer.Exit(ExitCode.FAILURE)


def _measure_network(
    measure: "Measure", console: "Console"
) -> "tuple[Network | None, list[Finding]]":
    """Return the measurements between hosts and the findings about them."""
    from phalanx.doctor import Finding
    from phalanx.errors import PhalanxError, UsageError

    try:
        with console.status("measuring") as status:
            network = measure(status.update)
    except (PhalanxError, UsageError) as error:
        message = str(error)
        return None, [
            Finding("hosts", "job", "problem", message, "Without a group, nothing is measured.")
        ]
    return network, network.findings() if network else []
