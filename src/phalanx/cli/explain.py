"""`phalanx explain`: who is the culprit of a hang or a death, and why."""

from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Say why a job hangs or died, and which rank is the culprit.",
            "Reads the flight recorders that every rank writes, and what the launcher noted: while the "
            "job runs, and after its death. The job isn't disturbed. Prints the verdict in plain "
            "words, where each rank was, and what to try.",
            "[bold]phalanx explain[/]\n"
            "  the newest job\n"
            "[bold]phalanx explain 20261121-0901-k3f9x2[/]\n"
            "  this one, out of phalanx jobs; the beginning of its name is enough\n"
            "[bold]phalanx explain --json | jq .verdict[/]\n"
            "  for programs",
        )
    ),
    "epilog": "The exit code is 0 if the job could be read, whatever is wrong with it; 2 if there "
    "is no such job.",
}


def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="Name of the job, or how it begins; the newest if not given.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON; docs/when-a-job-hangs-or-dies.md says what.")
    ] = False,
) -> None:
    """Read a job and print its explanation."""
    import sys

    from phalanx.observe.explain import as_json, as_text, explain
    from phalanx.observe.job_reader import read_job

    found = read_job(job)
    if json:
        import json as format_

        print(format_.dumps(as_json(found), indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(explain(found))
    else:
        print(as_text(found, sys.stdout.encoding or "utf-8"), end="")
