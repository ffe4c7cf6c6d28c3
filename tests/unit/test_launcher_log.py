"""Reading of a job's description, its launcher's log, and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from phalanx.diagnosis import explain, job_reader
from phalanx.diagnosis.job_reader import read_process_stat
from phalanx.diagnosis.model import Job
from phalanx.recorder import job_directory
from phalanx.recorder.job_directory import JobDirectory, get_pid_scope
from tests.job_directories import JobFixture, start_live_rank, write_recorder


def test_the_launchers_log(job: JobFixture) -> None:
    first, second = job.pids
    job.log_event(event="start", rank=0, pid=first, attempt=0, world_size=2, time=100.0)
    job.log_event(event="start", rank=1, pid=second, attempt=0, world_size=2, time=101.0)
    job.log_event(event="end", rank=1, pid=second, code=None, stopped=False, time=102.0)
    job.log_event(event="end", rank=1, pid=second, code=-9, stopped=False, time=103.0)
    job.log_event(event="end", rank=0, pid=first, code=-15, stopped=True, time=104.0)
    job.log_event(event="finish", code=137)
    found = job.read()
    assert found.code == 137
    starts = [rank.start for rank in found.ranks]
    assert [(s.pid, s.time, s.ended, s.code, s.stopped) for s in starts if s] == [
        (first, 100.0, 104.0, -15, True),
        (second, 101.0, 102.0, -9, False),
    ]


def test_the_newest_attempt_counts(job: JobFixture) -> None:
    """The second attempt has three ranks, one without a recorder; the first attempt is ignored."""
    for rank, pid in enumerate(job.pids):
        job.log_event(event="start", rank=rank, pid=pid, attempt=0, world_size=2)
    job.log_event(event="end", rank=0, pid=job.pids[0], code=1, stopped=False)
    new = [write_recorder(job.path, rank, attempt=1) for rank in (0, 1)]
    for rank, pid in enumerate([*new, os.getpid()]):
        job.log_event(event="start", rank=rank, pid=pid, attempt=1, world_size=3)
    job.log_event(event="end", rank=1, pid=job.pids[1], code=-15, stopped=True)  # a late one
    found = job.read()
    assert (found.attempt, found.world_size, found.problems) == (1, 3, ())
    assert [rank.pid for rank in found.ranks] == [*new, os.getpid()]
    assert [bool(rank.opened) for rank in found.ranks] == [True, True, False]
    assert [rank.start.code for rank in found.ranks if rank.start] == [None, None, None]
    assert found.running


def test_replaced_processes_are_counted(job: JobFixture) -> None:
    for rank, pid in enumerate(job.pids):
        job.log_event(event="start", rank=rank, pid=pid, attempt=0, world_size=2)
    job.log_event(event="end", rank=1, pid=job.pids[1], code=-9, stopped=False, time=102.0)
    new = write_recorder(job.path, 1)
    job.log_event(event="start", rank=1, pid=new, attempt=0, world_size=2)
    found = job.read()
    assert [rank.pid for rank in found.ranks] == [job.pids[0], new]
    (replaced,) = found.replaced
    assert (replaced.rank, replaced.start.pid, replaced.start.code) == (1, job.pids[1], -9)
    assert found.problems == ()
    with job_directory.find_job(job.name) as directory:
        assert job_reader.read_summary(directory).replaced == 1
    text = explain.as_text(found)
    assert f"Earlier, rank 1 (pid {job.pids[1]}) was killed by SIGKILL at " in text
    assert ", 1 replaced" in text
    assert explain.as_json(found)["job"]["replaced"] == [
        {"rank": 1, "pid": job.pids[1], "code": -9, "ended": 102.0}
    ]


def test_attempts_without_a_launcher(job: JobFixture) -> None:
    new = write_recorder(job.path, 1, attempt=3)
    found = job.read()
    assert found.attempt == 3
    assert [rank.pid for rank in found.ranks] == [0, new]


def test_a_recorder_of_a_ranks_child_process_is_not_the_ranks(job: JobFixture) -> None:
    for rank, pid in enumerate(job.pids):
        job.log_event(event="start", rank=rank, pid=pid, attempt=0, world_size=2)
    other = write_recorder(job.path, 0)
    assert [rank.pid for rank in job.read().ranks] == job.pids
    job.get_recorder_path(0).unlink()
    assert [rank.pid for rank in job.read().ranks] == [other, job.pids[1]]


DAMAGED_JOB = [
    (b"", "job.json is damaged"),
    (b"{", "job.json is damaged"),
    (b"\xff\xfe\x00", "job.json is damaged"),
    (b"[" * 200_000, "job.json is damaged"),
    (b"[]", "job.json has another version, expected 1"),
    (b'{"version": 2}', "job.json has another version, expected 1"),
    (b"9" * 100_000, "job.json is"),
    (b" " * (4 * 2**20), "job.json has 4194304 bytes, expected at most"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED_JOB, ids=range(len(DAMAGED_JOB)))
def test_a_damaged_description(job: JobFixture, data: bytes, message: str) -> None:
    (job.path / "job.json").write_bytes(data)
    found = job.read()
    assert message in found.problems[0]
    assert [rank.pid for rank in found.ranks] == job.pids
    with job_directory.find_job(job.name) as directory:
        assert message in job_reader.read_summary(directory).problems[0]


def test_a_description_with_invalid_values(job: JobFixture) -> None:
    hostile = {
        "version": 1,
        "command": ["\x1b[2J", "\ud800", 7, None],
        "started": 1e999,
        "world_size": 10**30,
        "hosts": -1,
        "launcher": True,
        "pid_scope": {"host": 7, "boot": [], "pids": {}},
    }
    (job.path / "job.json").write_text(json.dumps(hostile))
    found = job.read()
    assert (found.command, found.started) == (("\x1b[2J", "\ud800"), 0.0)
    assert [rank.pid for rank in found.ranks] == job.pids
    for recorder in job.path.glob("*.recorder"):
        recorder.unlink()
    (job.path / "job.json").write_text(json.dumps({**hostile, "world_size": 2**31 - 1}))
    found = job.read()
    assert len(found.ranks) == 65536
    assert "has 2147483647 ranks" in found.problems[0]


def test_a_damaged_launcher_log(job: JobFixture) -> None:
    job.log_event(event="start", rank=0, pid=job.pids[0], attempt=0, world_size=2)
    bad: list[object] = [
        b"{",
        b"\xff",
        b"[" * 100_000,
        [],
        {"event": "start"},
        {"event": "start", "rank": -1, "pid": 5},
        {"event": "start", "rank": 0, "pid": 10**20},
        {"event": "start", "rank": 0, "pid": True},
        {"event": "finish", "code": "0"},
        {"event": "\x1b[2J", "rank": 0, "pid": 5},
    ]
    with (job.path / "launcher.jsonl").open("ab") as file:
        for line in bad:
            file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
    job.log_event(event="end", rank=0, pid=job.pids[0], code=3, stopped=False)
    with (job.path / "launcher.jsonl").open("ab") as file:
        file.write(b'{"event": "fin')  # being written
    found = job.read()
    assert found.problems == (f"launcher.jsonl: {len(bad)} lines are damaged",)
    assert found.code is None
    assert found.ranks[0].start is not None
    assert found.ranks[0].start.code == 3


def test_missing_files(job: JobFixture) -> None:
    for path in job.path.iterdir():
        path.unlink()
    found = job.read()
    assert (found.ranks, found.problems) == ((), ("job.json is missing",))
    with job_directory.find_job(job.name) as directory:
        assert job_reader.read_summary(directory).state == "failed"


def test_a_job_on_several_hosts(job: JobFixture) -> None:
    found = json.loads((job.path / "job.json").read_text())
    (job.path / "job.json").write_text(json.dumps({**found, "hosts": 2}))
    assert job.read().problems == (
        "the job runs on 2 hosts: only the ranks of this host are shown",
    )


def read_from_other_scope(job: JobFixture, **other: object) -> Job:
    found = json.loads((job.path / "job.json").read_text())
    found["pid_scope"] = {**get_pid_scope(), **other}
    (job.path / "job.json").write_text(json.dumps(found))
    return job.read()


def test_pids_of_other_machines_and_namespaces_are_not_looked_up(job: JobFixture) -> None:
    live = start_live_rank(job.path)
    try:
        assert job.read().ranks[0].process is not None
        assert job.read().running
        # The same pid in another namespace; the lock of the directory is visible from here too.
        assert read_from_other_scope(job, pids=1).running is False
        with JobDirectory(str(job.path.parent), job.name) as held:
            held.lock_shared()
            assert [rank.process for rank in read_from_other_scope(job, pids=1).ranks] == [
                None,
                None,
            ]
            assert [
                rank.process for rank in read_from_other_scope(job, boot="x", host="y").ranks
            ] == [
                None,
                None,
            ]
        # This machine before a reboot: the pids are gone, and the clock had another origin.
        found = read_from_other_scope(job, boot="another")
        assert not found.running
        since = (found.now - found.ranks[1].ended) / 1e9
        assert 0 < since < 600
    finally:
        live.kill()
        live.communicate()


def test_a_reused_pid_is_another_process(job: JobFixture) -> None:
    before = job.read().ranks[0].opened
    live = start_live_rank(job.path)
    try:
        assert job.read().ranks[0].process is not None
        assert job.read().ranks[0].is_gone is False
        # Change `opened`, as if the recorder had been opened long before the process started.
        recorder = job.path / f"{live.pid}.recorder"
        data, opened = recorder.read_bytes(), job.read().ranks[0].opened
        offset = data.index(opened.to_bytes(8, "little"))
        old = (before - 60 * 10**9).to_bytes(8, "little")
        recorder.write_bytes(data[:offset] + old + data[offset + 8 :])
        assert job.read().ranks[0].pid == job.pids[0]  # whose recorder is now the newer one
        job.get_recorder_path(0).unlink()
        assert job.read().ranks[0].pid == live.pid
        assert job.read().ranks[0].is_gone
    finally:
        live.kill()
        live.communicate()


def test_the_state_of_a_process() -> None:
    own = read_process_stat(os.getpid())
    assert own is not None
    assert own.process.state == "running"
    assert own.process.memory > 2**20
    assert own.age > 0
    child = subprocess.Popen(["sleep", "60"])
    try:
        deadline = time.monotonic() + 10
        while get_state(child.pid) != "sleeping" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert get_state(child.pid) == "sleeping"
        child.send_signal(19)
        while get_state(child.pid) != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert get_state(child.pid) == "stopped"
        child.kill()
        while get_state(child.pid) != "zombie" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert get_state(child.pid) == "zombie"
    finally:
        child.kill()
        child.wait(60)
    assert read_process_stat(child.pid) is None


def test_a_hidden_process_is_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("builtins.open", refuse)
    assert read_process_stat(1) is None


def get_state(pid: int) -> str:
    stat = read_process_stat(pid)
    return "none" if stat is None else stat.process.state
