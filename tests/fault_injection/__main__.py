"""The command line: `make faults`, or `python -m tests.fault_injection --help`."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import psutil
import typer
from rich.console import Console
from rich.progress import Progress, track

from tests.fault_injection import (
    desyncs,
    endurance,
    healthy,
    kills,
    matrix,
    replacements,
    schedules,
    servers,
    shrinks,
    tables,
    training,
)
from tests.fault_injection.leaks import shared_files
from tests.fault_injection.pool import Pool

T = TypeVar("T")
console = Console(highlight=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of the trials; a random one by default.")
]
Parallel = Annotated[int, typer.Option(min=1, help="Number of jobs that run at the same time.")]
First = Annotated[int, typer.Option(min=0, help="Number of the first trial.")]
Sizes = Annotated[str, typer.Option("--nproc-per-node", help="World sizes, such as 2-8.")]
Record = Annotated[
    Path | None, typer.Option(help="Write PATH.json and PATH.md, for example benchmarks/kills.")
]


@app.command("kills")
def kills_command(
    count: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 100,
    nprocs: Sizes = "2-8",
    seed: Seed = None,
    first: First = 0,
    backend: Annotated[str, typer.Option(help="phalanx, or gloo for comparison.")] = "phalanx",
    timed: Annotated[
        bool,
        typer.Option(
            help="Require 50% within 10 ms and 99% within 100 ms, not only all within 1 s."
        ),
    ] = True,
    record: Record = None,
) -> None:
    """Kill random ranks at random moments; each survivor must raise PeerLost and name it."""
    sizes, seed = parse_range(nprocs), choose_seed(seed)
    if backend not in ("phalanx", "gloo"):
        raise typer.BadParameter(f"backend {backend!r}: expected phalanx or gloo")
    files, page = shared_files(), kills.SharedPage()
    with Pool(sizes[-1], [kills.__name__]) as pool:
        trials = [
            report_trial(
                kills.run(pool, kills.draw(seed, number, sizes[0], sizes[-1]), page, backend)
            )
            for number in track_numbers(first, count, "killing")
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
        finish(wrong, "every survivor named the victim, and no process or file is left")


@app.command("shrinks")
def shrinks_command(
    count: Annotated[int, typer.Option(min=1, help="Number of deaths, at least.")] = 100,
    nprocs: Sizes = "2-8",
    hosts: Annotated[
        int, typer.Option(min=1, help="Simulated hosts, to which ranks belong in turn.")
    ] = 1,
    seed: Seed = None,
    first: First = 0,
    timed: Annotated[
        bool,
        typer.Option(
            help="Require the next collective within 20 ms for 50%, 100 ms for 99%; on several "
            "hosts, within 1 s."
        ),
    ] = True,
    record: Record = None,
) -> None:
    """Kill ranks one after another; the survivors must continue with `phalanx.shrink`."""
    sizes, seed = parse_range(nprocs), choose_seed(seed)
    files, page = shared_files(), kills.SharedPage()
    drawn = list(draw_shrinks(seed, first, count, sizes, hosts))
    with Pool(sizes[-1], [shrinks.__name__]) as pool:
        trials = [
            report_trial(shrinks.run(pool, each, page))
            for each in track(drawn, "shrinking", console=console, disable=not console.is_terminal)
        ]
    left = [f"/dev/shm/{name}" for name in shared_files() - files]
    left += [f"process {process.pid}" for process in psutil.Process().children(recursive=True)]
    summary = tables.summarize_shrinks(trials, left)
    table = tables.build_shrinks_table(summary)
    console.print(table)
    if record is not None:
        title = (
            f"{summary['all']['deaths']:,} deaths: the survivors shrink their group and continue"
        )
        tables.write_record(record, title, table, {"seed": seed, **summary})
    wrong = tables.find_shrink_failures(summary, timed=timed, hosts=hosts)
    finish(wrong, "all survivors continued with the same ranks, and nothing is left")


def draw_shrinks(
    seed: int, first: int, deaths: int, sizes: range, hosts: int
) -> Iterator[shrinks.Shrinking]:
    """Draw trials until they have so many deaths."""
    number = first
    while deaths > 0:
        trial = shrinks.draw(seed, number, sizes[0], sizes[-1], hosts)
        yield trial
        deaths -= len(trial.victims)
        number += 1


@app.command("replacements")
def replacements_command(
    count: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 100,
    nprocs: Annotated[int, typer.Option("--nproc-per-node", min=2, max=64, help="World size.")] = 3,
    spares: Annotated[int, typer.Option(min=0, help="Number of spares.")] = 1,
    pause: Annotated[float, typer.Option(min=0.01, help="Mean seconds between kills.")] = 1.0,
    seed: Seed = None,
    timed: Annotated[
        bool, typer.Option(help="Require all ranks within 1 s for 99% of the kills.")
    ] = True,
    record: Record = None,
) -> None:
    """Kill ranks of a training one after another; the launcher must replace them."""
    seed, files = choose_seed(seed), shared_files()
    with TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("killing", total=count, visible=console.is_terminal)
        trial = replacements.run(
            Path(folder), seed, count, nprocs, spares, pause, lambda: progress.advance(task)
        )
    trial.wrong += [f"/dev/shm/{name} is left" for name in shared_files() - files]
    summary = tables.summarize_replacements(trial)
    table = tables.build_replacements_table(summary)
    console.print(table)
    if record is not None:
        title = f"{trial.kills:,} kills in a training whose lost ranks are replaced"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    wrong = tables.find_replacement_failures(summary, timed=timed)
    finish(wrong, "the training ended like an undisturbed one, and nothing is left")


@app.command("servers")
def servers_command(
    count: Annotated[
        int, typer.Option(min=1, help="Number of kills, for each kind of training.")
    ] = 100,
    seed: Seed = None,
    timed: Annotated[bool, typer.Option(help="Require 99% of the failovers within 1 s.")] = True,
    record: Record = None,
) -> None:
    """Kill servers of replicated embedding tables; no acknowledged update may be lost."""
    seed, files, trials = choose_seed(seed), shared_files(), []
    for staleness in (None, servers.STALENESS):
        with TemporaryDirectory() as folder, Progress(console=console) as progress:
            task = progress.add_task("killing", total=count, visible=console.is_terminal)
            trials.append(
                servers.run(Path(folder), seed, count, staleness, partial(progress.advance, task))
            )
    left = [f"/dev/shm/{name} is left" for name in shared_files() - files]
    summary = tables.summarize_servers(trials, left)
    table = tables.build_servers_table(summary)
    console.print(table)
    if record is not None:
        kills = sum(trial.kills for trial in trials)
        title = f"{kills:,} kills of servers of replicated tables, under load"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    wrong = tables.find_server_failures(summary, timed=timed)
    finish(wrong, "every row shows the updates that were acknowledged, and nothing is left")


@app.command("desyncs")
def desyncs_command(
    count: Annotated[int, typer.Option(min=1, help="Number of mismatches.")] = 110,
    nprocs: Sizes = "2-8",
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Let a random rank call another operation; every rank must raise CollectiveMismatch."""
    sizes, seed = parse_range(nprocs), choose_seed(seed)
    with Pool(sizes[-1], [desyncs.__name__]) as pool:
        trials = [
            report_trial(desyncs.run(pool, desyncs.draw(seed, number, sizes[0], sizes[-1])))
            for number in track_numbers(first, count, "disagreeing")
        ]
    summary = tables.summarize_desyncs(trials)
    table = tables.build_desyncs_table(summary)
    console.print(table)
    if record is not None:
        title = f"{count:,} desyncs: every rank names both operations and both call sites"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    finish(summary["wrong"], "every rank named both sides and both call sites")


