"""Interleaved measurement: the processes of one system run while those of all others are stopped.

TensorPipe's threads never sleep: an idle process of `torch.distributed.rpc` keeps one core busy. So
systems cannot be compared in the same processes, or while both run. Each system has its own
processes, which are started once and stopped by SIGSTOP while it is not measured.
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

_ROUND_SECONDS = 300
_EXIT_SECONDS = 20


class Team:
    """The processes of one system; the first process controls the others.

    Args:
        name: The name of the system.
        work: The function that each process calls with its rank and a folder for its rendezvous.
            The first process also gets an iterator over the rounds and a function that reports the
            duration of a round.
        size: The number of processes.
        options: More arguments for `work`.
    """

    def __init__(
        self, name: str, work: Callable[..., None], size: int, options: tuple[Any, ...] = ()
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        self._processes = [
            context.Process(
                target=_run,
                args=(work, rank, self._folder.name, worker_pipe if rank == 0 else None, options),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._receive()
        self._send_signal(signal.SIGSTOP)

    def run_round(self) -> Any:
        """Run one round with all processes running; return the result of the first process."""
        self._send_signal(signal.SIGCONT)
        self._pipe.send(True)
        try:
            return self._receive()
        finally:
            self._send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """Stop all processes."""
        with contextlib.suppress(OSError):
            self._send_signal(signal.SIGCONT)
            self._pipe.send(False)
            for process in self._processes:
                process.join(_EXIT_SECONDS)
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def _receive(self) -> Any:
        try:
            if self._pipe.poll(_ROUND_SECONDS):
                return self._pipe.recv()
        except EOFError:
            sys.exit(f"{self.name}: its first process has exited")
        sys.exit(f"{self.name} did not answer within {_ROUND_SECONDS} s")

    def _send_signal(self, number: int) -> None:
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

    warnings.simplefilter("ignore")  # deprecation warnings of PyTorch
    if pipe is None:
        work(rank, folder, None, None, *options)
    else:
        work(rank, folder, rounds(), pipe.send, *options)


def compare(teams: list[Team], rounds: int, description: str) -> dict[str, Timing]:
    """Run all teams in turn, after two warm-up rounds; return the seconds of each."""
    times: dict[str, list[float]] = {team.name: [] for team in teams}
    try:
        with Progress(transient=True) as progress:
            for number in progress.track(range(-2, rounds), description=description):
                for team in teams if number % 2 else teams[::-1]:
                    seconds = team.run_round()
                    if number >= 0:
                        times[team.name].append(seconds)
    finally:
        for team in teams:
            team.close()
    return {name: Timing.of(seconds) for name, seconds in times.items()}


def format_timings(times: dict[str, Timing]) -> str:
    """Format all timings in a line, each with its ratio to the first."""
    first = next(iter(times.values()))
    parts = [
        f"{name} {each.median * 1e6:.0f} us ({each.low * 1e6:.0f} to {each.high * 1e6:.0f})"
        + (f", {each.median / first.median:.2f} times" if each is not first else "")
        for name, each in times.items()
    ]
    return "; ".join(parts)


def measure_median(call: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    """Return the median duration of `count` calls, in seconds."""
    seconds = []
    for _ in range(count):
        start = clock()
        call()
        seconds.append(clock() - start)
    return statistics.median(seconds)
