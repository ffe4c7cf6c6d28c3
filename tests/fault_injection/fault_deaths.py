"""Faults of the matrix: ranks that end, for every cause and at every moment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tests.fault_injection.faults import (
    Body,
    Case,
    get_backend,
    mark_fault,
    sleep_until_killed,
    wait_for_fault,
)

_MEMORY = "[Uu]se less memory"


class Cause(NamedTuple):
    """A cause of a rank's end, and the expected diagnosis."""

    end: Callable[[], object]
    kind: str
    cause: str
    advice: str


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Callable[[], None]:
    def raise_it() -> NoReturn:
        raise error

    return raise_it


def _raise_from() -> None:
    try:
        {}["lr"]
    except KeyError as error:
        raise RuntimeError("bad configuration") from error


def _wrong_shapes() -> None:
    torch.ones(3) @ torch.ones(4)


def _allocate() -> None:
    torch.empty(2**60, dtype=torch.uint8)


_TRACEBACK = r"traceback is in the stderr of rank {}"
CAUSES = {
    "SIGKILL": Cause(_signal(signal.SIGKILL), "killed", "killed by SIGKILL", "journalctl"),
    "SIGSEGV": Cause(lambda: ctypes.string_at(0), "killed", "killed by SIGSEGV", "in native code"),
    "SIGTERM": Cause(_signal(signal.SIGTERM), "killed", "killed by SIGTERM", "terminated it"),
    "_exit": Cause(lambda: os._exit(7), "exited", "exit code 7", r"os\._exit"),
    "_exit-0": Cause(lambda: os._exit(0), "finished", "reached the end", "more operations than"),
    "sys.exit": Cause(lambda: sys.exit(3), "exited", "exit code 3", r"sys\.exit"),
    "ValueError": Cause(
        _raise(ValueError("broken batch")), "failed", "ValueError: broken batch", _TRACEBACK
    ),
    "MemoryError": Cause(_raise(MemoryError()), "failed", "MemoryError", _MEMORY),
    "allocation": Cause(_allocate, "failed", "RuntimeError: .*allocate memory", _MEMORY),
    "shapes": Cause(_wrong_shapes, "failed", "RuntimeError: ", _TRACEBACK),
    "cause": Cause(_raise_from, "failed", "RuntimeError: bad config.*KeyError: 'lr'", _TRACEBACK),
    "KeyboardInterrupt": Cause(
        _raise(KeyboardInterrupt()), "interrupted", r"interrupted \(Ctrl-C\)", "Ctrl-C"
    ),
}

# Operations in which every rank except the victim `v` waits.
OPERATIONS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda _: dist.all_reduce(torch.ones(1000)),
    "large all_reduce": lambda _: dist.all_reduce(torch.ones(2_000_000)),
    "broadcast": lambda v: dist.broadcast(torch.ones(100), v),
    "reduce": lambda v: dist.reduce(torch.ones(100), v),
    "barrier": lambda _: dist.barrier(),
    "recv": lambda v: dist.recv(torch.ones(100), v),
    "send": lambda v: dist.send(torch.ones(2_000_000), v),
    "all_gather": lambda _: dist.all_gather(_parts(), torch.ones(100)),
    "objects": lambda _: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "reduce_scatter": lambda _: dist.reduce_scatter(torch.ones(100), _parts()),
    "all_to_all": lambda _: dist.all_to_all(_parts(), _parts()),
    "gather": lambda _: dist.gather(torch.ones(100), _parts() if dist.get_rank() == 0 else None),
    "scatter": lambda v: dist.scatter(torch.ones(100), None, src=v),
}


def _parts() -> list[torch.Tensor]:
    return [torch.ones(100) for _ in range(dist.get_world_size())]


def _begin(operation: str, victim: int) -> list[Any]:
    """Start asynchronous collectives or a message, and return the works."""
    if operation == "irecv":
        return [dist.irecv(torch.ones(10), (victim + 1) % dist.get_world_size())]
    if operation == "isend":
        return [dist.isend(torch.ones(2_000_000), (victim + 1) % dist.get_world_size())]
    if operation == "barrier":
        return [dist.barrier(async_op=True)]
    return [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]


