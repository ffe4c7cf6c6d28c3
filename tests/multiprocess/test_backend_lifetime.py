"""The exit of processes with groups, and groups in forked children."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from phalanx.errors import PhalanxError, UsageError
from tests.ranks import RankServer
from tests.waiting import wait_for


def init() -> None:
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def nothing() -> None:
    pass


def collectives() -> None:
    for size in (1, 100_000):
        dist.all_reduce(torch.ones(size))


def asynchronous_not_waited_for() -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(100_000), async_op=True)


def message_not_waited_for() -> None:
    right, left = (1 - dist.get_rank(),) * 2
    dist.isend(torch.ones(10), right)
    dist.irecv(torch.ones(10), left)


def message_without_a_recv() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(10), 1)
    dist.barrier()


def recv_without_a_send() -> None:
    dist.irecv(torch.ones(10), 1 - dist.get_rank())
    dist.barrier()


def futures_with_callbacks() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(10), async_op=True).get_future().then(lambda done: done)


def groups() -> None:
    made = [dist.new_group() for _ in range(3)]
    for group in made:
        dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()


def works_in_globals() -> None:
    globals()["kept"] = [dist.all_reduce(torch.ones(10), async_op=True), dist.group.WORLD]


Program = Callable[[], None]
PROGRAMS: list[Program] = [
    nothing,
    collectives,
    asynchronous_not_waited_for,
    message_not_waited_for,
    message_without_a_recv,
    recv_without_a_send,
    futures_with_callbacks,
    groups,
    works_in_globals,
]


def end(program: Program, leave: bool) -> None:
    init()
    program()
    if leave:
        dist.destroy_process_group()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("leave", (True, False), ids=("leave", "just end"))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_ends_cleanly(ranks: RankServer, program: Program, leave: bool) -> None:
    for rank in ranks.start(2, end, program, leave, timeout=None).join():
        assert rank.code == 0, rank.report()
        assert rank.stderr == ""
        assert rank.stdout == ""


# Daemon threads that come back from the core while the interpreter ends.
DAEMONS = """
import ctypes, threading
from phalanx import _native

buffer = ctypes.create_string_buffer(40_000)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))  # the threads use it to the end
address = ctypes.addressof(buffer)
arguments = address, [address], 10_000, _native.DTYPES["float32"], _native.REDUCE_OPS["sum"], 1.0
turns = [threading.Event() for _ in range(4)]

def reduce_forever(turn):
    while True:
        _native.reduce(*arguments)
        turn.set()

for turn in turns:
    threading.Thread(target=reduce_forever, args=(turn,), daemon=True).start()
for turn in turns:
    turn.wait()
"""


def test_daemon_threads_do_not_disturb_the_exit() -> None:
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", DAEMONS], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")


def leave_twice() -> None:
    init()
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    group.shutdown()
    group.shutdown()
    del group
    gc.collect()
    wait_for(lambda: not [t for t in threading.enumerate() if "phalanx" in t.name])


def test_leaving_twice(ranks: RankServer) -> None:
    for rank in ranks.start(2, leave_twice, timeout=None).join():
        assert rank.code == 0, rank.report()
        assert rank.stderr == ""


def in_a_forked_child(check: Callable[[], None]) -> str:
    """Run `check` in a forked child, and return the text of its exception."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork, Python 3.12
        pid = os.fork()
    if pid == 0:
        try:
            check()
            words = "nothing"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        words = pipe.read()
    os.waitpid(pid, 0)
    return words


def child_uses_the_group() -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(10), async_op=True).wait()  # the group has a thread
    uses: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.barrier(),
        lambda: dist.send(torch.ones(1), 1 - rank),
        lambda: dist.irecv(torch.ones(1), 1 - rank),
    ]
    for use in uses:
        words = in_a_forked_child(lambda use=use: use())
        assert words.startswith("UsageError: this process group belongs to process"), words
        assert str(os.getpid()) in words
    # A child that leaves or ends does not affect its parent's membership.
    assert in_a_forked_child(dist.destroy_process_group) == "nothing"
    assert in_a_forked_child(gc.collect) == "nothing"
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert (tensor == 4).all()


def test_forked_child_cannot_use_the_group(ranks: RankServer) -> None:
    for rank in ranks.start(2, child_uses_the_group).join():
        assert rank.code == 0, rank.report()


def child_forms_a_group_of_its_own() -> None:
    def alone() -> None:
        dist.destroy_process_group()
        url = f"file://{os.environ['FOLDER']}/child-{os.getpid()}"
        dist.init_process_group("phalanx", init_method=url, rank=0, world_size=1)
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor == 1).all()
        dist.destroy_process_group()

    assert in_a_forked_child(alone) == "nothing"
    dist.barrier()


def test_a_forked_child_forms_a_group_of_its_own(ranks: RankServer) -> None:
    ranks.run(2, child_forms_a_group_of_its_own)


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index**2


