"""The command line: `make drill`, or `python -m tests.drill --help`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import psutil
import typer
from rich.console import Console
from rich.progress import track

from tests.drill import desyncs, endurance, kills, matrix, tables, training
from tests.drill.leaks import shared_files
from tests.drill.pool import Pool

T = TypeVar("T")
console = Console(highlight=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Seed = Annotated[
    int | None, typer.Option(min=0, help="Of everything random; a fresh one if not given.")
]
First = Annotated[int, typer.Option(min=0, help="The number of the first trial.")]
Sizes = Annotated[str, typer.Option(help="World sizes.")]
Record = Annotated[
    Path | None, typer.Option(help="Write PATH.json and PATH.md, as benchmarks/kills.")
]


@app.command("kills")
def kills_command(
    count: Annotated[int, typer.Option(min=1, help="How many deaths.")] = 100,
    ranks: Sizes = "2-8",
    seed: Seed = None,
    first: First = 0,
    backend: Annotated[str, typer.Option(help="phalanx, or gloo for comparison.")] = "phalanx",
    timed: Annotated[
        bool, typer.Option(help="Half within 10 ms, 99% within 100 ms; else all within 1 s.")
    ] = True,
    record: Record = None,
) -> None:
    """Kill random ranks at random moments; each survivor must raise PeerLost and name it."""
    sizes, seed = range_of(ranks), fresh(seed)
    if backend not in ("phalanx", "gloo"):
        raise typer.BadParameter(f"backend {backend!r}: expected phalanx or gloo")
    files, board = shared_files(), kills.Board()
    with Pool(sizes[-1], [kills.__name__]) as pool:
        trials = [
            shown(kills.run(pool, kills.draw(seed, number, sizes[0], sizes[-1]), board, backend))
            for number in numbers(first, count, "killing")
        ]
    left = [f"/dev/shm/{name}" for name in shared_files() - files]
    left += [f"process {process.pid}" for process in psutil.Process().children(recursive=True)]
    summary = tables.summarize_kills(trials, left)
    table = tables.build_kills_table(summary)
    console.print(table)
    wrong = tables.find_kill_failures(summary, timed=timed) if backend == "phalanx" else []
    if record is not None:
        title = f"{count:,} deaths on {backend}: from the death to the exception of each survivor"
        tables.write_record(record, title, table, {"seed": seed, "backend": backend, **summary})
    if backend == "phalanx":
        finish(wrong, "every survivor has named the victim, and nothing is left behind")


@app.command("desyncs")
def desyncs_command(
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 110,
    ranks: Sizes = "2-8",
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Let a random rank disagree; every rank must raise CollectiveMismatch with both call sites."""
    sizes, seed = range_of(ranks), fresh(seed)
    with Pool(sizes[-1], [desyncs.__name__]) as pool:
        trials = [
            shown(desyncs.run(pool, desyncs.draw(seed, number, sizes[0], sizes[-1])))
            for number in numbers(first, count, "disagreeing")
        ]
    summary = tables.summarize_desyncs(trials)
    table = tables.build_desyncs_table(summary)
    console.print(table)
    if record is not None:
        title = f"{count:,} desyncs: every rank names both operations and both call sites"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    finish(summary["wrong"], "every rank has named both sides and both call sites")


@app.command("operations")
def operations_command(
    count: Annotated[int, typer.Option(min=1000, help="How many, of each rank.")] = 100_000,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="World size.")] = 2,
    seed: Seed = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that it may take.")] = 7200.0,
    record: Record = None,
) -> None:
    """Run small operations of all kinds; memory and descriptors must stay as they are."""
    seed = fresh(seed)
    with Pool(ranks, [endurance.__name__]) as pool, console.status("running operations"):
        samples = endurance.run(pool, ranks, seed, count, limit)
    table = tables.build_operations_table(samples)
    console.print(table)
    summary = tables.summarize_operations(samples)
    if record is not None:
        title = f"{count:,} small operations of all kinds on {ranks} ranks"
        tables.write_record(record, title, table, {"seed": seed, "count": count, **summary})
    wrong = [
        f"rank {rank} has grown by {found['grown']} bytes; more {', '.join(found['more']) or '-'}"
        for rank, found in enumerate(summary["ranks"])
        if not found["flat"]
    ]
    finish(wrong, "memory and descriptors have stayed as they were")


@app.command("training")
def training_command(
    count: Annotated[int, typer.Option(min=1, help="How many kills.")] = 200,
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Kill training at random moments and start it again; it must end as if nobody had."""
    seed, trials = fresh(seed), []
    with training.Drill() as drill, console.status("killing") as status:
        while sum(trial.landed for trial in trials) < count:
            trial = drill.run(training.draw(seed, first + len(trials), blows=4))
            trials.append(trial)
            for what in trial.wrong:
                console.print(f"trial {trial.number}, {trial}:\n  {what}", markup=False)
            landed = sum(trial.landed for trial in trials)
            words = f"{landed} of {count} kills, in {len(trials)} runs"
            status.update(words)
            if not console.is_terminal and len(trials) % 10 == 0:
                console.print(words)
    table = tables.build_training_table(summary := tables.summarize_training(trials))
    console.print(table)
    if record is not None:
        title = f"{summary['kills']:,} kills at random moments of runs of {training.EPOCHS} epochs"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    finish(summary["wrong"], "every run has ended as one that nobody disturbed, bit for bit")


@app.command("matrix")
def matrix_command(
    case: Annotated[list[str] | None, typer.Option(help="This one alone. May be repeated.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="So many jobs at once.")] = 2,
    record: Record = None,
) -> None:
    """Inject faults with a known cause; `phalanx explain` must name the ranks, cause and advice."""
    unknown = sorted({*(case or ())} - {*matrix.CASES})
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(matrix.CASES)}")
    chosen = [matrix.CASES[name] for name in case or matrix.CASES]
    trials = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as executor:
        for trial in executor.map(lambda one: matrix.run(one, Path(folder)), chosen):
            trials.append(trial)
            mark = "right" if trial.right else "WRONG"
            console.print(f"{mark} {trial.case.name} ({trial.seconds:.0f} s)", markup=False)
            for what in trial.wrong:
                console.print(f"  {what}", markup=False, soft_wrap=True)
    summary = tables.summarize_matrix(trials)
    table = tables.build_matrix_table(summary)
    console.print(table)
    if record is not None:
        title = f"{len(trials)} faults: whether explain names the ranks, the cause and what helps"
        tables.write_record(record, title, table, summary)
    finish(summary["wrong"], "every fault has been explained right")


def range_of(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or not 2 <= int(found[1]) <= int(found[2] or found[1]) <= 64:
        raise typer.BadParameter(f"{text!r}: expected a number of ranks or a range, as 2-8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def fresh(seed: int | None) -> int:
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed}")
    return seed


def numbers(first: int, count: int, what: str) -> Iterator[int]:
    quiet = not console.is_terminal
    yield from track(range(first, first + count), what, console=console, disable=quiet)


def shown(trial: T) -> T:
    """Print at once what went wrong, and what repeats it."""
    found: Any = trial
    for what in found.wrong:
        drawn = found.kill if isinstance(found, kills.Trial) else found.desync
        console.print(f"trial {drawn.number}, {drawn}:\n  {what}", markup=False, soft_wrap=True)
    return trial


def finish(wrong: list[str], words: str) -> None:
    if wrong:
        last = "\n  ".join(wrong[-20:])
        console.print(f"[red]{len(wrong)} things are wrong[/]; the last ones:", soft_wrap=True)
        console.print(f"  {last}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"[green]{words}[/]")


if __name__ == "__main__":
    app()
