"""Kills: a random rank dies at a random moment in random operations; its peers must name it.

The measured time starts with the victim's last instruction, which writes the clock into shared
memory, or right before `os.kill`. It ends when a survivor has caught the exception.
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

from tests.fault_injection import calls
from tests.fault_injection.leaks import Resources, settled_resources
from tests.fault_injection.pool import Answer, Fatal, Pool, TrialRank

# Number of prepared calls, which the ranks make in a loop.
CYCLE = 6
# Timeout of a group in seconds; no rank may reach it.
TIMEOUT = 20.0
# Bytes by which a survivor may grow after its first trial. Calls need different amounts; their
# largest buffers take 20 MiB.
MOST_GROWTH = 32 * 2**20

MOMENTS = ("between operations", "in its own code", "in operations", "from outside")


def _segfault() -> None:
    ctypes.string_at(0)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: type[Exception]) -> Callable[[], None]:
    def raise_it() -> NoReturn:
        raise Fatal(error("injected"))

    return raise_it


# The action that ends the victim, and the expected description if survivors can know it.
METHODS: dict[str, tuple[Callable[[], object], str]] = {
    "SIGKILL": (_signal(signal.SIGKILL), "was killed by SIGKILL"),
    "SIGTERM": (_signal(signal.SIGTERM), "was killed by SIGTERM"),
    "SIGSEGV": (_segfault, "was killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(7), "exited with code 7"),
    "exception": (_raise(RuntimeError), "failed with RuntimeError"),
    "MemoryError": (_raise(MemoryError), "failed with MemoryError"),
}
# An exception ends a process only in the main thread, and SIGSEGV is not sent from outside.
_METHODS_OF_THREADS = ("SIGKILL", "SIGTERM", "SIGSEGV", "os._exit")
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


@dataclass(frozen=True)
class Kill:
    """A trial, drawn from its `seed`."""

    number: int
    seed: str
    ranks: int
    victim: int
    moment: str
    method: str
    step: int
    """Index of the call before or after which the victim dies."""
    delay: float
    """Seconds between reaching the call and dying."""
    groups: int
    """Number of groups of all ranks among which the calls are distributed."""

    def __str__(self) -> str:
        groups = f", in {self.groups} groups" if self.groups > 1 else ""
        return (
            f"rank {self.victim} of {self.ranks} dies by {self.method} {self.moment}, "
            f"{self.delay * 1e3:.1f} ms after call {self.step}{groups}"
        )


def draw(seed: int, number: int, least: int, most: int) -> Kill:
    """Draw trial `number` of a seed, on `least` to `most` ranks."""
    text = f"{seed} kill {number}"
    random = Random(text)
    ranks = random.randint(least, most)
    moment = random.choice(MOMENTS)
    methods: tuple[str, ...] = tuple(METHODS)
    if moment == "in operations":
        methods = _METHODS_OF_THREADS
    elif moment == "from outside":
        methods = tuple(_SIGNALS)
    return Kill(
        number,
        text,
        ranks,
        random.randrange(ranks),
        moment,
        random.choice(methods),
        random.randrange(3 * CYCLE),
        0.0 if moment == MOMENTS[0] else random.uniform(0, 0.03),
        random.choice((1, 1, 2)),
    )


class SharedPage:
    """A memory page shared with the ranks: whether the victim reached its step, and its death."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("fault-page", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self.address = os.getpid(), descriptor
        self._words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")

    def clear(self) -> None:
        for word in range(len(self._words)):
            self._words[word] = 0

    def wait(self, seconds: float) -> None:
        """Block until the victim has reached its step."""
        deadline = time.monotonic() + seconds
        while not self._words[0] and time.monotonic() < deadline:
            time.sleep(0.0005)

    def die(self) -> None:
        self._words[1] = time.monotonic_ns()

    @property
    def death(self) -> int:
        """The time of death in monotonic nanoseconds; 0 if no rank died."""
        return self._words[1]

    def death_of(self, rank: int) -> int:
        """The time at which a rank of many died, of which each has a word of its own."""
        return self._words[2 + rank]


@contextmanager
def open_page(address: tuple[int, int]) -> Iterator[memoryview]:
    """Map the page in a rank."""
    pid, descriptor = address
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        pages = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    words = memoryview(pages).cast("q")
    try:
        yield words
    finally:
        words.release()
        pages.close()


@dataclass(frozen=True)
class CaughtError:
    """The exception that a survivor caught, and its resources."""

    time: int
    """Monotonic nanoseconds."""
    error: str
    text: str
    call: str
    leave_seconds: float
    """Seconds it took to leave the group."""
    first_resources: Resources
    """Resources after the first trial of this process."""
    resources: Resources
    """Resources after this trial."""


_first_resources: list[Resources] = []