def loader_with_workers() -> None:
    total = 0
    for epoch in range(2):
        for batch in DataLoader(Squares(), batch_size=4, num_workers=2):
            tensor = batch.sum()
            dist.all_reduce(tensor, async_op=bool(epoch))
            dist.barrier()
            total += tensor.item()
    assert total == 2 * 2 * sum(index**2 for index in range(20))


def test_a_data_loader_with_workers(ranks: RankServer) -> None:
    for rank in ranks.start(2, loader_with_workers).join():
        assert rank.code == 0, rank.report()
        assert rank.stderr == "", rank.stderr


def child_outlives_its_rank(pipe: str) -> None:
    """Detect the death of a rank although its forked child is still alive."""
    dist.barrier()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            with open(pipe) as opened:
                opened.read()
            os._exit(0)
        os._exit(5)
    dist.all_reduce(torch.ones(1))


def test_a_child_that_outlives_its_rank(ranks: RankServer, tmp_path: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = ranks.start(2, child_outlives_its_rank, str(pipe))
    writing = os.open(pipe, os.O_RDWR)
    first, second = run.join()
    os.close(writing)
    assert second.code == 5
    assert "exited with code 5" in str(first.error)


def pending_when_left() -> None:
    """Leave a group with pending messages: their waits raise, and nothing hangs."""
    received = dist.irecv(torch.ones(10), 1 - dist.get_rank())
    future = dist.irecv(torch.ones(10), 1 - dist.get_rank(), tag=2).get_future()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises((UsageError, dist.DistBackendError), match="left"):
        received.wait()
    with pytest.raises((UsageError, dist.DistBackendError), match="left"):
        future.wait()


def test_messages_pending_when_the_group_is_left(ranks: RankServer) -> None:
    for rank in ranks.start(2, pending_when_left).join():
        assert rank.code == 0, rank.report()


# ---- operations under way when a rank leaves ----


def posts_and_leaves() -> list[Any]:
    """Rank 1 posts its operations when rank 0 has been leaving for longer than a grace period."""
    init()
    rank, count = dist.get_rank(), 2_000_000
    if rank == 1:
        time.sleep(3)
    tensors = [torch.full((1000,), float(rank + 1)) for _ in range(100)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    received = torch.full((count,), -1.0)
    dist.irecv(received, 1 - rank)
    dist.isend(torch.full((count,), float(rank)), 1 - rank)
    dist.destroy_process_group()
    return [tensors[-1].tolist(), received[[0, -1]].tolist()]


def test_what_was_posted_is_completed(ranks: RankServer) -> None:
    ended = ranks.start(2, posts_and_leaves, timeout=None).join()
    for rank in ended:
        assert rank.code == 0, rank.report()
        assert rank.value == [[3.0] * 1000, [1.0 - rank.rank] * 2]


def leaves_with_receives() -> None:
    """Each rank waits for messages that nobody sends."""
    init()
    works = [dist.irecv(torch.ones(3), 1 - dist.get_rank()), dist.irecv(torch.ones(3))]
    dist.destroy_process_group()
    for work in works:
        with pytest.raises((UsageError, dist.DistBackendError), match="left"):
            work.wait()


def test_receives_without_a_message_are_given_up(ranks: RankServer) -> None:
    ranks.run(2, leaves_with_receives, timeout=None)


def begin(operation: str) -> Any:
    """Begin an operation of rank 0 that cannot end without rank 1."""
    if operation == "isend":
        return dist.isend(torch.ones(2_000_000), 1)
    return dist.all_reduce(torch.ones(3), async_op=True)


def leaves_with_a_failure(operation: str, sees_it: bool) -> None:
    init()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    work = begin(operation)
    if sees_it:
        with pytest.raises(PhalanxError):
            work.wait()
        dist.destroy_process_group()
    else:
        with pytest.raises(PhalanxError, match=r"rank 1 .*left"):
            dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("sees_it", [True, False])
@pytest.mark.parametrize("operation", ["all_reduce", "isend"])
def test_an_error_that_nobody_has_seen(ranks: RankServer, operation: str, sees_it: bool) -> None:
    ranks.run(2, leaves_with_a_failure, operation, sees_it, timeout=None)


def leaves_after_an_exception() -> None:
    init()
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), async_op=True)
            raise ZeroDivisionError
    finally:
        dist.destroy_process_group()


def test_an_exception_is_not_replaced(ranks: RankServer) -> None:
    first, second = ranks.start(2, leaves_after_an_exception, timeout=None).join()
    assert isinstance(first.error, ZeroDivisionError), first.report()
    assert second.code == 0, second.report()


def ends_with_a_failure(operation: str) -> None:
    init()
    if dist.get_rank() == 0:
        begin(operation)
    else:
        dist.destroy_process_group()


@pytest.mark.parametrize("operation", ["all_reduce", "isend"])
def test_an_error_at_the_end_of_a_script(ranks: RankServer, operation: str) -> None:
    first, second = ranks.start(2, ends_with_a_failure, operation, timeout=None).join()
    assert (first.code, second.code) == (0, 0)
    text = operation.removeprefix("i")
    assert re.search(rf"phalanx: .*{text}.*rank 1 .*left", first.stderr), first.stderr
    assert second.stderr == ""
