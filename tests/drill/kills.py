"""Deaths: a random rank dies at a random moment of random operations, and the others must say so.

The time counts from the last instruction of the victim, which writes the clock into shared memory
right before it ends, or from before `os.kill`; to the moment at which a survivor has caught the
exception.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.drill import calls
from tests.drill.leaks import Holdings, settled
from tests.drill.pool import Answer, Fatal, Place, Pool

# Prepared calls, which the ranks make one after another, over and over.
CYCLE = 6
# Seconds of a group's timeout: nobody may come to it.
TIMEOUT = 20.0
# Bytes by which a survivor may grow after its first trial. Calls differ in what they need; their
# largest buffers have twenty MiB.
MOST_GROWTH = 32 * 2**20

MOMENTS = ("between operations", "in its own code", "in operations", "from outside")


def _fault() -> None:
    ctypes.string_at(0)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: type[Exception]) -> Callable[[], None]:
    def raise_it() -> NoReturn:
        raise Fatal(error("the drill's"))

    return raise_it


# What ends the victim, and how it must be called where it can be known.
WAYS: dict[str, tuple[Callable[[], object], str]] = {
    "SIGKILL": (_signal(signal.SIGKILL), "was killed by SIGKILL"),
    "SIGTERM": (_signal(signal.SIGTERM), "was killed by SIGTERM"),
    "SIGSEGV": (_fault, "was killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(7), "exited with code 7"),
    "exception": (_raise(RuntimeError), "failed with RuntimeError"),
    "MemoryError": (_raise(MemoryError), "failed with MemoryError"),
}
# Exceptions end a process in its main thread alone, and nobody sends a fault.
_IN_A_THREAD = ("SIGKILL", "SIGTERM", "SIGSEGV", "os._exit")
_SENT = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


@dataclass(frozen=True)
class Kill:
    """One trial, drawn from its `seed`."""

    number: int
    seed: str
    ranks: int
    victim: int
    moment: str
    way: str
    step: int
    """The call before which, or from which on, it dies; counted from 0."""
    delay: float
    """Seconds that it still has then."""
    groups: int
    """The calls are made in so many groups of all ranks by turns."""

    def __str__(self) -> str:
        groups = f", in {self.groups} groups" if self.groups > 1 else ""
        return (
            f"rank {self.victim} of {self.ranks} dies by {self.way} {self.moment}, "
            f"{self.delay * 1e3:.1f} ms after call {self.step}{groups}"
        )


def draw(seed: int, number: int, least: int, most: int) -> Kill:
    """Trial `number` of a seed, on `least` to `most` ranks."""
    text = f"{seed} kill {number}"
    random = Random(text)
    ranks = random.randint(least, most)
    moment = random.choice(MOMENTS)
    ways: tuple[str, ...] = tuple(WAYS)
    if moment == "in operations":
        ways = _IN_A_THREAD
    elif moment == "from outside":
        ways = tuple(_SENT)
    return Kill(
        number,
        text,
        ranks,
        random.randrange(ranks),
        moment,
        random.choice(ways),
        random.randrange(3 * CYCLE),
        0.0 if moment == MOMENTS[0] else random.uniform(0, 0.03),
        random.choice((1, 1, 2)),
    )


class Board:
    """A page that the runner and the ranks share: has the victim come to its step, when it died."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("drill-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self.place = os.getpid(), descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    def clear(self) -> None:
        self._words[0] = self._words[1] = 0

    def wait(self, seconds: float) -> None:
        """Block until the victim has come to its step."""
        deadline = time.monotonic() + seconds
        while not self._words[0] and time.monotonic() < deadline:
            time.sleep(0.0005)

    def die(self) -> None:
        self._words[1] = time.monotonic_ns()

    @property
    def death(self) -> int:
        """Monotonic nanoseconds; 0 if nobody died."""
        return self._words[1]


@contextmanager
def opened(place: tuple[int, int]) -> Iterator[memoryview]:
    """The board, in a rank."""
    pid, descriptor = place
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        pages = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    words = memoryview(pages).cast("q")
    try:
        yield words
    finally:
        words.release()
        pages.close()


@dataclass(frozen=True)
class Caught:
    """What a survivor saw."""

    time: int
    """Monotonic nanoseconds."""
    error: str
    text: str
    call: str
    left: float
    """Seconds that leaving the group took."""
    held: Holdings
    """When the first trial of this process had ended, and now."""
    holds: Holdings


_first: list[Holdings] = []