def _die_in_own_code(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends in its own code and the others wait for it."""

    def body(rank: int) -> None:
        if rank != victim:
            OPERATIONS[operation](victim)
            sleep_until_killed()
        mark_fault()
        end()

    return body


def _die_inside(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends inside an operation that no other rank has joined."""

    def later() -> None:
        mark_fault()
        end()

    def body(rank: int) -> None:
        if rank == victim:
            threading.Timer(0.3, later).start()
            OPERATIONS[operation]((victim + 1) % dist.get_world_size())
        sleep_until_killed()

    return body


def _die_alone(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends while no rank waits for it."""
    del operation

    def body(rank: int) -> None:
        if rank == victim:
            mark_fault()
            end()
        sleep_until_killed()

    return body


def _die_with_async_work(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends while an asynchronous operation of it is pending."""

    def body(rank: int) -> None:
        if rank == victim:
            works = _begin(operation, victim)
            mark_fault()
            end()
            del works
        if operation == "all_reduce" and rank == 0:
            for _ in range(100):
                dist.all_reduce(torch.ones(1000), async_op=True).wait()
        sleep_until_killed()

    return body


def _die_before_wait(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which all start the same works, and the victim ends before it waits."""

    def body(rank: int) -> None:
        works = _begin(operation, victim)
        if rank == victim:
            mark_fault()
            end()
        for work in works:
            work.wait()
        dist.barrier()

    return body


def _die_in_subgroup(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which some ranks wait for the victim in a subgroup, the others for them."""

    def body(rank: int) -> None:
        pair = dist.new_group([victim, (victim + 1) % dist.get_world_size()])
        if rank == victim:
            mark_fault()
            end()
        if rank == (victim + 1) % dist.get_world_size():
            dist.all_reduce(torch.ones(10), group=pair)
        OPERATIONS[operation](victim)

    return body


def _die_before_init(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends before the group is formed."""
    del operation

    def body(rank: int) -> None:
        if rank == victim:
            mark_fault()
            end()
        dist.init_process_group(get_backend())

    return body


def _die_after_leaving(end: Callable[[], object], operation: str, victim: int) -> Body:
    """Return a body in which the victim ends after all ranks have left the group."""
    del operation

    def body(rank: int) -> None:
        dist.destroy_process_group()
        if rank == victim:
            mark_fault()
            end()
        wait_for_fault()

    return body


_MOMENTS = {
    "in own code": _die_in_own_code,
    "inside": _die_inside,
    "alone": _die_alone,
    "asynchronous": _die_with_async_work,
    "met": _die_before_wait,
    "in a group": _die_in_subgroup,
    "before init": _die_before_init,
    "after leaving": _die_after_leaving,
}

# Cause, moment, operation, victim and world size.
_SELECTION = (
    ("SIGKILL", "in own code", "broadcast", 1, 3),
    ("SIGSEGV", "in own code", "reduce_scatter", 0, 3),
    ("SIGTERM", "in own code", "gather", 1, 2),
    ("_exit", "in own code", "objects", 1, 3),
    ("_exit-0", "in own code", "all_to_all", 1, 2),
    ("sys.exit", "in own code", "all_gather", 0, 2),
    ("ValueError", "in own code", "send", 1, 4),
    ("cause", "in own code", "scatter", 0, 3),
    ("KeyboardInterrupt", "in own code", "barrier", 1, 2),
    ("SIGKILL", "inside", "large all_reduce", 1, 2),
    ("SIGSEGV", "inside", "recv", 0, 2),
    ("ValueError", "alone", "", 1, 3),
    ("allocation", "alone", "", 1, 2),
    ("ValueError", "asynchronous", "all_reduce", 1, 2),
    ("shapes", "asynchronous", "all_reduce", 1, 3),
    ("SIGKILL", "asynchronous", "isend", 1, 2),
    ("sys.exit", "asynchronous", "irecv", 1, 3),
    ("MemoryError", "met", "all_reduce", 1, 2),
    ("_exit", "met", "barrier", 0, 2),
    ("KeyboardInterrupt", "met", "all_reduce", 1, 3),
    ("ValueError", "in a group", "reduce", 1, 4),
    ("sys.exit", "before init", "", 1, 2),
    ("ValueError", "before init", "", 0, 2),
    ("SIGKILL", "before init", "", 2, 3),
    ("ValueError", "after leaving", "", 1, 2),
)


def _cases() -> Iterator[Case]:
    for cause_name, moment, operation, victim, size in _SELECTION:
        end, kind, cause, advice = CAUSES[cause_name]
        body = _MOMENTS[moment](end, operation, victim)
        words = f"[Rr]ank {victim}\\b.*{cause}"
        name = " ".join(filter(None, (cause_name, moment, operation, f"of {size}"))).replace(
            " ", "_"
        )
        forms = moment != "before init"
        yield Case(
            name,
            size,
            body,
            (victim,),
            kind,
            words,
            advice.format(victim),
            forms=forms,
        )


CASES = tuple(_cases())
