"""`phalanx doctor`: is this machine fit, and the network between machines?"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from rich.console import Console

    from phalanx.doctor import Finding
    from phalanx.doctor.peers.links import Network

    Ask: TypeAlias = Callable[[Callable[[str], None]], Network | None]

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Look at this machine, and at the network between machines, and say what to mend.",
            "Checks cores, memory, what Phalanx needs of the kernel, interfaces and the address "
            "that others would reach, MPI libraries, GPUs and versions. Changes nothing. Each "
            "line is ok, a note (it works, but there is something to know) or a problem, with what "
            "to do next.",
            "[bold]phalanx doctor[/]\n  this machine\n"
            "[bold]phalanx doctor --peers node-a,node-b[/]\n"
            "  also those, over ssh, and every pair: is there a way, how late, how fast?\n"
            "[bold]phalanx run --nproc-per-node 4 -m phalanx doctor[/]\n"
            "  the same for the ranks of a job; with --nnodes and the options of your job, between "
            "the machines that it would have\n"
            "[bold]phalanx doctor --json | jq '.findings\\[] | select(.level != \"ok\")'[/]\n"
            "  for programs: docs/doctor.md describes the form",
            "Between machines a pair takes about three seconds, and pairs that have no machine in "
            "common are measured at the same time. A pair that doesn't reach each other is named; "
            "the others are measured all the same.",
        )
    ),
    "epilog": "The exit code is 0 if there is no problem, 1 if there is one, 2 for wrong usage.",
}

_PLAIN_WIDTH = 200


def command(
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            help="Other machines, as ssh takes them. ssh must get in without asking.",
        ),
    ] = None,
    remote_python: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Python on the peers; the path of this one if not given.",
            show_default=False,
        ),
    ] = sys.executable,
    ssh: Annotated[
        str, typer.Option(metavar="COMMAND", help="In place of ssh, as in --ssh 'ssh -p 2222'.")
    ] = "ssh",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; docs/doctor.md says what.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write that JSON to this file.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the ranks of a job have to come.", min=1)
    ] = 60.0,
    answer: Annotated[
        bool, typer.Option("--answer", hidden=True, help="Do what another doctor asks on stdin.")
    ] = False,
) -> None:
    """Look at this machine and its peers."""
    # Connections that fail are what this is about: PyTorch's own stack traces of them say no more.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from phalanx.doctor.peers import ranks
    from phalanx.doctor.peers.ssh import answer_on_stdin, over_ssh, peer_names
    from phalanx.errors import UsageError
    from phalanx.launcher.ssh.plan import parse_ssh_command

    if answer:
        answer_on_stdin()
        return
    rank = ranks.rank_in_a_job()
    if rank is not None and peers is not None:
        raise UsageError("--peers is given, but this is a rank of a job: its hosts are the peers")
    names = peer_names(peers) if peers is not None else []
    if rank:
        ranks.through_the_job(timeout)
        return
    if save is not None and not save.absolute().parent.is_dir():
        raise UsageError(f"--save is {save}, but there is no folder {save.absolute().parent}")
    ask: Ask | None = None
    if rank == 0:
        ask = partial(ranks.through_the_job, timeout)
    elif names:
        ask = partial(over_ssh, names, parse_ssh_command(ssh, "--peers"), remote_python)
    _examine(ask, as_json, save)


def _examine(ask: "Ask | None", as_json: bool, save: Path | None) -> None:
    """Look at this machine and, by `ask`, at the network; print it; exit code 1 if unfit."""
    from rich.console import Console

    from phalanx.doctor import examine, json_report
    from phalanx.doctor.peers.matrix import show_matrix
    from phalanx.doctor.text_report import show, verdict

    console = Console(highlight=False, stderr=as_json)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    findings = examine()
    if not as_json:
        show(findings, console)
    network, between = _asked(ask, console) if ask else (None, [])
    everything = [*findings, *between]
    text = json.dumps(json_report.as_json(everything, network), indent=2)
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        if network is not None:
            show_matrix(network, console)
        show(between, console)
        verdict(everything, console)
    if not json_report.fit(everything):
        raise typer.Exit(1)


def _asked(ask: "Ask", console: "Console") -> "tuple[Network | None, list[Finding]]":
    """What came out between hosts, and what is wrong with it."""
    from phalanx.doctor import Finding
    from phalanx.errors import PhalanxError, UsageError

    try:
        with console.status("measuring") as status:
            network = ask(status.update)
    except (PhalanxError, UsageError) as error:
        words = str(error)
        return None, [
            Finding("hosts", "job", "problem", words, "Without a group, nothing is measured.")
        ]
    return network, network.findings() if network else []
