"""Reading a job's directory, whatever lies in place of its flight recorders."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from phalanx import _native
from phalanx.observe import job_lookup, job_reader
from phalanx.observe.job_directory import JobDirectory
from tests.made_jobs import Made, write_box


def test_a_job_as_it_should_be(job: Made) -> None:
    found = job.read()
    assert (found.name, found.path, found.world_size) == (job.name, str(job.path), 2)
    assert found.problems == ()
    assert not found.running
    assert abs(found.started - time.time()) < 60
    assert found.command
    first, second = found.ranks
    assert (first.rank, first.host, first.ending, first.ended) == (0, "node-a", "", 0)
    assert (second.ending, second.exception) == ("failed", "ValueError: why")
    assert first.opened < second.ended <= found.now
    assert [(report.step, report.loss) for report in second.reports[:1]] == [(10, 0.5)]
    assert second.reports[1].loss != second.reports[1].loss
    assert second.note == "\x1b[2Ja note"  # as it was written: who prints it escapes it
    assert [(group.rank, group.members) for group in second.groups] == [(1, (0, 1))] * 2
    assert [operation.kind for operation in first.history] == ["join"]
    assert [operation.kind for operation in first.open] == ["join"]
    assert [operation.waiting_for for operation in first.history] == [1]
    assert [rank.process and rank.process.state for rank in found.ranks] == ["gone", "gone"]
    assert job.read(0).ranks[0].history == ()


def test_reading_changes_nothing(job: Made) -> None:
    def state() -> object:
        return sorted((p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in job.path.iterdir())

    before = state()
    with JobDirectory(str(job.path.parent), job.name) as held:
        held.lock_shared()
        job.read()
        with job_lookup.find_job(job.name) as found:
            assert job_reader.read_summary(found).state == "running"
    assert state() == before


def replaced(box: Path, how: str) -> None:
    data = box.read_bytes()
    box.unlink()
    if how == "a FIFO":
        os.mkfifo(box)
    elif how == "a symbolic link":
        box.with_name("aside").write_bytes(data)
        box.symlink_to("aside")
    elif how == "a dangling link":
        box.symlink_to("nowhere")
    elif how == "a link to a device":
        box.symlink_to("/dev/zero")
    elif how == "a directory":
        box.mkdir()
    elif how == "a device":
        os.mknod(box, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    elif how == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(box))
    elif how == "a sparse file of 1 GiB":
        with box.open("wb") as file:
            file.truncate(2**30)
    elif how == "empty":
        box.write_bytes(b"")
    elif how == "half":
        box.write_bytes(data[: len(data) // 2])
    elif how == "longer":
        box.write_bytes(data + b"x")
    elif how == "no box":
        box.write_bytes(b"x" * len(data))
    elif how == "zeros":
        box.write_bytes(bytes(len(data)))
    elif how == "of another version":
        box.write_bytes(data[:8] + (77).to_bytes(4, "little") + data[12:])
    elif how == "another's":
        box.write_bytes(next(p for p in box.parent.glob("*.box")).read_bytes())


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
    ("no box", ""),
    ("zeros", ""),
    ("of another version", "77"),
    ("another's", "it is that of process"),
]
if os.geteuid() == 0:  # who alone can make one
    HOSTILE.append(("a device", "is a device, expected a file"))


@pytest.mark.parametrize(("how", "message"), HOSTILE)
def test_a_box_that_is_none(job: Made, monkeypatch, how: str, message: str) -> None:
    """The other ranks are read, and the problem is named; nothing is opened that could wait."""
    monkeypatch.chdir(job.path)
    name = job.box(0).name
    replaced(job.box(0), how)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == [0, job.pids[1]]
    assert len(found.problems) == 1
    assert name in found.problems[0]
    assert message in found.problems[0]
    # Where the launcher knows whose it is, the rank has the problem.
    job.note(event="start", rank=0, pid=job.pids[0], attempt=0, world_size=2)
    found = job.read()
    assert found.problems == ()
    assert (found.ranks[0].pid, found.ranks[0].opened) == (job.pids[0], 0)
    assert name in found.ranks[0].problem
    with job_lookup.find_job(job.name) as directory:
        assert job_reader.read_summary(directory).state == "failed"


def test_boxes_with_any_bytes_in_them(job: Made) -> None:
    """Whatever is wrong with a box, it is read or it is named."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    whole = job.box(0).read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(dice.choice((1, 10, 1000))):
            # Most of it is empty: where something stands is hit more often.
            end = dice.choice((400, 4096 + 800, 60_000, len(data)))
            data[dice.randrange(8, end)] = dice.randrange(256)
        if dice.random() < 0.1:
            del data[dice.randrange(len(data)) :]
        job.box(0).write_bytes(data)
        found = job.read()
        json.dumps([repr(rank) for rank in found.ranks])
        # The attempt is a number that may be any: then the box that has the greater one counts. Of
        # a world size beyond all bounds there is a word besides that of the box.
        assert found.ranks[0].pid == job.pids[0] or found.problems or found.attempt > 0


def test_two_boxes_of_one_rank(job: Made) -> None:
    """A process that a rank has started may have one; else a rank that has none is named."""
    pid = write_box(job.path, 1)
    assert job.read().problems == ()
    job.box(0).unlink()
    names = " and ".join(sorted((f"{pid}.box", f"{job.pids[1]}.box")))
    assert job.read().problems == (f"{names} say that they are of rank 1, and none is of rank 0",)


def test_a_rank_that_the_job_does_not_have(job: Made) -> None:
    for rank, pid in enumerate(job.pids):
        job.note(event="start", rank=rank, pid=pid, attempt=0, world_size=2)
    pids = write_box(job.path, 7, size=8), write_box(job.path, -1)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == job.pids
    assert found.problems == (
        f"{pids[0]}.box says that it is of rank 7, and the job has 2 ranks",
        f"{pids[1]}.box: damaged: rank -1 of 2, attempt 0",
    )


def test_a_job_whose_boxes_are_not_of_one_size(job: Made) -> None:
    """Without a launcher's word they are all there is: the greatest counts, and it is said."""
    other = write_box(job.path, 2, size=5)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == [*job.pids, other, 0, 0]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("flight recorders don't agree on the job's size: ")
    assert found.problems[0].endswith(f".box of 2 ranks, {other}.box of 5 ranks")


def test_readers_and_writers_at_once(job: Made) -> None:
    """A reader sees whole records or none while a process writes."""
    stop = threading.Event()
    fd = os.open(job.path / f"{os.getpid()}.box", os.O_RDWR | os.O_CREAT, 0o600)
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
