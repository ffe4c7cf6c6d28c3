"""A rank dies: PeerLost on all others within a second, saying who, and how it ended.

The second counts from just before the signal is sent to the moment at which the exception is
caught; where a process ends by itself, from its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import PeerLost
from tests.ranks import Ended, RankServer

LARGE = 16 * 2**20  # float32: 64 MiB
VICTIM = 1


def gathered(size: int) -> list[Tensor]:
    return [torch.zeros(size) for _ in range(dist.get_world_size())]


def wait_for_future() -> None:
    dist.all_reduce(torch.zeros(10), async_op=True).get_future().wait()


# Every rank runs these in a loop, so that the victim dies in the middle of one.
LOOPS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.zeros(10)),
    "large all_reduce": lambda: dist.all_reduce(torch.zeros(LARGE)),
    "broadcast": lambda: dist.broadcast(torch.zeros(10), VICTIM),
    "large broadcast": lambda: dist.broadcast(torch.zeros(LARGE), 0),
    "reduce": lambda: dist.reduce(torch.zeros(10), 0),
    "large all_gather": lambda: dist.all_gather(gathered(500_000), torch.zeros(500_000)),
    "barrier": lambda: dist.barrier(),
    "work": lambda: dist.all_reduce(torch.zeros(10), async_op=True).wait(),
    "future": wait_for_future,
}
# These the others do once, and the victim doesn't take part.
WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.zeros(10)),
    "barrier": lambda: dist.barrier(),
    "recv": lambda: dist.recv(torch.zeros(10), VICTIM),
    "irecv": lambda: dist.irecv(torch.zeros(10), VICTIM).wait(),
    "irecv's future": lambda: dist.irecv(torch.zeros(10), VICTIM).get_future().wait(),
    "recv from any": lambda: dist.recv(torch.zeros(10)),
    "large send": lambda: dist.send(torch.zeros(LARGE), VICTIM),
    "large isend": lambda: dist.isend(torch.zeros(LARGE), VICTIM).wait(),
    "work": lambda: dist.all_reduce(torch.zeros(10), async_op=True).wait(),
    "future": wait_for_future,
}
ENDINGS: dict[str, tuple[Callable[[], object], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    "_exit": (lambda: os._exit(3), "exited with code 3"),
}


def end_now(ending: str) -> None:
    Path(os.environ["FOLDER"], "end").write_text(repr(time.monotonic()))
    ENDINGS[ending][0]()


def die_in_a_loop(operation: str, delay: float) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        threading.Timer(delay, end_now, ["SIGKILL"]).start()
    while True:
        LOOPS[operation]()


def die_while_others_wait(operation: str, ending: str, delay: float) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        time.sleep(delay)  # lets the others get further or less far into it
        end_now(ending)
    WAITS[operation]()


def check(ended: list[Ended], words: str, end: float) -> None:
    victim = ended[VICTIM]
    for rank in ended:
        if rank is victim:
            continue
        assert isinstance(rank.error, PeerLost), rank.report()
        assert f"rank {VICTIM} (pid {victim.pid}) {words}" in str(rank.error), rank.report()
        assert f"[rank {rank.rank}/{len(ended)} on " in str(rank.error)
        assert "test_death.py:" in str(rank.error)
        assert rank.error_time - end < 1.0
        assert rank.code == 1


def end_of(folder: Path) -> float:
    return float((folder / "end").read_text())


# Delays after which it dies: before the others have come, while they come, and in the middle.
@pytest.mark.parametrize("delay", (0.0, 0.005, 0.05))
@pytest.mark.parametrize("operation", LOOPS)
def test_killed_in_the_middle(ranks: RankServer, operation: str, delay: float) -> None:
    run = ranks.start(3, die_in_a_loop, operation, delay)
    check(run.join(30), "was killed by SIGKILL", end_of(run.folder))


@pytest.mark.parametrize("operation", WAITS)
def test_killed_while_others_wait(ranks: RankServer, operation: str) -> None:
    # Everybody but the victim must wait for the victim, so two ranks where others could send.
    size = 2 if operation == "recv from any" else 3
    run = ranks.start(size, die_while_others_wait, operation, "SIGKILL", 0.02)
    check(run.join(30), "was killed by SIGKILL", end_of(run.folder))


@pytest.mark.parametrize("operation", ("all_reduce", "recv"))
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_it_ended(ranks: RankServer, ending: str, operation: str) -> None:
    run = ranks.start(3, die_while_others_wait, operation, ending, 0.01)
    check(run.join(30), ENDINGS[ending][1], end_of(run.folder))


def end_as_python_does(how: str, operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        if how == "exception":
            raise RuntimeError("the user's own")
        if how == "no UTF-8":
            raise RuntimeError("data-\udcff.bin")
        sys.exit(0)
    WAITS[operation]()


@pytest.mark.parametrize("operation", ("all_reduce", "recv", "work"))
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exception", 1, "failed with RuntimeError: the user's own, after barrier #1 at"),
        ("no UTF-8", 1, "failed with RuntimeError: data-\\udcff.bin, after barrier #1 at"),
        ("sys.exit", 0, "exited with code 0"),
    ],
)
def test_ended_as_python_does(
    ranks: RankServer, how: str, code: int, words: str, operation: str
) -> None:
    run = ranks.start(3, end_as_python_does, how, operation)
    assert not run.wait(30, [VICTIM])
    end = time.monotonic()
    ended = run.join(30)
    assert ended[VICTIM].code == code
    check(ended, words, end)


def raises_with_works_in_flight(operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        works = [dist.all_reduce(torch.zeros(10), async_op=True)]
        works.append(dist.irecv(torch.zeros(10), 0))
        Path(os.environ["FOLDER"], "end").write_text(repr(time.monotonic()))
        raise RuntimeError("the user's own")
    WAITS[operation]()


@pytest.mark.parametrize("operation", ("recv", "large send"))
def test_an_exception_with_works_in_flight(ranks: RankServer, operation: str) -> None:
    """The others don't wait until the failing rank's own operations have come to their end."""
    run = ranks.start(2, raises_with_works_in_flight, operation)
    first, second = run.join(30)
    assert second.code == 1
    assert "the user's own" in second.stderr
    assert isinstance(first.error, PeerLost), first.report()
    assert f"rank 1 (pid {second.pid}) failed with RuntimeError: the user's own" in str(first.error)
    assert first.error_time - end_of(run.folder) < 1.0


def dead_before() -> None:
    """The victim dies while nobody is in an operation; the next one tells."""
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    folder = Path(os.environ["FOLDER"])
    while not (folder / "dead").exists():
        time.sleep(0.001)
    Path(folder, "end").write_text(repr(time.monotonic()))
    for operation in ("all_reduce", "recv", "barrier"):
        with pytest.raises(PeerLost, match="killed by SIGKILL"):
            WAITS[operation]()
    dist.all_reduce(torch.zeros(10))


def test_dead_before_the_operation(ranks: RankServer) -> None:
    run = ranks.start(3, dead_before)
    assert not run.wait(30, [VICTIM])
    (run.folder / "dead").touch()
    check(run.join(30), "was killed by SIGKILL", end_of(run.folder))


def all_but_one_die() -> None:
    dist.barrier()
    if dist.get_rank() != 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(10))


def test_several_die(ranks: RankServer) -> None:
    ended = ranks.start(4, all_but_one_die).join(30)
    assert isinstance(ended[2].error, PeerLost)
    assert "was killed by SIGKILL" in str(ended[2].error)
    assert [rank.code for rank in ended] == [-9, -9, 1, -9]


def a_group_without_the_dead() -> None:
    """A group that the dead rank is not in goes on, and so does a new one of the living."""
    pair = dist.new_group([0, 2])
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.zeros(10))
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=pair)
    assert (tensor == 2).all()


def test_groups_without_the_dead_go_on(ranks: RankServer) -> None:
    ended = ranks.start(3, a_group_without_the_dead).join(30)
    assert [rank.code for rank in ended] == [0, -9, 0], [rank.report() for rank in ended]


def callbacks_see_it() -> str:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.zeros(10), async_op=True)
    seen = threading.Event()
    work.get_future().add_done_callback(lambda _: seen.set())
    chained = work.get_future().then(lambda done: done.value())
    assert seen.wait(10)
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        chained.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)
    for call in (work.wait, work.result, work.get_future().wait, work.get_future().value):
        with pytest.raises(PeerLost, match="SIGKILL"):
            call()
    return "seen"


def test_works_and_futures_carry_the_error(ranks: RankServer) -> None:
    run = ranks.start(2, callbacks_see_it)
    ended = run.join(30)
    assert ended[0].outcome is not None, ended[0].report()
    assert ended[0].outcome.value == "seen", ended[0].report()
