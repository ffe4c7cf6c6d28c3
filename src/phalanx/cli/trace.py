"""`phalanx trace`: all ranks of a job on one timeline."""

from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.observe.model import Job
    from phalanx.observe.trace import OperationCounts

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Write a timeline of all ranks of a job, to be opened at https://ui.perfetto.dev.",
            "JOB is a name out of `phalanx jobs`, or its beginning; without it, the newest. It may "
            "still run, and isn't disturbed.",
            "Each rank is a process of the timeline, with the operations of the script's threads, "
            "of the groups' threads, and messages; in each operation the part that it waited, and "
            "for whom; step and loss as phalanx.report was told. A click on an operation shows its "
            "call site, and arrows to the same operation of the other ranks. A rank keeps its last "
            "few thousand operations.",
            "[bold]phalanx trace[/]\n  the newest job, to JOB.pftrace\n"
            "[bold]phalanx trace 20261121 -o slow.pftrace[/]\n  another one",
            'It needs: pip install "phalanx\\[trace]"',
        )
    )
}


def command(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Its name, or the beginning of it.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to; JOB.pftrace if not given."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the file if it exists.")
    ] = False,
) -> None:
    """Write the timeline of a job."""
    from phalanx.errors import UsageError
    from phalanx.observe.job_reader import read_job
    from phalanx.observe.trace import check

    check()
    found = read_job(job)
    if not any(rank.pid for rank in found.ranks):
        raise UsageError(
            f"job {found.name}: none of its ranks left a trace, so there is no timeline"
        )
    path = output or Path(f"{found.name}.pftrace")
    _report(path, found, _write(path, found, force))


def _write(path: Path, job: "Job", force: bool) -> "list[OperationCounts]":
    from rich.console import Console
    from rich.progress import track

    from phalanx.observe.trace import write

    console = Console(stderr=True)
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
        if path.is_file():  # half of it
            path.unlink()
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _open(path: Path, force: bool) -> IO[bytes]:
    from phalanx.errors import UsageError

    try:
        return path.open("wb" if force else "xb")
    except FileExistsError:
        raise UsageError(
            f"{path} exists: name another file with -o, or replace it with --force"
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> Exception:
    from phalanx.errors import UsageError

    return UsageError(f"can't write {path} ({error.strerror}): name another file with -o")


def _report(path: Path, job: "Job", written: "list[OperationCounts]") -> None:
    from phalanx.observe.escape import escape

    operations = sum(rank.operations for rank in written)
    size = path.stat().st_size / 1e3
    large = f"{size:.0f} kB" if size < 1000 else f"{size / 1e3:.1f} MB"
    print(f"{path}: {len(written)} ranks, {operations:,} operations, {large}")
    print("Open https://ui.perfetto.dev and drag the file onto the page: it stays on your machine.")
    if earlier := sum(rank.earlier for rank in written):
        print(f"note: {earlier:,} earlier operations are missing: ranks keep only the last ones")
    if impossible := sum(rank.impossible for rank in written):
        print(f"note: {impossible:,} operations were left out, whose times can't be right")
    for problem in (
        *job.problems,
        *(f"rank {r.rank}: {r.problem}" for r in job.ranks if r.problem),
    ):
        print(f"note: {escape(problem)}")
