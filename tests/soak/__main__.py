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


def work(plan: Plan, first: int, count: int, timeout: float, board: str) -> Summary:
    """What each rank runs."""
    import torch.distributed as dist

    from tests.soak.rank import soak

    dist.init_process_group("phalanx", timeout=timedelta(seconds=timeout))
    at = np.memmap(board, np.int64, "r+", shape=(plan.ranks,))
    rank = dist.get_rank()
    result = soak(plan, first, count, timeout, lambda number: at.__setitem__(rank, number))
    dist.destroy_process_group()
    return result


class Board:
    """Where each rank writes which operation it is in, for those who watch."""

    def __init__(self, folder: str, ranks: int, first: int) -> None:
        self.path = str(Path(folder, "board"))
        self._at = np.memmap(self.path, np.int64, "w+", shape=(ranks,))
        self._at[:] = first

    def slowest(self) -> int:
        return int(self._at.min())

    def words(self, plan: Plan) -> str:
        lines = [f"  rank {rank}: {n}: {plan.operation(int(n))}" for rank, n in enumerate(self._at)]
        return "\n".join(lines)


@contextmanager
def progress(board: Board, title: str, first: int, count: int) -> Iterator[None]:
    """A bar that follows the slowest rank."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    left, quiet = TimeRemainingColumn(), not console.is_terminal
    with Progress(*columns, left, console=console, transient=True, disable=quiet) as bar:
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
    """Soak one world; prints a line, or what went wrong."""
    title = f"{plan.ranks} ranks"
    with tempfile.TemporaryDirectory() as folder:
        board = Board(folder, plan.ranks, first)
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            with progress(board, title, first, count):
                results = phalanx.launch(
                    work,
                    plan.ranks,
                    (plan, first, count, timeout, board.path),
                    timeout=limit,
                    env=env,
                )
        except LaunchError as error:
            console.print(f"[red]{title}[/]: failed")
            console.print(str(error.__cause__ or error), markup=False, soft_wrap=True)
            console.print(
                f"the last operation that each rank began:\n{board.words(plan)}", markup=False
            )
            return False
    done, seconds = results[0].operations, max(result.seconds for result in results)
    checked = sum(result.checked for result in results)
    console.print(
        f"[green]{title}[/]: {done:,} operations in {seconds:.1f} s, "
        f"{done / seconds:,.0f} a second, {checked:.1f} GiB checked"
    )
    return True


def range_of(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise typer.BadParameter(f"{text!r}: expected a number of ranks or a range, as 2-8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def kinds_of(text: str) -> tuple[str, ...]:
    kinds = tuple(filter(None, text.split(",")))
    if wrong := [kind for kind in kinds if kind not in WEIGHTS]:
        raise typer.BadParameter(f"{', '.join(wrong)}: expected some of {', '.join(WEIGHTS)}")
    return kinds


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    operations: Annotated[
        int, typer.Option(min=1, help="How many, shared out over the world sizes.")
    ] = 20_000,
    ranks: Annotated[str, typer.Option(help="World sizes, one after another.")] = "2-8",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of everything random; a fresh one if not given.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="The number to begin with.")] = 0,
    kinds: Annotated[
        str, typer.Option(help="Only these, with commas between; the rest is skipped.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that an operation may wait for other ranks.")
    ] = 60.0,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds that one world size may take in all.")
    ] = 3600.0,
) -> None:
    """Run random operations on real ranks and check every result.

    The exit code is 1 if something is wrong: the message names the operation and what repeats it.
    """
    sizes, only = range_of(ranks), kinds_of(kinds)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed}: {operations:,} operations, {ranks} ranks")
    for index, size in enumerate(sizes):
        share = operations // len(sizes) + (index < operations % len(sizes))
        if share and not run(Plan(seed, size, only), first, share, timeout, limit):
            raise typer.Exit(1)
    console.print("[green]every result was right[/]")


if __name__ == "__main__":
    app()
