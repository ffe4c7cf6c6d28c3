"""Reading of a job's directory with valid, damaged and hostile flight recorders."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx import _native
from phalanx.diagnosis import job_reader
from phalanx.diagnosis.exit_reasons import determine_exit
from phalanx.diagnosis.flight_recorders import build_rank
from phalanx.diagnosis.model import Job
from phalanx.diagnosis.wait_for_graph import WaitForGraph
from phalanx.recorder import job_directory
from phalanx.recorder.job_directory import JobDirectory
from tests.job_directories import JobFixture, write_recorder
from tests.seeds import fresh_seed


def test_a_complete_job(job: JobFixture) -> None:
    found = job.read()
    assert (found.name, found.path, found.world_size) == (job.name, str(job.path), 2)
    assert found.problems == ()
    assert not found.running
    assert 0 < found.started <= time.time()
    assert found.command
    first, second = found.ranks
    assert (first.rank, first.host, first.ending, first.ended) == (0, "node-a", "", 0)
    assert (second.ending, second.exception) == ("failed", "ValueError: why")
    assert first.opened < second.ended <= found.now
    assert [(report.step, report.loss) for report in second.reports[:1]] == [(10, 0.5)]
    assert second.reports[1].loss != second.reports[1].loss
    assert second.note == "\x1b[2Ja note"  # unescaped, as it was written
    assert [(group.rank, group.members) for group in second.groups] == [(1, (0, 1))] * 2
    assert [operation.kind for operation in first.history] == ["join"]
    assert [operation.kind for operation in first.open] == ["join"]
    assert [operation.waiting_for for operation in first.history] == [1]
    assert [rank.process and rank.process.state for rank in found.ranks] == ["gone", "gone"]
    assert job.read(0).ranks[0].history == ()


def test_waits_are_found_without_a_job_directory(job: JobFixture) -> None:
    """A live rank reads the recorders of its peers and has no directory to read."""
    files = [job.get_recorder_path(number).read_bytes() for number in (0, 1)]
    ranks = [build_rank(_native.read_flight_recorder(data, 64)) for data in files]
    assert ranks[0].groups == job.read().ranks[0].groups
    graph = WaitForGraph(Job("", "", ranks=tuple(ranks), world_size=2, now=time.monotonic_ns()))
    assert graph.waits[0].operation.kind == "join"


def test_reading_changes_nothing(job: JobFixture) -> None:
    def state() -> object:
        return sorted((p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in job.path.iterdir())

    before = state()
    with JobDirectory(str(job.path.parent), job.name) as held:
        held.lock_shared()
        job.read()
        with job_directory.find_job(job.name) as found:
            assert job_reader.read_summary(found).state == "running"
    assert state() == before


def replace_recorder(recorder: Path, kind: str) -> None:
    data = recorder.read_bytes()
    recorder.unlink()
    if kind == "a FIFO":
        os.mkfifo(recorder)
    elif kind == "a symbolic link":
        recorder.with_name("aside").write_bytes(data)
        recorder.symlink_to("aside")
    elif kind == "a dangling link":
        recorder.symlink_to("nowhere")
    elif kind == "a link to a device":
        recorder.symlink_to("/dev/zero")
    elif kind == "a directory":
        recorder.mkdir()
    elif kind == "a device":
        os.mknod(recorder, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(recorder))
    elif kind == "a sparse file of 1 GiB":
        with recorder.open("wb") as file:
            file.truncate(2**30)
    elif kind == "empty":
        recorder.write_bytes(b"")
    elif kind == "half":
        recorder.write_bytes(data[: len(data) // 2])
    elif kind == "longer":
        recorder.write_bytes(data + b"x")
    elif kind == "not a recorder":
        recorder.write_bytes(b"x" * len(data))
    elif kind == "zeros":
        recorder.write_bytes(bytes(len(data)))
    elif kind == "of another version":
        recorder.write_bytes(data[:8] + (77).to_bytes(4, "little") + data[12:])
    elif kind == "of another process":
        recorder.write_bytes(next(p for p in recorder.parent.glob("*.recorder")).read_bytes())


HOSTILE = [
    ("a FIFO", "is a FIFO, expected a file"),
    ("a symbolic link", "is a symbolic link, expected a file"),
    ("a dangling link", "is a symbolic link, expected a file"),
    ("a link to a device", "is a symbolic link, expected a file"),
    ("a directory", "is a directory, expected a file"),
    ("a socket", "is a socket, expected a file"),
    ("a sparse file of 1 GiB", "has 1073741824 bytes, expected at most"),
    ("empty", ""),
    ("half", ""),
    ("longer", ""),
    ("not a recorder", ""),
    ("zeros", ""),
    ("of another version", "77"),
    ("of another process", "it belongs to process"),
]
if os.geteuid() == 0:  # only root can create one
    HOSTILE.append(("a device", "is a device, expected a file"))


@pytest.mark.parametrize(("kind", "message"), HOSTILE)
def test_an_unusable_recorder(job: JobFixture, monkeypatch, kind: str, message: str) -> None:
    """The other ranks are read, the problem is named, and nothing is opened that could block."""
    monkeypatch.chdir(job.path)
    name = job.get_recorder_path(0).name
    replace_recorder(job.get_recorder_path(0), kind)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == [0, job.pids[1]]
    assert len(found.problems) == 1
    assert name in found.problems[0]
    assert message in found.problems[0]
    # If the launcher logged the process, the problem is that of its rank.
    job.log_event(event="start", rank=0, pid=job.pids[0], attempt=0, world_size=2)
    found = job.read()
    assert found.problems == ()
    assert (found.ranks[0].pid, found.ranks[0].opened) == (job.pids[0], 0)
    assert name in found.ranks[0].problem
    with job_directory.find_job(job.name) as directory:
        assert job_reader.read_summary(directory).state == "failed"


def test_recorders_with_arbitrary_bytes(job: JobFixture) -> None:
    """A damaged recorder is read, or its problem is named."""
    generator = random.Random(fresh_seed())
    whole = job.get_recorder_path(0).read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 10, 1000))):
            # Most of the file is empty, so the used parts are hit more often.
            end = generator.choice((400, 4096 + 800, 60_000, len(data)))
            data[generator.randrange(8, end)] = generator.randrange(256)
        if generator.random() < 0.1:
            del data[generator.randrange(len(data)) :]
        job.get_recorder_path(0).write_bytes(data)
        found = job.read()
        json.dumps([repr(rank) for rank in found.ranks])
        # A changed attempt may be greater, and then only that recorder counts. A world size beyond
        # the limit is a problem of its own.
        assert found.ranks[0].pid == job.pids[0] or found.problems or found.attempt > 0


def test_a_process_that_ends_while_its_records_are_read(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, find_process = job.pids[0], job_reader._find_process
    job.log_event(event="start", rank=0, pid=pid, world_size=2)

    def end_and_find(*arguments: Any) -> Any:
        job.log_event(event="end", rank=0, pid=pid, code=0, stopped=False)
        return find_process(*arguments)

    monkeypatch.setattr(job_reader, "_find_process", end_and_find)
    found = job.read()
    assert determine_exit(found.ranks[0], found).reason == "completed"


def test_two_recorders_of_one_rank(job: JobFixture) -> None:
    """A rank's child process may have a recorder; otherwise a rank without one is named."""
    pid = write_recorder(job.path, 1)
    assert job.read().problems == ()
    job.get_recorder_path(0).unlink()
    names = " and ".join(sorted((f"{pid}.recorder", f"{job.pids[1]}.recorder")))
    assert job.read().problems == (f"{names} belong to rank 1, and none belongs to rank 0",)


