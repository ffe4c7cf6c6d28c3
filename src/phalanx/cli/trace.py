"""`phalanx trace`: a timeline of all ranks of a job."""

import dataclasses
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, write_json
from phalanx.system.extras import install_command

if TYPE_CHECKING:
    from phalanx.diagnosis.model import Job
    from phalanx.diagnosis.trace import OperationCounts

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Write a timeline of all ranks of a job, to open at https://ui.perfetto.dev.",
            "JOB is a name listed by `phalanx jobs`, or a unique prefix of it; default: the newest "
            "job. The job may still be running, and is not affected.",
            "Each rank is a process of the timeline, with the operations of the script's threads "
            "and of the groups' threads, and messages. Each operation shows the time that it "
            "waited, and for which rank. Counters show the step and loss given to phalanx.report. "
            "A click on an operation shows its call site, and arrows to the same operation of the "
            "other ranks. The last few thousand operations of each rank are available.",
            "[bold]phalanx trace[/]\n  the newest job, to JOB.pftrace\n"
            "[bold]phalanx trace 20261121 -o slow.pftrace[/]\n  another job, to slow.pftrace",
            f"Requires: {install_command('trace')}",
        )
    )
}


def command(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="Name of the job, or a unique prefix; default: the newest job."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; default: JOB.pftrace."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the file if it exists.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the timeline of a job."""
    from phalanx.diagnosis.job_reader import read_job
    from phalanx.diagnosis.trace import check
    from phalanx.usage_errors import UsageError

    check()
    found = read_job(job)
    if not any(rank.pid for rank in found.ranks):
        raise UsageError(f"job {found.name} has no timeline: none of its ranks left a record")
    path = output or Path(f"{found.name}.pftrace")
    written = _write(path, found, force)
    if as_json:
        counts = [dataclasses.asdict(rank) for rank in written]
        write_json({"file": str(path), "job": found.name, "ranks": counts}, as_json, None)
    else:
        _print_summary(path, found, written)


def _write(path: Path, job: "Job", force: bool) -> "list[OperationCounts]":
    from rich.progress import track

    from phalanx.diagnosis.trace import write
    from phalanx.system.console import make_console

    console = make_console(stderr=True)
    file = _open(path, force)
    try:
        with file:
            ranks = track(
                write(job, file),
                "writing",
                total=len(job.ranks),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            return list(ranks)
    except BaseException as error:
        if path.is_file():  # incomplete
            path.unlink()
        if isinstance(error, OSError):
            raise _make_write_error(path, error) from None
        raise


def _open(path: Path, force: bool) -> IO[bytes]:
    from phalanx.usage_errors import UsageError

    try:
        return path.open("wb" if force else "xb")
    except FileExistsError:
        raise UsageError(
            f"{path} exists: choose another file with --output, or replace it with --force"
        ) from None
    except OSError as error:
        raise _make_write_error(path, error) from None


def _make_write_error(path: Path, error: OSError) -> Exception:
    from phalanx.usage_errors import UsageError

    return UsageError(f"can't write {path} ({error.strerror}): choose another file with --output")


def _print_summary(path: Path, job: "Job", written: "list[OperationCounts]") -> None:
    from phalanx.system.escape import escape

    operations = sum(rank.operations for rank in written)
    size = path.stat().st_size / 1e3
    large = f"{size:.0f} kB" if size < 1000 else f"{size / 1e3:.1f} MB"
    print(f"{path}: {len(written)} ranks, {operations:,} operations, {large}")
    print("Open https://ui.perfetto.dev and drag the file onto the page. It stays on your machine.")
    if earlier := sum(rank.earlier for rank in written):
        print(
            f"note: {earlier:,} earlier operations are missing: each rank keeps only its last ones"
        )
    if impossible := sum(rank.impossible for rank in written):
        print(f"note: {impossible:,} operations with impossible times were omitted")
    for problem in job.list_problems():
        print(f"note: {escape(problem)}")
