"""`phalanx explain`: the root cause of a hang or a failure, and the rank at fault."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, Output, check_writable, write_json
from phalanx.system.console import has_styles, make_console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.diagnosis.model import Job

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Explain why a job hangs or has failed, and name the rank at fault.",
            "Reads the flight recorders of all ranks and the launcher's log, while the job runs "
            "or after it has ended. The job is not affected. Prints the root cause, a table of "
            "the ranks with their operations, and suggested fixes.",
            "[bold]phalanx explain[/]\n"
            "  the newest job\n"
            "[bold]phalanx explain 20261121-0901-k3f9x2[/]\n"
            "  a job listed by phalanx jobs; a unique prefix of its name is enough\n"
            "[bold]phalanx explain --json | jq .diagnosis[/]\n"
            "  for programs; the other keys are job, ranks, advice, problems and workers\n"
            "[bold]phalanx explain --tracebacks[/]\n"
            "  the whole tracebacks of the ranks of which phalanx run has shown short ones\n"
            "[bold]phalanx explain --dumps /tmp/traces[/]\n"
            "  a job on any backend, of which PyTorch's Flight Recorder has written dumps",
        )
    ),
    "epilog": "The exit code is 0 if the job could be read, even if it has failed; 2 if there is "
    "no such job.",
}


def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Name of the job, or a unique prefix of it; default: the newest job.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
    output: Output = None,
    tracebacks: Annotated[
        bool,
        typer.Option("--tracebacks", help="Print the whole tracebacks of the ranks instead."),
    ] = False,
    dumps: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Read the dumps of PyTorch's Flight Recorder in a directory, a file of each rank.",
        ),
    ] = None,
) -> None:
    """Read a job and print its explanation."""
    import sys

    if dumps is not None and (job is not None or tracebacks):
        from phalanx.usage_errors import UsageError

        raise UsageError("--dumps is given together with JOB or --tracebacks: omit one of them")
    if tracebacks:
        _print_tracebacks(job)
        return
    check_writable(output)
    found = _read(job, dumps)
    from phalanx.diagnosis.explain import as_json, as_text, explain

    if json or output is not None:
        write_json(as_json(found), json, output)
    if json:
        return
    console = make_console()
    if has_styles(console):
        console.print(explain(found))
    else:
        print(as_text(found, sys.stdout.encoding or "utf-8"), end="")


def _read(job: str | None, dumps: str | None) -> "Job":
    if dumps is None:
        from phalanx.diagnosis.job_reader import read_job

        return read_job(job)
    from phalanx.diagnosis.torch_jobs import read_dumps

    return read_dumps(dumps, _track)


def _track(values: "Iterable[Any]", count: int) -> "Iterable[Any]":
    """Show how many dumps have been read, which may take seconds, until all have been."""
    from rich.progress import track

    console = make_console(stderr=True)
    return track(
        values,
        "Reading dumps",
        count,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _print_tracebacks(job: str | None) -> None:
    from phalanx.diagnosis.job_reader import read_tracebacks
    from phalanx.system.escape import escape
    from phalanx.usage_errors import UsageError

    name, texts = read_tracebacks(job)
    if not texts:
        raise UsageError(
            f"job {name} has no tracebacks: only those that `phalanx run` has shown in short "
            "are kept"
        )
    for rank, text in texts.items():
        for line in text.splitlines():
            print(f"[rank {rank}] {escape(line, 4096)}")
