"""The lifetime of a job's directory if the user starts the ranks without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import _native
from phalanx.diagnosis import job_reader
from phalanx.diagnosis.kinds import diagnose
from phalanx.recorder import job_directory
from tests.ranks import RankServer
from tests.waiting import wait_for

LIMIT = 60.0


def init(base: Path, store: str = "store", rank: int | None = None, size: int | None = None) -> int:
    """Form a group in a job in this directory; return the rank of this process."""
    os.environ["PHALANX_JOBS_DIR"] = str(base)
    rank = int(os.environ["RANK"]) if rank is None else rank
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/{store}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]) if size is None else size,
        timeout=timedelta(seconds=20),
    )
    return rank


def run_cleanly(base: Path, leave: bool) -> str:
    rank = init(base)
    dist.all_reduce(torch.ones(3))
    phalanx.report(step=rank)
    (job,) = base.iterdir()
    dist.barrier()
    assert len(list(job.glob("*.recorder"))) == dist.get_world_size()
    dist.barrier()
    if leave:
        dist.destroy_process_group()
    return job.name


@pytest.mark.parametrize("leave", (True, False), ids=("leave", "exit"))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_a_clean_exit_removes_the_job(
    ranks: RankServer, tmp_path: Path, size: int, leave: bool
) -> None:
    base = tmp_path / "jobs"
    names = ranks.run(size, run_cleanly, base, leave, timeout=None)
    assert len(set(names)) == 1
    assert list(base.iterdir()) == []


def run_until_killed(base: Path) -> None:
    rank = init(base)
    phalanx.report(step=17, loss=0.25, note=f"rank {rank}")
    dist.all_reduce(torch.ones(3))
    Path(os.environ["FOLDER"], f"ready{rank}").touch()
    if rank == 0:
        dist.barrier()
    else:
        while True:
            time.sleep(1)


def test_records_of_killed_ranks(ranks: RankServer, jobs: Path) -> None:
    run = ranks.start(3, run_until_killed, jobs, timeout=None)
    wait_for(lambda: all((run.folder / f"ready{rank}").exists() for rank in range(3)))
    live = job_reader.read_job()
    assert live.running
    assert [rank.pid for rank in live.ranks] == run.pids
    with job_directory.find_job() as job:
        assert job_reader.read_summary(job).state == "running"
    for rank in range(3):
        run.signal(rank, signal.SIGKILL)
    run.join()
    job = job_reader.read_job()
    assert not job.running
    assert (job.name, job.problems, job.code) == (live.name, (), None)
    assert [rank.pid for rank in job.ranks] == run.pids
    assert [rank.ending for rank in job.ranks] == [""] * 3
    assert [(rank.reports[-1].step, rank.note) for rank in job.ranks] == [
        (17, f"rank {rank}") for rank in range(3)
    ]
    assert all(rank.last is not None for rank in job.ranks)
    assert [rank.last.kind for rank in job.ranks if rank.last] == ["all_reduce"] * 3
    with job_directory.find_job() as found:
        assert job_reader.read_summary(found).state == "failed"
        assert job_reader.read_summary(found).world_size == 3


def rank_1_raises(base: Path) -> None:
    if init(base) == 1:
        raise ValueError("for a\x1b reason")
    dist.barrier()


def test_records_of_a_failure(ranks: RankServer, jobs: Path) -> None:
    ended = ranks.start(2, rank_1_raises, jobs, timeout=None).join()
    assert [rank.code for rank in ended] == [1, 1]
    job = job_reader.read_job()
    assert [rank.ending for rank in job.ranks] == ["failed", "failed"]
    assert job.ranks[1].exception == "ValueError: for a\x1b reason"
    assert "PeerLost" in job.ranks[0].exception


def rank_0_exits_after_a_failed_operation(base: Path) -> None:
    if init(base) == 1:
        os._exit(0)  # looks like a failure to the peers
    try:
        dist.barrier()
    except phalanx.PeerLost:
        sys.exit(3)


def test_an_exit_code_after_a_failed_operation(ranks: RankServer, jobs: Path) -> None:
    ended = ranks.start(2, rank_0_exits_after_a_failed_operation, jobs, timeout=None).join()
    assert [rank.code for rank in ended] == [3, 0]
    assert [rank.ending for rank in job_reader.read_job().ranks] == ["exited", ""]


def call_mismatched_operations(base: Path) -> None:
    rank = init(base)
    dist.barrier()
    folder = Path(os.environ["FOLDER"])
    if rank == 2:
        wait_for(lambda: len(list(folder.glob("failed*"))) == 2)
    for number in (2, 3, 4):
        with pytest.raises(phalanx.CollectiveMismatch, match=rf"\] all_reduce #{number} "):
            dist.all_reduce(torch.ones(4 if rank == 0 else 5))
    (folder / f"failed{rank}").touch()
    raise SystemExit(1)  # so that the job is kept


def test_records_of_a_broken_group(ranks: RankServer, jobs: Path) -> None:
    ended = ranks.start(3, call_mismatched_operations, jobs, timeout=None).join()
    assert [rank.code for rank in ended] == [1, 1, 1], ended[0].report()
    job = job_reader.read_job()
    own_file = os.path.basename(__file__)
    for rank in job.ranks:
        failed = [operation for operation in rank.history if operation.outcome != "ok"]
        # The first rejected operation is recorded, later attempts are not.
        assert len(failed) == (1 if rank.rank == 2 else 2)
        for operation in failed:
            assert (operation.kind, operation.outcome) == ("all_reduce", "mismatch")
            assert own_file in operation.site
        assert failed[0].sequence == 2
    diagnosis = diagnose(job)
    assert (diagnosis.kind, diagnosis.ranks) == ("tensor", (0,))


def exit_without_cleanup(base: Path) -> None:
    init(base)
    dist.destroy_process_group()
    os._exit(0)


def test_ranks_that_left_and_exited_without_cleanup(ranks: RankServer, jobs: Path) -> None:
    ranks.start(2, exit_without_cleanup, jobs, timeout=None).join()
    with job_directory.find_job() as job:
        assert job_reader.read_summary(job).state == "finished"


def form_groups_repeatedly(base: Path) -> tuple[str, int]:
    """Form one group after another; the second has the survivors and one new process."""
    rank = int(os.environ["RANK"])
    if rank < 3:
        init(base, "first", size=3)
        (job,) = base.iterdir()
        recorders = {int(path.stem) for path in job.glob("*.recorder")}
        dist.barrier()
        dist.destroy_process_group()
        assert os.getpid() in recorders
    if rank != 1:
        new_rank = {0: 0, 2: 1, 3: 2}[rank]
        if rank == 3:  # a new process that arrives first does not know the job of the others
            store = Path(os.environ["FOLDER"], "second")
            wait_for(lambda: store.exists() and b"phalanx/job" in store.read_bytes())
        init(base, "second", rank=new_rank, size=3)
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    (job,) = base.iterdir()
    (recorder,) = [path for path in job.glob("*.recorder") if path.stem == str(os.getpid())]
    return job.name, _native.read_flight_recorder(recorder.read_bytes(), 100)["operations"]


def test_a_process_has_one_recorder_and_one_job(ranks: RankServer, tmp_path: Path) -> None:
    found = ranks.run(4, form_groups_repeatedly, tmp_path / "jobs", timeout=None)
    assert len({name for name, _ in found}) == 1
    # joined, barrier; joined, all_reduce, barrier
    assert [operations for _, operations in found] == [5, 2, 5, 3]


def form_subgroups_of_a_gloo_job(base: Path) -> tuple[int, int, str]:
    os.environ["PHALANX_JOBS_DIR"] = str(base)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"file://{os.environ['FOLDER']}/store"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    parts = [[0, 1], [2], [3]]
    groups = [dist.new_group(part, backend="phalanx") for part in parts]
    own_group = next(g for g, part in zip(groups, parts, strict=True) if rank in part)
    dist.all_reduce(torch.ones(1), group=own_group)
    dist.barrier()
    with job_directory.find_job() as job:
        recorder = job.list_recorders()[os.getpid()]
        read = _native.read_flight_recorder(job.read(recorder, 2**30), 0)
    dist.barrier()
    return read["rank"], read["world_size"], read["job"]


def test_groups_in_a_job_of_another_backend(ranks: RankServer, tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    found = ranks.run(4, form_subgroups_of_a_gloo_job, base, timeout=None)
    assert [(rank, size) for rank, size, _ in found] == [(rank, 4) for rank in range(4)]
    assert len({job for _, _, job in found}) == 1
    assert list(base.iterdir()) == []


def form_a_group_in_a_forked_child(base: Path) -> None:
    init(base)
    (job,) = base.iterdir()
    dist.barrier()  # the child creates another job
    pid = os.fork()
    if pid == 0:
        dist.destroy_process_group()
        url = f"file://{os.environ['FOLDER']}/child-{os.getpid()}"
        dist.init_process_group("phalanx", init_method=url, rank=0, world_size=1)
        own = [path for path in base.glob("*/*.recorder") if path.stem == str(os.getpid())]
        os._exit(10 + len(own) if own and own[0].parent != job else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    dist.all_reduce(torch.ones(1))
    recorder = _native.read_flight_recorder((job / f"{os.getpid()}.recorder").read_bytes(), 100)
    assert [operation["kind"] for operation in recorder["done"]] == [
        "join",
        "barrier",
        "all_reduce",
    ]


def test_a_forked_child_has_its_own_recorder(ranks: RankServer, tmp_path: Path) -> None:
    ranks.run(2, form_a_group_in_a_forked_child, tmp_path / "jobs", timeout=None)


SPAWN = """
import sys, os, torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(number, folder, fail):
    url = f"file://{folder}/store"
    dist.init_process_group("phalanx", init_method=url, rank=number, world_size=2)
    dist.barrier()
    if fail and number == 1:
        raise KeyError("spawned")