@app.command("schedules")
def schedules_command(
    count: Annotated[int, typer.Option(min=1, help="Number of programs of each kind.")] = 1000,
    only: Annotated[
        str, typer.Option(help=f"The kind of programs: {', '.join(schedules.KINDS)}. Default: all.")
    ] = "",
    hosts: Annotated[
        str, typer.Option(help="Simulated hosts of the three workers, a letter for each.")
    ] = "aab",
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Run random programs of RPC, tables and launchers, with pauses wherever threads hand over."""
    seed, wrong, begin = choose_seed(seed), [], time.monotonic()
    if len(hosts) != schedules.WORKERS:
        raise typer.BadParameter(f"hosts {hosts!r}: expected {schedules.WORKERS} letters")
    if only and only not in schedules.KINDS:
        raise typer.BadParameter(f"only {only!r}: expected one of {', '.join(schedules.KINDS)}")
    kinds = [only] if only else list(schedules.KINDS)
    batches = [
        (kind, range(first, first + count)[start : start + schedules.BATCH])
        for start in range(0, count, schedules.BATCH)
        for kind in kinds
    ]
    with Pool(schedules.WORKERS, [schedules.__name__]) as pool:
        for index in track_numbers(0, len(batches), "running programs"):
            for problem in (problems := schedules.run(pool, *batches[index], hosts, seed)):
                console.print(problem, markup=False, soft_wrap=True)
            wrong += problems
    summary = {"seed": seed, "hosts": hosts, "kinds": kinds, "programs": count, "wrong": wrong}
    table = tables.build_schedules_table(summary, time.monotonic() - begin)
    console.print(table)
    if record is not None:
        title = f"{count:,} random programs each of {', '.join(kinds)}, with pauses"
        tables.write_record(record, title, table, summary)
    finish(wrong, "nothing was lost, nothing hung, and every number was right")


@app.command("operations")
def operations_command(
    count: Annotated[
        int, typer.Option(min=1000, help="Number of operations of each rank.")
    ] = 100_000,
    nprocs: Annotated[int, typer.Option("--nproc-per-node", min=2, max=64, help="World size.")] = 2,
    seed: Seed = None,
    limit: Annotated[float, typer.Option(min=1, help="Time limit in seconds.")] = 7200.0,
    record: Record = None,
) -> None:
    """Run small operations of all kinds; memory and descriptors must not grow."""
    seed = choose_seed(seed)
    with Pool(nprocs, [endurance.__name__]) as pool, console.status("running operations"):
        samples = endurance.run(pool, nprocs, seed, count, limit)
    table = tables.build_operations_table(samples)
    console.print(table)
    summary = tables.summarize_operations(samples)
    if record is not None:
        title = f"{count:,} small operations of all kinds on {nprocs} ranks"
        tables.write_record(record, title, table, {"seed": seed, "count": count, **summary})
    wrong = [
        f"rank {rank} has grown by {found['grown']} bytes; more {', '.join(found['more']) or '-'}"
        for rank, found in enumerate(summary["ranks"])
        if not found["flat"]
    ]
    finish(wrong, "memory and descriptors did not grow")


@app.command("training")
def training_command(
    count: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 200,
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Kill and restart training at random moments; it must end like an undisturbed run."""
    seed, trials = choose_seed(seed), []
    with training.TrainingRunner() as runner, console.status("killing") as status:
        while sum(trial.effective_kills for trial in trials) < count:
            trial = runner.run(training.draw(seed, first + len(trials), kills=4))
            trials.append(trial)
            for problem in trial.wrong:
                console.print(f"trial {trial.number}, {trial}:\n  {problem}", markup=False)
            total_kills = sum(trial.effective_kills for trial in trials)
            words = f"{total_kills} of {count} kills, in {len(trials)} runs"
            status.update(words)
            if not console.is_terminal and len(trials) % 10 == 0:
                console.print(words)
    table = tables.build_training_table(summary := tables.summarize_training(trials))
    console.print(table)
    if record is not None:
        title = f"{summary['kills']:,} kills at random moments of runs of {training.EPOCHS} epochs"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    finish(summary["wrong"], "every run ended like an undisturbed run, bit for bit")


@app.command("matrix")
def matrix_command(
    case: Annotated[
        list[str] | None, typer.Option(help="Run only this case; may be repeated.")
    ] = None,
    parallel: Parallel = 2,
    backend: Annotated[
        str, typer.Option(help="phalanx, or gloo for the faults that exist there.")
    ] = "phalanx",
    dumps: Annotated[
        bool, typer.Option("--dumps", help="Read dumps alone, as a watchdog of NCCL makes them.")
    ] = False,
    record: Record = None,
) -> None:
    """Inject faults with a known cause; `phalanx explain` must name ranks, cause and advice."""
    unknown = sorted({*(case or ())} - {*matrix.CASES})
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(matrix.CASES)}")
    is_own = backend == "phalanx"
    existing = [each for each in matrix.CASES.values() if is_own or each.is_general]
    if dumps:  # there is no launcher that could be disturbed
        existing = [each for each in existing if each.disturb is None]
    chosen = [matrix.CASES[name] for name in case] if case else existing
    trials = []
    if dumps and is_own:
        raise typer.BadParameter("dumps are those of another backend: add --backend gloo")
    with TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as executor:
        one_case = partial(matrix.run, folder=Path(folder), backend=backend, uses_dumps=dumps)
        for trial in executor.map(one_case, chosen):
            if trial.precedes_dumps:
                console.print(f"no dumps {trial.case.name}: no group had been formed")
                continue
            trials.append(trial)
            mark = "right" if trial.right else "WRONG"
            console.print(f"{mark} {trial.case.name} ({trial.seconds:.0f} s)", markup=False)
            for problem in trial.wrong:
                console.print(f"  {problem}", markup=False, soft_wrap=True)
    summary = tables.summarize_matrix(trials)
    table = tables.build_matrix_table(summary)
    console.print(table)
    if record is not None:
        source = f"on {backend}, from dumps as NCCL makes them" if dumps else f"on {backend}"
        title = f"{len(trials)} faults {source}: whether explain names ranks, cause and remedy"
        tables.write_record(record, title, table, {"backend": backend, "dumps": dumps, **summary})
    finish(summary["wrong"], "every fault was diagnosed correctly")


