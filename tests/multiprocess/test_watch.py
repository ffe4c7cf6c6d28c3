"""`phalanx watch` and `phalanx trace` with jobs that run, end and fail."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.diagnosis.job_reader import read_job
from phalanx.diagnosis.watch import View, build_view
from tests import copies, perfetto_reader
from tests.ranks import RankServer, RunningRanks

LIMIT = 60.0
DELAY = 0.1
SLOW = 1
PHALANX = [copies.PHALANX]


def wait_until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {description}"
        time.sleep(0.05)


def train(jobs: str, stop: str) -> int:
    """Run steps in which rank 1 is late until the file `stop` exists; return their number."""
    os.environ["PHALANX_JOBS_DIR"] = jobs
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "phalanx",
        init_method=f"file://{os.environ['FOLDER']}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    step = 0
    going = torch.ones(1)
    while going.item():
        if rank == SLOW:
            time.sleep(DELAY)
        going[0] = not os.path.exists(stop)
        dist.all_reduce(going, dist.ReduceOp.MIN)
        work = dist.broadcast(torch.ones(100_000), src=0, async_op=True)
        if rank == 0:
            dist.send(torch.ones(3), dst=SLOW, tag=5)
        if rank == SLOW:
            dist.recv(torch.empty(3), src=0, tag=5)
        assert work is not None
        work.wait()
        step += 1
        phalanx.report(step=step, loss=1 / step)
    dist.destroy_process_group()
    return step


@contextmanager
def start_training(ranks: RankServer, jobs: Path, size: int) -> Iterator[RunningRanks]:
    """Start a job that trains; it ends at the latest with the context."""
    run = ranks.start(size, train, str(jobs), str(jobs) + ".stop", timeout=None)
    try:
        wait_until(lambda: jobs.is_dir() and any(jobs.iterdir()), "a job")
        wait_until(lambda: len(get_steps(read_view())) == size, "reports of all ranks")
        yield run
    finally:
        Path(str(jobs) + ".stop").touch()


def read_view() -> View:
    return build_view(read_job(None, 512))


def get_steps(view: View) -> list[int]:
    return [row.step for row in view.rows if row.step is not None]


def command(*arguments: str, code: int = 0) -> str:
    """Run a command of `phalanx` and return its stdout."""
    ended = subprocess.run(
        [*PHALANX, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def finish(run: RunningRanks, jobs: Path) -> list[int]:
    """Make the ranks end, and return the number of steps of each."""
    Path(str(jobs) + ".stop").touch()
    return [rank.value for rank in run.join(LIMIT)]


def test_an_injected_straggler_is_named(ranks: RankServer, jobs: Path) -> None:
    with start_training(ranks, jobs, 3) as run:
        wait_until(lambda: read_view().balance == "straggler", "a straggler")
        output = json.loads(command("watch", "--once", "--json"))
        assert output["straggler"]["rank"] == SLOW
        assert output["straggler"]["waiting"] == [0, 2]
        assert output["straggler"]["share"] > 0.3
        for row in output["ranks"]:
            assert row["state"] in ("running", "sleeping")
            assert row["memory"] > 2**20
            assert 0 < row["loss"] <= 1
            assert 0 < row["steps_per_second"] <= 1 / DELAY
        waiting = [row for row in output["ranks"] if row["rank"] != SLOW]
        assert all(max(row["waits"], key=row["waits"].get) == str(SLOW) for row in waiting)
        steps = finish(run, jobs)
    assert len(set(steps)) == 1, "watch has affected the job"


def test_the_timeline_distinguishes_waiting_from_working(
    ranks: RankServer, jobs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.pftrace"
    with start_training(ranks, jobs, 3) as run:
        wait_until(lambda: min(get_steps(read_view())) >= 10, "ten steps")
        out = command("trace", "-o", str(path))
        kept = read_job(None)
        finish(run, jobs)
    found = perfetto_reader.load(path.read_bytes())
    assert re.match(rf"{path}: 3 ranks, [\d,]+ operations, ", out)
    for rank in (0, 1, 2):
        shown = found.get_slices(rank)
        assert {one.arguments["outcome"] for one in shown} <= {"ok", "under way"}
        # At least the first ten steps are complete.
        known = {op.number: op for op in kept.ranks[rank].history}
        ended = [one for one in shown if one.end is not None]
        messages = 10 * (rank != 2)
        assert len(ended) >= 21 + messages
        assert sorted(number(one) for one in ended)[:20] == list(range(1, 21))
        for one in ended:
            op = known[number(one)]
            assert (one.begin, one.end) == (op.begin, op.end)
            assert one.name == op.kind
            assert Path(str(one.arguments["call site"])).name.startswith("test_watch.py:") or (
                op.kind == "join"
            )
        counters = {track.name: track.values for track in found.get_tracks(rank) if track.values}
        assert [value for _, value in counters["step"]][:10] == [float(i) for i in range(1, 11)]
        assert len(counters["loss"]) == len(counters["step"])
    # On a busy machine other ranks may be late too, so only the sum is checked.
    for rank in (0, 2):
        reduced = [one for one in found.get_slices(rank) if one.name == "all_reduce" and one.end][
            1:10
        ]
        waited: dict[str, float] = defaultdict(float)
        for one in reduced:
            for wait in one.children:
                waited[wait.name] += seconds(wait)
        assert max(waited, key=lambda name: waited[name]) == f"waiting for rank {SLOW}"
        assert sum(waited.values()) > len(reduced) * DELAY / 2
        work = sum(map(seconds, reduced)) - sum(waited.values())
        assert work < sum(waited.values())
    names = {track.name for track in found.get_tracks(0) if track.slices}
    assert names == {"caller's thread", "group's thread", "messages"}


def seconds(one: perfetto_reader.ParsedSlice) -> float:
    assert one.end is not None
    return (one.end - one.begin) / 1e9


def number(one: perfetto_reader.ParsedSlice) -> int:
    value = one.arguments["operation"]
    assert isinstance(value, int)
    return value


@pytest.mark.slow
def test_watch_ends_with_the_job(ranks: RankServer, jobs: Path) -> None:
    with start_training(ranks, jobs, 2) as run:
        watch = subprocess.Popen(
            [*PHALANX, "watch", "--json", "--interval", "0.2"], stdout=subprocess.PIPE, text=True
        )
        assert watch.stdout is not None
        first = json.loads(watch.stdout.readline())
        finish(run, jobs)
    rest, _ = watch.communicate(timeout=LIMIT)
    readings = [first, *map(json.loads, rest.splitlines())]
    assert first["running"]
    assert watch.returncode == 0
    assert {one["job"] for one in readings} == {first["job"]}


@pytest.mark.slow
def test_watch_reports_how_a_job_failed(ranks: RankServer, jobs: Path) -> None:
    with (
        start_training(ranks, jobs, 2) as run,
        Terminal("watch", "--interval", "0.2") as terminal,
    ):
        wait_until(lambda: "Rank 1 delays the others" in terminal.get_output(), "a table")
        run.signal(SLOW, signal.SIGKILL)
        wait_until(terminal.has_ended, "the end of watch")
        run.collect()
        assert terminal.process.returncode == 1
        *table, last = [line for line in terminal.get_final_lines() if line]
    assert re.match(r"Job \S+ failed: rank \d \(pid \d+\) .*\. See: phalanx explain", last)
    assert any(re.match(r" +1 .* (was in|after) ", line) for line in table), table


@pytest.mark.slow
def test_ctrl_c_stops_watch_and_not_the_job(ranks: RankServer, jobs: Path) -> None:
    with start_training(ranks, jobs, 2) as run:
        with Terminal("watch", "--interval", "0.2") as terminal:
            wait_until(lambda: "Rank 1 delays the others" in terminal.get_output(), "a table")
            terminal.process.send_signal(signal.SIGINT)
            wait_until(terminal.has_ended, "the end of watch")
            assert terminal.process.returncode == 0
            assert "the job continues" in terminal.get_final_lines()[0]
        before = min(get_steps(read_view()))
        wait_until(lambda: min(get_steps(read_view())) > before, "more steps")
        assert len(set(finish(run, jobs))) == 1


class Terminal:
    """A command of `phalanx` in a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [*PHALANX, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self._written = bytearray()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def get_output(self) -> str:
        """Return the output so far."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                self._written += os.read(self._master, 1 << 16)
            except OSError:  # the command has ended, and all output is read
                break
        return self._written.decode(errors="replace")

    def get_final_lines(self) -> list[str]:
        """Return the lines that remain on the screen after the end, without styles."""
        usual = self.get_output().rpartition("\x1b[?1049l")[2]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", usual).replace("\r", "").split("\n")

    def has_ended(self) -> bool:
        """Return whether the command has ended; read its output, so that it can write."""
        self.get_output()
        return self.process.poll() is not None


@pytest.mark.slow
def test_a_missing_job_is_named(jobs: Path) -> None:
    for name in ("watch", "trace"):
        ended = subprocess.run(
            [*PHALANX, name, "20200101"], capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert ended.returncode == 2
        assert ended.stderr.startswith("phalanx: error: ")
        assert "20200101" in ended.stderr
        assert "Traceback" not in ended.stderr
