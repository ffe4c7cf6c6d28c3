"""Faults of the matrix: ranks that hang, deadlock, or do not wait for a message."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.fault_injection.faults import (
    Body,
    Case,
    get_backend,
    leave_and_sleep,
    make_case,
    mark_fault,
    sleep_until_killed,
)

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


def _hang_in_own_code(
    action: Callable[[], object], victim: int, wait: Callable[[], object] = _all_reduce
) -> Body:
    """Return a body in which the victim hangs in its own code and the others wait for it."""

    def body(rank: int) -> None:
        if rank == victim:
            mark_fault()
            action()
        wait()

    return body


def _stop_inside(rank: int) -> None:
    if rank == 1:
        threading.Timer(0.3, lambda: (mark_fault(), _stop())).start()
        dist.recv(torch.ones(4), 0)
    time.sleep(2)
    _all_reduce()


def _sleep_with_work(rank: int) -> None:
    work = _all_reduce(async_op=True)
    if rank == 1:
        mark_fault()
        sleep_until_killed()
    work.wait()
    dist.barrier()


def _sleep_in_chain(rank: int) -> None:
    pair = dist.new_group([1, 2])
    if rank == 1:
        mark_fault()
        sleep_until_killed()
    if rank == 2:
        _all_reduce(group=pair)
    dist.barrier()


def _hang_before_init(action: Callable[[], object], victim: int) -> Body:
    def body(rank: int) -> None:
        if rank == victim:
            mark_fault()
            action()
        else:
            dist.init_process_group(get_backend())

    return body


def _new_group_on_some(rank: int) -> None:
    if rank == 2:
        mark_fault()
    else:
        dist.new_group()
    dist.barrier()


# Messages.


def _recv_without_send(tag: int, sent: int | None, source: int | None = 1) -> Body:
    def body(rank: int) -> None:
        if rank == 1 and sent is not None:
            dist.isend(torch.ones(4), 0, tag=sent)
        if rank == 0:
            mark_fault()
            dist.recv(torch.ones(4), source, tag=tag)
        dist.barrier()

    return body


def _send_without_recv(rank: int) -> None:
    if rank == 0:
        mark_fault()
        dist.send(torch.ones(_LARGE), 1)
    dist.barrier()


def _ring(action: Callable[[torch.Tensor, int], object], count: int) -> Body:
    def body(rank: int) -> None:
        mark_fault()
        action(torch.ones(count), (rank + 1) % dist.get_world_size())

    return body


def _end_without_send(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(4), 1)
    else:
        mark_fault()


def _isend_without_wait(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(_LARGE), 1)
        mark_fault()
        os._exit(0)  # a script that ends by itself completes its messages
    time.sleep(0.5)
    dist.recv(torch.ones(_LARGE), 0)


def _isend_to_one_that_leaves(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(_LARGE), 1)
        dist.destroy_process_group()
    if rank == 1:
        mark_fault()
        leave_and_sleep()


def _irecv_without_wait(rank: int) -> None:
    if rank == 1:
        dist.irecv(torch.ones(_LARGE), 0)
        mark_fault()
        os._exit(0)  # a script that ends by itself gives it up
    elif rank == 0:
        time.sleep(0.5)
        dist.send(torch.ones(_LARGE), 1)


def _send_mismatched(sent: torch.Tensor) -> Body:
    def body(rank: int) -> None:
        mark_fault()
        if rank == 0:
            dist.send(sent, 1)
        else:
            dist.recv(torch.ones(20), 0)

    return body


def _make_hang(*arguments: Any, **options: Any) -> Case:
    return make_case(*arguments, hangs=True, **options)


_NO_GROUP = {"forms": False}

CASES = (
    _make_hang(
        "SIGSTOP",
        3,
        _hang_in_own_code(_stop, 1),
        1,
        "stopped",
        "Rank 1 .*stopped by a signal",
        _DEBUGGER,
    ),
    _make_hang("SIGSTOP_inside", 2, _stop_inside, 1, "stopped", "Rank 1 .*in recv", _DEBUGGER),
    _make_hang(
        "SIGSTOP_before_init",
        3,
        _hang_before_init(_stop, 1),
        1,
        "stopped",
        "Rank 1 .*stopped",
        _DEBUGGER,
        **_NO_GROUP,
    ),
    _make_hang(
        "endless_loop", 4, _hang_in_own_code(_loop, 3), 3, "busy", "Rank 3 .*its own code", _SLOW
    ),
    _make_hang(
        "sleep",
        2,
        _hang_in_own_code(sleep_until_killed, 0, dist.barrier),
        0,
        "busy",
        "Rank 0 .*its own code",
        _SLOW,
    ),
    _make_hang(
        "lock",
        3,
        _hang_in_own_code(_lock, 1, lambda: dist.broadcast(torch.ones(4), 1)),
        1,
        "busy",
        "Rank 1 .*own",
        _SLOW,
    ),
    _make_hang("sleep_with_work", 3, _sleep_with_work, 1, "busy", "Rank 1 .*own.*barrier", _SLOW),
    _make_hang("sleep_in_a_chain", 4, _sleep_in_chain, 1, "busy", "Rank 1 .*its own code", _SLOW),
    _make_hang(
        "sleep_before_init",
        3,
        _hang_before_init(sleep_until_killed, 1),
        1,
        "missing",
        "Rank 1 .*not join(ed)? the group",
        "Check that rank 1 was started",
        **_NO_GROUP,
    ),
    _make_hang(
        "loop_before_init",
        2,
        _hang_before_init(_loop, 0),
        0,
        "missing",
        "Rank 0 .*not join(ed)? the group",
        "Check that rank 0 was started",
        **_NO_GROUP,
    ),
    _make_hang(
        "end_before_init",
        3,
        _hang_before_init(lambda: None, 2),
        2,
        "finished",
        "Rank 2 .*before it joined any group",
        "Check that rank 2",
        **_NO_GROUP,
    ),
    _make_hang(
        "new_group_on_some",
        3,
        _new_group_on_some,
        2,
        "missing",
        "[Rr]ank 2\\b.*new_group",
        "every rank of the job must call `new_group`",
    ),
    _make_hang(
        "recv_without_send",
        2,
        _recv_without_send(0, None),
        0,
        "unsent",
        "Rank 0 .*no rank s",
        _RECV,
    ),
    _make_hang(
        "recv_of_another_tag",
        3,
        _recv_without_send(7, 3),
        0,
        "unsent",
        "sent instead.*tag 3",
        _RECV,
        elsewhere=("unsent", "Rank 0 .*no rank s.*tag 7", _RECV),
    ),
    _make_hang(
        "recv_from_any",
        3,
        _recv_without_send(0, None, None),
        0,
        "unsent",
        "Rank 0 .*any rank",
        _RECV,
    ),
    _make_hang(
        "send_without_recv",
        2,
        _send_without_recv,
        0,
        "unreceived",
        "Rank 0 .*to be received",
        _RECV,
    ),
    _make_hang(
        "ring_of_recv", 2, _ring(dist.recv, 4), (0, 1), "deadlock", "for each other", _ONE_SIDE
    ),
    _make_hang(
        "ring_of_send",
        3,
        _ring(dist.send, _LARGE),
        (0, 1, 2),
        "deadlock",
        "each other.*send",
        _ONE_SIDE,
    ),
    make_case(
        "source_ends", 2, _end_without_send, 0, "unsent", "Rank 1 .*without sending it", _RECV
    ),
    make_case(
        "isend_unawaited",
        2,
        _isend_without_wait,
        0,
        "unawaited",
        "Rank 0 .*without waiting for.*send float32",
        _WAIT,
    ),
    make_case(
        "isend_to_one_that_leaves",
        3,
        _isend_to_one_that_leaves,
        1,
        "finished",
        "Rank 1 .*left",
        _MORE,
        is_general=False,  # Gloo drops the message
    ),
    make_case(
        "irecv_unawaited",
        3,
        _irecv_without_wait,
        1,
        "unawaited",
        "Rank 1 .*without waiting for.*recv",
        _WAIT,
        elsewhere=("finished", "Rank 1 .*finished early", _WAIT),
    ),
    make_case(
        "message_size",
        2,
        _send_mismatched(torch.ones(10)),
        (0, 1),
        "message",
        r"\[10\].*\[20\]",
        "number of elements",
        is_general=False,  # Gloo receives what there is
    ),
    make_case(
        "message_dtype",
        2,
        _send_mismatched(torch.ones(20).int()),
        (0, 1),
        "message",
        "int32.*float32",
        "same dtype",
        is_general=False,
    ),
)
