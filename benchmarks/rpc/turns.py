"""Systems that take turns: the processes of one run while those of all others are stopped.

TensorPipe's threads never sleep: a process of `torch.distributed.rpc` that does nothing takes one
core for itself. So systems can't be compared in the same processes, nor beside each other. Each has
processes of its own, started once, and stopped by SIGSTOP while it isn't measured.
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from typing import Any

from rich.progress import Progress

from phalanx.bench.results import Timing

_SECONDS = 300
_END_SECONDS = 20


class Team:
    """The processes of one system; the first of them drives.

    Args:
        name: The system's.
        work: What each process does: called with its rank, a folder for its rendezvous, and, in
            the first, an iterator of the rounds and a function to say what one took.
        size: How many processes there are.
        options: More arguments for it.
    """

    def __init__(
        self, name: str, work: Callable[..., None], size: int, options: tuple[Any, ...] = ()
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._processes = [
            context.Process(
                target=_run,
                args=(work, rank, self._folder.name, theirs if rank == 0 else None, options),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._said()
        self._signal(signal.SIGSTOP)

    def turn(self) -> Any:
        """One round of it, with all its processes running; what the first one says of it."""
        self._signal(signal.SIGCONT)
        self._ours.send(True)
        try:
            return self._said()
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._signal(signal.SIGCONT)
            self._ours.send(False)
            for process in self._processes:
                process.join(_END_SECONDS)
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def _said(self) -> Any:
        try:
            if self._ours.poll(_SECONDS):
                return self._ours.recv()
        except EOFError:
            sys.exit(f"{self.name}: its first process has ended")
        sys.exit(f"{self.name} didn't answer within {_SECONDS} s")

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)


def _run(
    work: Callable[..., None], rank: int, folder: str, pipe: Any, options: tuple[Any, ...]
) -> None:
    def rounds() -> Iterable[None]:
        pipe.send("ready")
        while pipe.recv():
            yield

    warnings.simplefilter("ignore")  # PyTorch's of its own future
    if pipe is None:
        work(rank, folder, None, None, *options)
    else:
        work(rank, folder, rounds(), pipe.send, *options)


def compare(teams: list[Team], rounds: int, what: str) -> dict[str, Timing]:
    """Let all have their turns, after two to warm up; seconds of each."""
    times: dict[str, list[float]] = {team.name: [] for team in teams}
    try:
        with Progress(transient=True) as progress:
            for number in progress.track(range(-2, rounds), description=what):
                for team in teams if number % 2 else teams[::-1]:
                    seconds = team.turn()
                    if number >= 0:
                        times[team.name].append(seconds)
    finally:
        for team in teams:
            team.end()
    return {name: Timing.of(seconds) for name, seconds in times.items()}


def said(times: dict[str, Timing]) -> str:
    """All of them in a line, and how many times faster than each the first one is."""
    first = next(iter(times.values()))
    words = [
        f"{name} {each.median * 1e6:.0f} us ({each.low * 1e6:.0f} to {each.high * 1e6:.0f})"
        + (f", {each.median / first.median:.2f} times" if each is not first else "")
        for name, each in times.items()
    ]
    return "; ".join(words)


def median_of(once: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    """The median of so many calls, in seconds."""
    taken = []
    for _ in range(count):
        begun = clock()
        once()
        taken.append(clock() - begun)
    return statistics.median(taken)
