"""The command line: `make soak`, or `python -m tests.soak --help`."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import phalanx
from phalanx.errors import LaunchError
from tests.soak.plan import WEIGHTS, Plan

if TYPE_CHECKING:
    from tests.soak.rank import Summary

ROOT = Path(__file__).parents[2]
console = Console(highlight=False)


def run_rank(plan: Plan, first: int, count: int, timeout: float, board: str) -> Summary:
    """Run a plan on one rank."""
    import torch.distributed as dist

    from tests.soak.rank import soak

    dist.init_process_group("phalanx", timeout=timedelta(seconds=timeout))
    positions = np.memmap(board, np.int64, "r+", shape=(plan.ranks,))
    rank = dist.get_rank()
    result = soak(plan, first, count, timeout, lambda number: positions.__setitem__(rank, number))
    dist.destroy_process_group()
    return result


class ProgressBoard:
    """Shared memory in which each rank writes the number of its current operation."""

    def __init__(self, folder: str, nprocs: int, first: int) -> None:
        self.path = str(Path(folder, "board"))
        self._positions = np.memmap(self.path, np.int64, "w+", shape=(nprocs,))
        self._positions[:] = first

    def slowest(self) -> int:
        return int(self._positions.min())

    def describe(self, plan: Plan) -> str:
        lines = [
            f"  rank {rank}: {n}: {plan.operation(int(n))}"
            for rank, n in enumerate(self._positions)
        ]
        return "\n".join(lines)


@contextmanager
def show_progress(board: ProgressBoard, title: str, first: int, count: int) -> Iterator[None]:
    """Show a progress bar for the slowest rank."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    remaining, is_quiet = TimeRemainingColumn(), not console.is_terminal
    with Progress(*columns, remaining, console=console, transient=True, disable=is_quiet) as bar:
        task, ended = bar.add_task(title, total=count), threading.Event()

        def follow() -> None:
            while not ended.wait(0.2):
                bar.update(task, completed=board.slowest() - first)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def run(plan: Plan, first: int, count: int, timeout: float, limit: float) -> bool:
    """Run the operations for one world size and print the result; return whether all were right."""
    title = f"{plan.ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        board = ProgressBoard(folder, plan.ranks, first)
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            with show_progress(board, title, first, count):
                results = phalanx.launch(
                    run_rank,
                    plan.ranks,
                    (plan, first, count, timeout, board.path),
                    timeout=limit,
                    env=env,
                )
        except LaunchError as error:
            console.print(f"[red]{title}[/]: failed")
            console.print(str(error.__cause__ or error), markup=False, soft_wrap=True)
            console.print(
                f"the last operation that each rank began:\n{board.describe(plan)}", markup=False
            )
            return False
    done, seconds = results[0].operations, max(result.seconds for result in results)
    checked = sum(result.checked for result in results)
    console.print(
        f"[green]{title}[/]: {done:,} operations in {seconds:.1f} s, "
        f"{done / seconds:,.0f} a second, {checked:.1f} GiB checked"
    )
    return True


def parse_range(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise typer.BadParameter(f"{text!r}: expected a number of ranks or a range such as 2-8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def parse_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(filter(None, text.split(",")))
    if wrong := [kind for kind in kinds if kind not in WEIGHTS]:
        raise typer.BadParameter(
            f"{', '.join(wrong)}: expected one or several of {', '.join(WEIGHTS)}"
        )
    return kinds


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    operations: Annotated[
        int, typer.Option(min=1, help="Number of operations, divided among the world sizes.")
    ] = 20_000,
    nprocs: Annotated[
        str,
        typer.Option("--nproc-per-node", help="World sizes, such as 2-8, run one after another."),
    ] = "2-8",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the plan; a random one by default.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="Number of the first operation.")] = 0,
    kinds: Annotated[
        str, typer.Option(help="Kinds to run, separated by commas; all by default.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1, help="Timeout of an operation in seconds.")
    ] = 60.0,
    limit: Annotated[
        float, typer.Option(min=1, help="Time limit of each world size in seconds.")
    ] = 3600.0,
) -> None:
    """Run random operations on real ranks and check every result.

    The exit code is 1 if a result is wrong; the message names the operation and how to repeat it.
    """
    sizes, selected = parse_range(nprocs), parse_kinds(kinds)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed}: {operations:,} operations, {nprocs} ranks")
    for index, size in enumerate(sizes):
        share = operations // len(sizes) + (index < operations % len(sizes))
        if share and not run(Plan(seed, size, selected), first, share, timeout, limit):
            raise typer.Exit(1)
    console.print("[green]every result was right[/]")


if __name__ == "__main__":
    app()
