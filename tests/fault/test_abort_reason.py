"""phalanx.abort and PyTorch's abort wake all ranks at once, and state the rank and the reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

import phalanx
from phalanx.errors import Aborted, UsageError
from tests.ranks import RankServer, announce_wait, wait_until_others_wait

REASON = "loss is NaN in step 17"


def wait_for_future(group: Any) -> None:
    dist.all_reduce(torch.zeros(3), group=group, async_op=True).get_future().wait()


# The calls of the other ranks, which rank 0 never enters.
WAITS: dict[str, Callable[[Any], object]] = {
    "blocking": lambda group: dist.all_reduce(torch.zeros(3), group=group),
    "large": lambda group: dist.broadcast(torch.zeros(2**20), 0, group=group),
    "work": lambda group: dist.barrier(group, async_op=True).wait(),
    "future": wait_for_future,
    "recv": lambda group: dist.recv(torch.zeros(3), 0, group=group),
    "recv from any": lambda group: dist.recv(torch.zeros(3), group=group),
    "irecv's future": lambda group: dist.irecv(torch.zeros(3), 0, group).get_future().wait(),
    "monitored barrier": lambda group: dist.monitored_barrier(group),
    "object": lambda group: dist.all_gather_object([None] * 3, "x", group=group),
}
# Ways in which rank 0 aborts, and the reason that the others get.
ABORTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "phalanx.abort": (lambda group: phalanx.abort(group, REASON), f": {REASON}"),
    "without a reason": (lambda group: phalanx.abort(group), ""),
    "its method": (lambda group: group.abort(), ""),
    "PyTorch's": (lambda group: _abort_process_group(group), ""),
}


def abort_on_rank_0(how: str, wait: str, in_sub_group: bool) -> str:
    group: Any = dist.new_group() if in_sub_group else dist.group.WORLD
    if dist.get_rank() == 0:
        wait_until_others_wait()
        ABORTS[how][0](group)
        return ""
    announce_wait()
    with pytest.raises(Aborted) as caught:
        WAITS[wait](group)
    if in_sub_group:  # the other groups stay usable
        pair = dist.group.WORLD
        others = dist.get_rank() % 2 + 1
        dist.isend(torch.ones(1), others, pair)
        dist.recv(torch.zeros(1), others, pair)
    return str(caught.value)


def check(answers: list[str], how: str) -> None:
    for rank, text in enumerate(answers[1:], 1):
        assert text.startswith(f"[rank {rank}/3 on ")
        before, _, after = text.partition("the group was aborted by rank 0 at ")
        assert "test_abort_reason.py:" in before, text
        site, colon, reason = after.partition(": ")
        assert site.startswith("test_abort_reason.py:"), text
        assert colon + reason == ABORTS[how][1]


@pytest.mark.parametrize("wait", WAITS)
def test_every_blocking_call(ranks: RankServer, wait: str) -> None:
    check(ranks.run(3, abort_on_rank_0, "phalanx.abort", wait, False), "phalanx.abort")


@pytest.mark.parametrize("in_sub_group", (False, True))
@pytest.mark.parametrize("how", ABORTS)
def test_every_way_to_abort(ranks: RankServer, how: str, in_sub_group: bool) -> None:
    check(ranks.run(3, abort_on_rank_0, how, "blocking", in_sub_group), how)


def abort_all_groups() -> None:
    """`_abort_process_group()` aborts and removes every group of this process."""
    pair = dist.new_group()
    if dist.get_rank() == 0:
        wait_until_others_wait()
        _abort_process_group()
        assert not dist.is_initialized()
        return
    announce_wait()
    for group in (pair, dist.group.WORLD):
        with pytest.raises(Aborted, match="aborted by rank 0"):
            dist.barrier(group)


def test_abort_of_all_groups(ranks: RankServer) -> None:
    ranks.run(3, abort_all_groups)


def enter_after_abort(reason: str) -> str:
    """A rank that enters the group later raises too; the rank that aborted has left the group."""
    dist.barrier()
    folder = Path(os.environ["FOLDER"])
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(3), async_op=True)
        phalanx.abort(reason=reason)
        with pytest.raises(Aborted, match="aborted by rank 0"):
            work.wait()
        with pytest.raises(UsageError, match="this rank has left the process group"):
            dist.barrier()
        phalanx.abort(reason="twice")
        (folder / "aborted").touch()
        return ""
    while not (folder / "aborted").exists():
        time.sleep(0.001)
    with pytest.raises(Aborted) as caught:
        dist.barrier()
    return str(caught.value).partition("aborted by rank 0 at ")[2].partition(": ")[2]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("no more data", "no more data"),
        ("\x1b[2Jevil\nnews \u202e", "\\x1b[2Jevil\\nnews \\u202e"),
        ("a" * 900, "a" * 639),
        ("ä" * 900, "ä" * 319),
        ("", ""),
        ("no file data-\udcff.bin", "no file data-\\udcff.bin"),
    ],
)
def test_entering_after_abort(ranks: RankServer, reason: str, told: str) -> None:
    assert ranks.run(2, enter_after_abort, reason)[1] == told


def abort_invalid_groups() -> None:
    with pytest.raises(UsageError, match="there is no default group"):
        phalanx.abort()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=10)
    )
    for wrong in (None, dist.group.WORLD):
        with pytest.raises(UsageError, match="expected a group of the backend 'phalanx'"):
            phalanx.abort(wrong)
    with pytest.raises(UsageError, match="group is 5, expected a group of the backend 'phalanx'"):
        phalanx.abort(5)  # type: ignore[arg-type]
    dist.barrier()


def abort_with_invalid_reason() -> None:
    for wrong in (5, None, b"why"):
        with pytest.raises(UsageError, match=r"abort: reason is .*, expected a str") as caught:
            phalanx.abort(reason=wrong)  # type: ignore[arg-type]
        assert repr(wrong) in str(caught.value)
    dist.barrier()  # nothing has been aborted


def test_invalid_reason(ranks: RankServer) -> None:
    ranks.run(2, abort_with_invalid_reason)


def test_invalid_groups(ranks: RankServer) -> None:
    ranks.run(1, abort_invalid_groups, timeout=None)