if __name__ == "__main__":
    folder, method, fail = sys.argv[1:]
    mp.start_processes(rank, (folder, fail == "fail"), nprocs=2, start_method=method)
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ("spawn", "fork"))
@pytest.mark.parametrize("fail", ("fail", "end"))
def test_processes_started_by_multiprocessing(
    jobs: Path, tmp_path: Path, method: str, fail: str
) -> None:
    (tmp_path / "script.py").write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, "script.py", str(tmp_path), method, fail],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LIMIT,
    )
    if fail == "end":
        assert done.returncode == 0, done.stderr
        assert list(jobs.iterdir()) == []
        return
    assert done.returncode == 1
    assert "KeyError: 'spawned'" in done.stderr
    job = job_reader.read_job()
    assert job.command[0] == "script.py"
    assert (job.ranks[1].ending, job.ranks[1].exception) == ("failed", "KeyError: 'spawned'")


TORCHRUN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("phalanx")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getpid(), 9)
dist.barrier()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", ("none", "1"))
def test_torchrun(jobs: Path, tmp_path: Path, victim: str) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "script.py", victim),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    if victim == "none":
        assert done.returncode == 0, done.stderr
        assert list(jobs.iterdir()) == []
    else:
        job = job_reader.read_job()
        assert job.command == ("script.py", "1")
        assert job.ranks[1].ending == ""  # rank 0 may be stopped before it notices


@pytest.mark.slow
def test_torchrun_restarts(jobs: Path, tmp_path: Path) -> None:
    """All attempts share a store; the second must not use entries of the first."""
    (tmp_path / "script.py").write_text(
        TORCHRUN.replace('os.environ["RANK"]', 'os.environ["TORCHELASTIC_RESTART_COUNT"]')
        + 'os.write(1, b"finished %s\\n" % os.environ["TORCHELASTIC_RESTART_COUNT"].encode())\n'
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "script.py", "0"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished 1\n") == 2