@app.command("healthy")
def healthy_command(
    count: Annotated[int, typer.Option(min=1, help="Number of jobs.")] = 20,
    parallel: Parallel = 1,
    seed: Seed = None,
    first: First = 0,
    record: Record = None,
) -> None:
    """Run healthy jobs on Gloo beside busy processes; `phalanx explain` must find no fault."""
    seed, trials = choose_seed(seed), []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(parallel) as executor:
        runs = [healthy.draw(seed, number) for number in range(first, first + count)]
        done = executor.map(partial(healthy.run, folder=Path(folder)), runs)
        for trial in track(
            done, "explaining", count, console=console, disable=not console.is_terminal
        ):
            trials.append(trial)
            for problem in trial.wrong:
                console.print(f"{trial.run}:\n  {problem}", markup=False, soft_wrap=True)
    summary = tables.summarize_healthy(trials)
    table = tables.build_healthy_table(summary)
    console.print(table)
    if record is not None:
        title = f"{count} healthy jobs on Gloo, explained while they ran"
        tables.write_record(record, title, table, {"seed": seed, **summary})
    finish(summary["wrong"], "no fault was found")


def parse_range(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or not 2 <= int(found[1]) <= int(found[2] or found[1]) <= 64:
        raise typer.BadParameter(f"{text!r}: expected a number of ranks or a range such as 2-8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def choose_seed(seed: int | None) -> int:
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed}")
    return seed


def track_numbers(first: int, count: int, title: str) -> Iterator[int]:
    quiet = not console.is_terminal
    yield from track(range(first, first + count), title, console=console, disable=quiet)


def report_trial(trial: T) -> T:
    """Print the failures of a trial, and how to repeat it."""
    found: Any = trial
    names = {kills.Trial: "kill", shrinks.Trial: "shrinking", desyncs.Trial: "desync"}
    for problem in found.wrong:
        drawn = getattr(found, names[type(found)])
        console.print(f"trial {drawn.number}, {drawn}:\n  {problem}", markup=False, soft_wrap=True)
    return trial


def finish(wrong: list[str], words: str) -> None:
    if wrong:
        last = "\n  ".join(wrong[-20:])
        console.print(f"[red]{len(wrong)} failures[/]; the last ones:", soft_wrap=True)
        console.print(f"  {last}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"[green]{words}[/]")


if __name__ == "__main__":
    app()