def run_rank(trial_rank: TrialRank, kill: Kill, page: tuple[int, int], backend: str) -> CaughtError:
    """Make the same calls on each rank until one dies."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    trial_rank.form(backend, TIMEOUT)
    with open_page(page) as words:
        result = _run_until_death(trial_rank, kill, words, backend)
    start = time.monotonic()
    dist.destroy_process_group()
    leave_seconds = time.monotonic() - start
    resources = settled_resources(_first_resources[0] if _first_resources else None)
    if not _first_resources:
        _first_resources.append(resources)
    return CaughtError(*result, leave_seconds, _first_resources[0], resources)


def _run_until_death(
    trial_rank: TrialRank, kill: Kill, words: memoryview, backend: str
) -> tuple[int, str, str, str]:
    random, step = Random(kill.seed), 0
    groups: list[Any] = [dist.group.WORLD]
    groups += [dist.new_group() for _ in range(kill.groups - 1)]
    drawn = [_draw_call(random, kill.ranks, backend, tag) for tag in range(CYCLE)]
    ready = [calls.PreparedCall(call, random.choice(groups)) for call in drawn]
    try:
        while True:
            if trial_rank.rank == kill.victim and step == kill.step:
                _die_as_planned(kill, words)
            ready[step % CYCLE].run()
            step += 1
    except Fatal:
        raise
    except Exception as error:
        caught = time.monotonic_ns()
        name = type(error).__name__
        return caught, name, str(error), str(drawn[step % CYCLE])


def _draw_call(random: Random, ranks: int, backend: str, tag: int) -> calls.Call:
    if backend == "phalanx":
        return calls.draw(random, ranks, tag=tag)
    call = calls.draw(random, ranks, calls.ON_GLOO, tag)
    mode = "work" if call.kind in calls.MESSAGES else call.mode
    return dataclasses.replace(call, dtype="float32", reduction="SUM", mode=mode)


def _die_as_planned(kill: Kill, words: memoryview) -> None:
    def die() -> None:
        words[1] = time.monotonic_ns()
        METHODS[kill.method][0]()

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
    """A kill and its results."""

    kill: Kill
    times: list[float] = field(default_factory=list)
    """Seconds from the death to the exception of each survivor."""
    named: int = 0
    """Number of survivors that named the rank and the pid."""
    explained: int = 0
    """Number of survivors that described how the victim died."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of failures."""
    growth: int = 0
    """The largest growth of a survivor in bytes since its first trial."""


def run(pool: Pool, kill: Kill, page: SharedPage, backend: str) -> Trial:
    """Run a trial, then replace the ranks that died."""
    page.clear()
    pids = [pool.pid(rank) for rank in range(kill.ranks)]
    pool.begin(kill.ranks, run_rank, kill, page.address, backend)
    if kill.moment == "from outside":
        page.wait(TIMEOUT)
        time.sleep(kill.delay)
        page.die()
        os.kill(pids[kill.victim], _SIGNALS[kill.method])
    answers = pool.finish(kill.ranks, TIMEOUT + 10)
    trial = Trial(kill)
    for rank, answer in enumerate(answers):
        if rank != kill.victim:
            judge(trial, rank, answer, pids[kill.victim], page.death, backend)
            if not isinstance(answer.value, CaughtError):
                ended = pool.replace(rank, has_died=not answer.hung)
                trial.wrong.append(f"rank {rank}: {answer.error or ended}")
    ended = pool.replace(kill.victim, has_died=True)
    if ended.hung or not page.death:
        trial.wrong.append(f"the victim did not die: {answers[kill.victim].value or ended}")
    return trial


def judge(trial: Trial, rank: int, answer: Answer, pid: int, death: int, backend: str) -> None:
    """Check the answer of one survivor."""
    caught = answer.value
    if not isinstance(caught, CaughtError) or not death:
        return
    growth = caught.resources.resident - caught.first_resources.resident
    trial.times.append((caught.time - death) / 1e9)
    trial.growth = max(trial.growth, growth)
    victim = f"rank {trial.kill.victim} (pid {pid})"
    named = caught.error == "PeerLost" and victim in caught.text
    trial.named += named
    trial.explained += METHODS[trial.kill.method][1] in caught.text
    if backend != "phalanx":
        return
    wrong = [] if named else [f"does not name {victim}"]
    killed = re.search(r"was killed by \w+|exited with code \d+", caught.text)
    if killed and killed[0] != METHODS[trial.kill.method][1] and "Error" not in trial.kill.method:
        wrong.append(f"it died by {trial.kill.method}")
    if more := caught.resources.exceeds(caught.first_resources):
        wrong.append(f"holds more {', '.join(more)} than after its first trial")
    if growth > MOST_GROWTH:
        wrong.append(f"has grown by {growth >> 20} MiB since its first trial")
    if caught.leave_seconds > 3:
        wrong.append(f"took {caught.leave_seconds:.1f} s to leave the group")
    if wrong:
        description = f"rank {rank} in {caught.call}: {caught.error}: {caught.text}"
        trial.wrong.append(f"{description}\n    {'; '.join(wrong)}")