def test_ranks_outside_of_the_job(job: JobFixture) -> None:
    for rank, pid in enumerate(job.pids):
        job.log_event(event="start", rank=rank, pid=pid, attempt=0, world_size=2)
    pids = write_recorder(job.path, 7, size=8), write_recorder(job.path, -1)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == job.pids
    assert found.problems == (
        f"{pids[0]}.recorder belongs to rank 7, but the job has 2 ranks",
        f"{pids[1]}.recorder: damaged: rank -1 of 2, attempt 0",
    )


def test_recorders_with_different_world_sizes(job: JobFixture) -> None:
    """Without a launcher's log, the greatest world size counts, and the difference is reported."""
    other = write_recorder(job.path, 2, size=5)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == [*job.pids, other, 0, 0]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("flight recorders have different world sizes: 2 in ")
    assert found.problems[0].endswith(f".recorder, 5 in {other}.recorder")


def test_readers_and_writers_at_once(job: JobFixture) -> None:
    """A reader sees only complete records while a process writes."""
    stop = threading.Event()
    fd = os.open(job.path / f"{os.getpid()}.recorder", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, _native.flight_recorder_bytes())
    _native.open_flight_recorder(fd, 0, 2, 0, "here", job.name)

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            _native.report(step, float(step), f"step {step}")
            _native.GroupFormation(f"{step}", 0, 2, "0-1").end("ok")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        for _ in range(100):
            rank = job.read(50).ranks[0]
            assert rank.pid == os.getpid()
            assert all(report.loss == report.step for report in rank.reports)
            steps = [report.step for report in rank.reports]
            assert steps == sorted(steps)
            assert not steps or steps[-1] >= last
            last = steps[-1] if steps else last
            assert all(operation.end >= operation.begin > 0 for operation in rank.history)
    finally:
        stop.set()
        writer.join()
        _native.detach_flight_recorder()
        os.close(fd)
    assert last > 0
