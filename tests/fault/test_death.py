"""A rank dies: all others raise PeerLost, with the rank and its exit reason."""

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
from phalanx.recorder import exception_hook
from tests.ranks import RankOutcome, RankServer

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
# The others run these once, without the victim.
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
        time.sleep(delay)  # lets the others progress to different points
        end_now(ending)
    WAITS[operation]()


def check(outcomes: list[RankOutcome], words: str) -> None:
    victim = outcomes[VICTIM]
    for rank in outcomes:
        if rank is victim:
            continue
        assert isinstance(rank.error, PeerLost), rank.report()
        assert f"rank {VICTIM} (pid {victim.pid}) {words}" in str(rank.error), rank.report()
        assert f"[rank {rank.rank}/{len(outcomes)} on " in str(rank.error)
        assert "test_death.py:" in str(rank.error)
        assert rank.code == 1


# Delays before the death: before the others arrive, while they arrive, and in the middle.
@pytest.mark.sampled(9)
@pytest.mark.parametrize("delay", (0.0, 0.005, 0.05))
@pytest.mark.parametrize("operation", LOOPS)
def test_killed_in_the_middle(ranks: RankServer, operation: str, delay: float) -> None:
    run = ranks.start(3, die_in_a_loop, operation, delay)
    check(run.join(), "was killed by SIGKILL")


@pytest.mark.parametrize("operation", WAITS)
def test_killed_while_others_wait(ranks: RankServer, operation: str) -> None:
    # All other ranks must wait for the victim, so two ranks if others could send.
    size = 2 if operation == "recv from any" else 3
    run = ranks.start(size, die_while_others_wait, operation, "SIGKILL", 0.02)
    check(run.join(), "was killed by SIGKILL")


@pytest.mark.parametrize("operation", ("all_reduce", "recv"))
@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_reason(ranks: RankServer, ending: str, operation: str) -> None:
    run = ranks.start(3, die_while_others_wait, operation, ending, 0.01)
    check(run.join(), ENDINGS[ending][1])


def interrupt_exception_hook() -> None:
    """Have a signal handler raise when the hook begins, as DataLoader's when a worker is killed."""
    announce = exception_hook.announce

    def interrupted(_error: BaseException) -> None:
        exception_hook.announce = announce
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    exception_hook.announce = interrupted


def exit_through_python(how: str, operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        if how == "interrupted hook":
            interrupt_exception_hook()
        if how in ("exception", "interrupted hook"):
            raise RuntimeError("the user's own")
        if how == "no UTF-8":
            raise RuntimeError("data-\udcff.bin")
        sys.exit(0)
    WAITS[operation]()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("operation", ("all_reduce", "recv", "work"))
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exception", 1, "failed with RuntimeError: the user's own, after barrier #1 at"),
        ("interrupted hook", 1, "failed with RuntimeError: the user's own, after barrier #1 at"),
        ("no UTF-8", 1, "failed with RuntimeError: data-\\udcff.bin, after barrier #1 at"),
        ("sys.exit", 0, "exited with code 0"),
    ],
)
def test_exit_through_python(
    ranks: RankServer, how: str, code: int, words: str, operation: str
) -> None:
    run = ranks.start(3, exit_through_python, how, operation)
    assert not run.wait(60, [VICTIM])
    outcomes = run.join()
    assert outcomes[VICTIM].code == code
    check(outcomes, words)


def raises_with_works_in_flight(operation: str) -> None:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        works = [dist.all_reduce(torch.zeros(10), async_op=True)]
        works.append(dist.irecv(torch.zeros(10), 0))
        raise RuntimeError("the user's own")
    WAITS[operation]()


@pytest.mark.parametrize("operation", ("recv", "large send"))
def test_an_exception_with_works_in_flight(ranks: RankServer, operation: str) -> None:
    """The others do not wait for the end of the failing rank's own operations."""
    run = ranks.start(2, raises_with_works_in_flight, operation)
    first, second = run.join()
    assert second.code == 1
    assert "the user's own" in second.stderr
    assert isinstance(first.error, PeerLost), first.report()
    assert f"rank 1 (pid {second.pid}) failed with RuntimeError: the user's own" in str(first.error)


def die_between_operations() -> None:
    """The victim dies between operations; the next operation raises."""
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    folder = Path(os.environ["FOLDER"])
    while not (folder / "dead").exists():
        time.sleep(0.001)
    for operation in ("all_reduce", "recv", "barrier"):
        with pytest.raises(PeerLost, match="killed by SIGKILL"):
            WAITS[operation]()
    dist.all_reduce(torch.zeros(10))


def test_death_between_operations(ranks: RankServer) -> None:
    run = ranks.start(3, die_between_operations)
    assert not run.wait(60, [VICTIM])
    (run.folder / "dead").touch()
    check(run.join(), "was killed by SIGKILL")


def all_but_one_die() -> None:
    dist.barrier()
    if dist.get_rank() != 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(10))


def test_several_die(ranks: RankServer) -> None:
    outcomes = ranks.start(4, all_but_one_die).join()
    assert isinstance(outcomes[2].error, PeerLost)
    assert "was killed by SIGKILL" in str(outcomes[2].error)
    assert [rank.code for rank in outcomes] == [-9, -9, 1, -9]


def use_group_without_the_victim() -> None:
    """A group without the dead rank stays usable, and the survivors can form a new one."""
    pair = dist.new_group([0, 2])
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.zeros(10))
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=pair)
    assert (tensor == 2).all()


def test_groups_without_the_victim_stay_usable(ranks: RankServer) -> None:
    outcomes = ranks.start(3, use_group_without_the_victim).join()
    assert [rank.code for rank in outcomes] == [0, -9, 0], [rank.report() for rank in outcomes]


def read_error_from_futures() -> str:
    dist.barrier()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.zeros(10), async_op=True)
    seen = threading.Event()
    work.get_future().add_done_callback(lambda _: seen.set())
    chained = work.get_future().then(lambda done: done.value())
    assert seen.wait(60)
    with pytest.raises(PeerLost, match="was killed by SIGKILL"):
        chained.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)
    for call in (work.wait, work.result, work.get_future().wait, work.get_future().value):
        with pytest.raises(PeerLost, match="SIGKILL"):
            call()
    return "seen"


def test_works_and_futures_have_the_error(ranks: RankServer) -> None:
    run = ranks.start(2, read_error_from_futures)
    outcomes = run.join()
    assert outcomes[0].outcome is not None, outcomes[0].report()
    assert outcomes[0].outcome.value == "seen", outcomes[0].report()
