"""Dumps that PyTorch's Flight Recorder makes of groups on Gloo, while ranks hang."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d  # type: ignore[attr-defined]

from phalanx.diagnosis.kinds import diagnose
from phalanx.diagnosis.torch_jobs import read_dumps
from phalanx.recorder.torch_recorder import find_call
from tests.ranks import RankServer, marker_file, wait_for_file
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def hang(action: Callable[[int], object], idle: tuple[int, ...] = ()) -> None:
    """Do what hangs in a thread, and write a dump when it does; the ranks `idle` do nothing."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2, 3), 1)
    dump: Callable[[], bytes] = _distributed_c10d._dump_fr_trace

    def is_in_operation() -> bool:
        return any(not entry["retired"] for entry in pickle.loads(dump())["entries"])

    wait_for(lambda: not is_in_operation())  # Gloo may note an end later than it lets go on
    if rank not in idle:
        threading.Thread(target=action, args=(rank,), daemon=True).start()
        wait_for(is_in_operation)
    marker_file("dumps").mkdir(exist_ok=True)
    (marker_file("dumps") / f"trace_{rank}").write_bytes(dump())
    marker_file(f"written{rank}").touch()
    for other in range(size):
        wait_for_file(f"written{other}")
    os._exit(0)


def look_at_calls() -> list[object]:
    """Make calls of one line, and return the position of the thread at the end of each."""
    url = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    positions: list[object] = []

    def look(frame: FrameType, event: str, _value: object) -> None:
        if event == "return" and frame.f_code.co_name == "all_reduce":
            call, position = find_call(frame)
            assert call is not None
            assert call["name"] == "all_reduce"
            positions.append(position)

    sys.setprofile(look)
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    sys.setprofile(None)
    dist.destroy_process_group()
    return positions


def reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(4))


def take_branches(rank: int) -> None:
    dist.all_reduce(torch.ones(4)) if rank else dist.barrier()


def use_groups_in_another_order(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    for group in groups if rank else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


CASES: dict[str, tuple[Any, ...]] = {
    "own code": ("busy", (1,), reduce, (1,)),
    "branches": ("branch", (0,), take_branches),
    "groups": ("order", (0,), use_groups_in_another_order),
}


def test_each_call_of_a_loop_has_a_position_of_its_own(ranks: RankServer) -> None:
    """A rank in a loop does not wait in one call; the frames may be the same."""
    (positions,) = ranks.run(1, look_at_calls, timeout=None)
    assert len(positions) == len(set(positions)) == 5


@pytest.mark.parametrize("case", CASES)
def test_a_job_on_gloo(case: str, ranks: RankServer) -> None:
    kind, at_fault, *arguments = CASES[case]
    run = ranks.start(3, hang, *arguments, timeout=None)
    for rank in run.join():
        assert rank.code == 0, rank.report()
    folder = Path(run.folder, "dumps")
    for rank in range(3):  # as if they had hung for longer
        file = folder / f"trace_{rank}"
        time = file.stat().st_mtime_ns + 30 * 10**9
        os.utime(file, ns=(time, time))
    job = read_dumps(str(folder))
    diagnosis = diagnose(job)
    assert (diagnosis.kind, diagnosis.ranks) == (kind, at_fault), diagnosis.describe()
    sites = {each.site for rank in job.ranks for each in rank.records}
    assert all(site.rpartition(":")[0] == __file__ for site in sites), sites
