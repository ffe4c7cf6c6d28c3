"""Faults of the matrix: ranks that hang, wait for each other, or don't wait for a message."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.drill.faults import Body, Case, case_of, leave_and_stay, stay, strike

_LARGE = 2_000_000
_SLOW = "an infinite loop"
_DEBUGGER = "kill -(CONT|STOP)"
_BRANCH = "conditions that lead"
_RECV = "Every recv needs a send"
_MORE = "call more operations than it does"
_ONE_SIDE = "Let one side go first"
_WAIT = r"work\.wait\(\)"


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _loop() -> NoReturn:
    while True:
        pass


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _all_reduce(count: int = 100, **options: Any) -> Any:
    return dist.all_reduce(torch.ones(count), **options)


def _broadcast() -> None:
    dist.broadcast(torch.ones(4), 1)


def _hung(do: Callable[[], object], victim: int, wait: Callable[[], object] = _all_reduce) -> Body:
    """The victim hangs in code of its own, and the others wait in an operation."""

    def body(rank: int) -> None:
        if rank == victim:
            strike()
            do()
        wait()

    return body


def _stopped_inside(rank: int) -> None:
    if rank == 1:
        threading.Timer(0.3, lambda: (strike(), _stop())).start()
        dist.recv(torch.ones(4), 0)
    time.sleep(2)
    _all_reduce()


def _busy_with_work(rank: int) -> None:
    work = _all_reduce(async_op=True)
    if rank == 1:
        strike()
        stay()
    work.wait()
    dist.barrier()


def _chain(rank: int) -> None:
    pair = dist.new_group([1, 2])
    if rank == 1:
        strike()
        stay()
    if rank == 2:
        _all_reduce(group=pair)
    dist.barrier()


def _not_formed(do: Callable[[], object], victim: int) -> Body:
    def body(rank: int) -> None:
        if rank == victim:
            strike()
            do()
        else:
            dist.init_process_group("phalanx")

    return body


def _group_of_some(rank: int) -> None:
    if rank == 2:
        strike()
    else:
        dist.new_group()
    dist.barrier()


# Messages.


def _unsent(tag: int, sent: int | None, source: int | None = 1) -> Body:
    def body(rank: int) -> None:
        if rank == 1 and sent is not None:
            dist.isend(torch.ones(4), 0, tag=sent)
        if rank == 0:
            strike()
            dist.recv(torch.ones(4), source, tag=tag)
        dist.barrier()

    return body


def _unreceived(rank: int) -> None:
    if rank == 0:
        strike()
        dist.send(torch.ones(_LARGE), 1)
    dist.barrier()


def _ring(do: Callable[[torch.Tensor, int], object], count: int) -> Body:
    def body(rank: int) -> None:
        strike()
        do(torch.ones(count), (rank + 1) % dist.get_world_size())

    return body


def _ends_before(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), 1)
    else:
        strike()


def _unawaited_send(leave: Callable[[], object]) -> Body:
    def body(rank: int) -> None:
        if rank == 0:
            dist.isend(torch.ones(_LARGE), 1)
            strike()
            leave()
        if rank == 1:
            time.sleep(0.5)
            dist.recv(torch.ones(_LARGE), 0)

    return body


def _unawaited_recv(rank: int) -> None:
    if rank == 1:
        dist.irecv(torch.ones(_LARGE), 0)
        strike()
    elif rank == 0:
        time.sleep(0.5)
        dist.send(torch.ones(_LARGE), 1)


def _unfit(sent: torch.Tensor) -> Body:
    def body(rank: int) -> None:
        strike()
        if rank == 0:
            dist.send(sent, 1)
        else:
            dist.recv(torch.ones(20), 0)

    return body


def _hang(*arguments: Any, **more: Any) -> Case:
    return case_of(*arguments, hangs=True, **more)


_FORM = {"forms": False}

CASES = (
    _hang("SIGSTOP", 3, _hung(_stop, 1), 1, "stopped", "Rank 1 .*stopped by a signal", _DEBUGGER),
    _hang("SIGSTOP_inside", 2, _stopped_inside, 1, "stopped", "Rank 1 .*in recv", _DEBUGGER),
    _hang(
        "SIGSTOP_before_init",
        3,
        _not_formed(_stop, 1),
        1,
        "stopped",
        "Rank 1 .*stopped",
        _DEBUGGER,
        **_FORM,
    ),
    _hang("endless_loop", 4, _hung(_loop, 3), 3, "busy", "Rank 3 .*its own code", _SLOW),
    _hang("sleep", 2, _hung(stay, 0, dist.barrier), 0, "busy", "Rank 0 .*its own code", _SLOW),
    _hang(
        "lock",
        3,
        _hung(_lock, 1, lambda: dist.broadcast(torch.ones(4), 1)),
        1,
        "busy",
        "Rank 1 .*own",
        _SLOW,
    ),
    _hang("sleep_with_work", 3, _busy_with_work, 1, "busy", "Rank 1 .*own.*barrier", _SLOW),
    _hang("sleep_in_a_chain", 4, _chain, 1, "busy", "Rank 1 .*its own code", _SLOW),
    _hang(
        "sleep_before_init",
        3,
        _not_formed(stay, 1),
        1,
        "missing",
        "Rank 1 .*not join(ed)? the group",
        "Check that rank 1 was started",
        **_FORM,
    ),
    _hang(
        "loop_before_init",
        2,
        _not_formed(_loop, 0),
        0,
        "missing",
        "Rank 0 .*not join(ed)? the group",
        "Check that rank 0 was started",
        **_FORM,
    ),
    _hang(
        "end_before_init",
        3,
        _not_formed(lambda: None, 2),
        2,
        "finished",
        "Rank 2 .*before it joined any group",
        "Check that rank 2",
        **_FORM,
    ),
    _hang(
        "new_group_on_some",
        3,
        _group_of_some,
        2,
        "missing",
        "[Rr]ank 2\\b.*new_group",
        "every rank of the job must call `new_group`",
    ),
    _hang("recv_without_send", 2, _unsent(0, None), 0, "unsent", "Rank 0 .*no rank s", _RECV),
    _hang("recv_of_another_tag", 3, _unsent(7, 3), 0, "unsent", "sent instead.*tag 3", _RECV),
    _hang("recv_from_any", 3, _unsent(0, None, None), 0, "unsent", "Rank 0 .*any rank", _RECV),
    _hang("send_without_recv", 2, _unreceived, 0, "unreceived", "Rank 0 .*to be received", _RECV),
    _hang("ring_of_recv", 2, _ring(dist.recv, 4), (0, 1), "deadlock", "for each other", _ONE_SIDE),
    _hang(
        "ring_of_send",
        3,
        _ring(dist.send, _LARGE),
        (0, 1, 2),
        "deadlock",
        "each other.*send",
        _ONE_SIDE,
    ),
    case_of("source_ends", 2, _ends_before, 0, "unsent", "Rank 1 .*without sending it", _RECV),
    case_of(
        "isend_unawaited",
        2,
        _unawaited_send(lambda: None),
        0,
        "unawaited",
        "Rank 0 .*without waiting for.*send float32",
        _WAIT,
    ),
    case_of(
        "isend_unawaited_left",
        3,
        _unawaited_send(leave_and_stay),
        0,
        "unawaited",
        "Rank 0 .*left the group.*without waiting for.*send",
        _WAIT,
    ),
    case_of(
        "irecv_unawaited",
        3,
        _unawaited_recv,
        1,
        "unawaited",
        "Rank 1 .*without waiting for.*recv",
        _WAIT,
    ),
    case_of(
        "message_size",
        2,
        _unfit(torch.ones(10)),
        (0, 1),
        "message",
        r"\[10\].*\[20\]",
        "number of elements",
    ),
    case_of(
        "message_dtype",
        2,
        _unfit(torch.ones(20).int()),
        (0, 1),
        "message",
        "int32.*float32",
        "same dtype",
    ),
)