def rank_of(place: Place, kill: Kill, board: tuple[int, int], backend: str) -> Caught:
    """What each rank runs: the same calls, until somebody dies."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    place.form(backend, TIMEOUT)
    with opened(board) as words:
        seen = _until_death(place, kill, words, backend)
    start = time.monotonic()
    dist.destroy_process_group()
    left = time.monotonic() - start
    now = settled(_first[0] if _first else None)
    if not _first:
        _first.append(now)
    return Caught(*seen, left, _first[0], now)


def _until_death(
    place: Place, kill: Kill, words: memoryview, backend: str
) -> tuple[int, str, str, str]:
    random, step = Random(kill.seed), 0
    groups: list[Any] = [dist.group.WORLD]
    groups += [dist.new_group() for _ in range(kill.groups - 1)]
    drawn = [_drawn(random, kill.ranks, backend, tag) for tag in range(CYCLE)]
    ready = [calls.Prepared(call, random.choice(groups)) for call in drawn]
    try:
        while True:
            if place.rank == kill.victim and step == kill.step:
                _meet_death(kill, words)
            ready[step % CYCLE].run()
            step += 1
    except Fatal:
        raise
    except Exception as error:
        caught = time.monotonic_ns()
        name = type(error).__name__
        return caught, name, str(error), str(drawn[step % CYCLE])


def _drawn(random: Random, ranks: int, backend: str, tag: int) -> calls.Call:
    if backend == "phalanx":
        return calls.draw(random, ranks, tag=tag)
    call = calls.draw(random, ranks, calls.ON_GLOO, tag)
    way = "work" if call.kind in calls.MESSAGES else call.way
    return dataclasses.replace(call, dtype="float32", reduction="SUM", way=way)


def _meet_death(kill: Kill, words: memoryview) -> None:
    def die() -> None:
        words[1] = time.monotonic_ns()
        WAYS[kill.way][0]()

    def later() -> None:
        time.sleep(kill.delay)
        die()

    words[0] = 1
    if kill.moment == "in operations":
        threading.Thread(target=later, daemon=True).start()
    elif kill.moment != "from outside":
        end = time.monotonic() + kill.delay
        while time.monotonic() < end:
            torch.ones(1000).sum()
        die()


@dataclass
class Trial:
    """A kill, and what came of it."""

    kill: Kill
    times: list[float] = field(default_factory=list)
    """Seconds from the death to the exception, by survivor."""
    named: int = 0
    """Survivors that named rank and pid."""
    explained: int = 0
    """Survivors that said how the victim died."""
    wrong: list[str] = field(default_factory=list)
    """What was not as it must be."""
    growth: int = 0
    """The most bytes by which a survivor has grown since its first trial."""


def run(pool: Pool, kill: Kill, board: Board, backend: str) -> Trial:
    """Carry out one trial; afterwards the pool is whole again."""
    board.clear()
    pids = [pool.pid(rank) for rank in range(kill.ranks)]
    pool.begin(kill.ranks, rank_of, kill, board.place, backend)
    if kill.moment == "from outside":
        board.wait(TIMEOUT)
        time.sleep(kill.delay)
        board.die()
        os.kill(pids[kill.victim], _SENT[kill.way])
    answers = pool.finish(kill.ranks, TIMEOUT + 10)
    trial = Trial(kill)
    for rank, answer in enumerate(answers):
        if rank != kill.victim:
            judge(trial, rank, answer, pids[kill.victim], board.death, backend)
            if not isinstance(answer.value, Caught):
                ended = pool.replace(rank, dead=not answer.hung)
                trial.wrong.append(f"rank {rank}: {answer.error or ended}")
    ended = pool.replace(kill.victim, dead=True)
    if ended.hung or not board.death:
        trial.wrong.append(f"the victim didn't die: {answers[kill.victim].value or ended}")
    return trial


def judge(trial: Trial, rank: int, answer: Answer, pid: int, death: int, backend: str) -> None:
    """Look at what one survivor says."""
    caught = answer.value
    if not isinstance(caught, Caught) or not death:
        return
    grown = caught.holds.resident - caught.held.resident
    trial.times.append((caught.time - death) / 1e9)
    trial.growth = max(trial.growth, grown)
    victim = f"rank {trial.kill.victim} (pid {pid})"
    named = caught.error == "PeerLost" and victim in caught.text
    trial.named += named
    trial.explained += WAYS[trial.kill.way][1] in caught.text
    if backend != "phalanx":
        return
    wrong = [] if named else [f"doesn't name {victim}"]
    killed = re.search(r"was killed by \w+|exited with code \d+", caught.text)
    if killed and killed[0] != WAYS[trial.kill.way][1] and "Error" not in trial.kill.way:
        wrong.append(f"it died by {trial.kill.way}")
    if more := caught.holds.exceeds(caught.held):
        wrong.append(f"holds more {', '.join(more)} than after its first trial")
    if grown > MOST_GROWTH:
        wrong.append(f"has grown by {grown >> 20} MiB since its first trial")
    if caught.left > 3:
        wrong.append(f"took {caught.left:.1f} s to leave the group")
    if wrong:
        what = f"rank {rank} in {caught.call}: {caught.error}: {caught.text}"
        trial.wrong.append(f"{what}\n    {'; '.join(wrong)}")
