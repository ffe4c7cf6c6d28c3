"""Dumps of PyTorch's Flight Recorder: what they say of a job, and what is no dump."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.diagnosis.explain import as_json, as_text
from phalanx.diagnosis.kinds import Diagnosis, diagnose
from phalanx.diagnosis.torch_dumps import HISTORY
from phalanx.diagnosis.torch_jobs import read_dumps
from phalanx.usage_errors import UsageError
from tests.torch_dumps import SECOND, DumpBuilder


@pytest.fixture
def job() -> DumpBuilder:
    """A job of four ranks, after three collectives."""
    builder = DumpBuilder(4)
    for line in (5, 6, 7):
        builder.call(range(4), done=True, line=line)
    return builder


def explain(builder: DumpBuilder, folder: Path) -> Diagnosis:
    found = read_dumps(str(builder.write(folder)))
    assert as_text(found).startswith("Dumps of PyTorch's Flight Recorder (4 ranks): ")
    json.dumps(as_json(found))
    return diagnose(found)


def test_a_rank_in_its_own_code(job: DumpBuilder, tmp_path: Path) -> None:
    diagnosis = explain(job.call((0, 1, 3), line=9), tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (2,))
    first, doubt, second = diagnosis.describe()
    assert doubt.startswith("Or it has ended, which dumps do not show: look at its exit code and ")
    assert "own code for 30 s (since " in first
    assert "after all_reduce #3 float32[8] at train.py:7" in first
    assert second.startswith("Ranks 0, 1, 3 have waited for rank 2 in all_reduce #4 float32[8] at ")
    assert "for 30 s" in second


def test_another_branch(job: DumpBuilder, tmp_path: Path) -> None:
    diagnosis = explain(job.call((0, 1, 3), line=9).call([2], "broadcast", line=11), tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (2,))
    assert "it called broadcast #4 float32[8] at train.py:11" in diagnosis.describe()[0]


@pytest.mark.parametrize("other", [{"size": 3}, {"dtype": "Half"}])
def test_another_tensor(job: DumpBuilder, tmp_path: Path, other: Any) -> None:
    diagnosis = explain(job.call((0, 1, 2), line=9).call([3], line=9, **other), tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("tensor", (3,))


def test_groups_in_another_order(job: DumpBuilder, tmp_path: Path) -> None:
    job.add_group("1", [0, 1])
    job.call((0, 1), group="1", done=True)
    job.call([0], group="1", line=20).call([1, 2, 3], line=21)
    diagnosis = explain(job, tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("order", (0,))
    assert "rank 0 is in all_reduce #2 float32[8] in group" in diagnosis.describe()[0]


def make_gloo_job(size: int) -> DumpBuilder:
    """Return a job with a group `1` whose members are unknown, as in dumps of Gloo."""
    job = DumpBuilder(size, "gloo")
    job.add_group("1", [])
    for config in job.config.values():
        config["ranks"] = "[]"
    return job.call(range(size), done=True)


@pytest.mark.parametrize("first", [True, False])
def test_a_group_of_which_nobody_else_is_known(tmp_path: Path, first: bool) -> None:
    job = make_gloo_job(4)
    if first:  # rank 1 is in its own code, and rank 2 waits for it
        job.call([2], group="1", line=20).call([0, 3], line=21)
    else:
        job.call([0, 3], line=21).call([2], group="1", line=20)
    diagnosis = explain(job, tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (1,))


def test_a_cycle_through_a_group_whose_members_are_unknown(tmp_path: Path) -> None:
    job = make_gloo_job(4).call([2], group="1", line=20).call([0, 1, 3], line=21)
    diagnosis = explain(job, tmp_path)
    assert diagnosis.kind == "order"
    assert 2 in diagnosis.ranks
    assert "waits for some of ranks 0, 1, 3" in as_text(read_dumps(str(tmp_path)))


def test_a_message_that_nobody_sends(job: DumpBuilder, tmp_path: Path) -> None:
    diagnosis = explain(job.call([1], "recv 1<-3", line=30), tmp_path)
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (3,))
    assert "rank 1 has waited for rank 3 in recv float32[8] from rank 3" in " ".join(
        diagnosis.describe()
    ).replace("Rank", "rank")


def test_a_healthy_job(job: DumpBuilder, tmp_path: Path) -> None:
    assert explain(job, tmp_path).kind == "running"


def test_a_rank_without_a_dump(job: DumpBuilder, tmp_path: Path) -> None:
    job.call((0, 1, 3), line=9).write(tmp_path)
    (tmp_path / "nccl_trace_rank_2").unlink()
    found = read_dumps(str(tmp_path))
    diagnosis = diagnose(found)
    assert (diagnosis.kind, diagnosis.ranks) == ("unreadable", (2,))
    assert "it has left no dump" in as_text(found)


def test_clocks_of_hosts_differ(job: DumpBuilder, tmp_path: Path) -> None:
    job.call((0, 1, 3), line=9)
    for rank in (1, 3):
        for entry in job.entries[rank]:
            entry["time_created_ns"] -= 7200 * SECOND
    job.write(tmp_path)
    for rank in (1, 3):
        os.utime(tmp_path / f"nccl_trace_rank_{rank}", ns=(job.time - 7170 * SECOND,) * 2)
    diagnosis = diagnose(read_dumps(str(tmp_path)))
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (2,))
    assert "for 30 s" in diagnosis.describe()[2]


def test_a_group_that_was_used_long_ago(tmp_path: Path) -> None:
    job = DumpBuilder(2)
    job.add_group("1", [0, 1])
    job.call((0, 1), group="1", done=True)
    for _ in range(2 * HISTORY):
        job.call((0, 1), done=True)
    found = read_dumps(str(job.write(tmp_path)))
    assert [group.sequence for group in found.ranks[1].groups] == [1, 2 * HISTORY]


def test_only_the_newest_operations_are_read(tmp_path: Path) -> None:
    job = DumpBuilder(2)
    for _ in range(2 * HISTORY):
        job.call((0, 1), done=True)
    found = read_dumps(str(job.call([1], line=9).write(tmp_path)))
    assert [len(rank.records) for rank in found.ranks] == [HISTORY, HISTORY]
    assert [rank.operations for rank in found.ranks] == [2 * HISTORY, 2 * HISTORY + 1]
    assert diagnose(found).ranks == (0,)


def test_many_dumps_are_read_by_several_processes(tmp_path: Path) -> None:
    job = DumpBuilder(40)
    job.call(range(40), done=True).call([rank for rank in range(40) if rank != 7], line=9)
    job.write(tmp_path)
    command = [sys.executable, "-m", "phalanx", "explain", "--json", "--dumps", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert (found["diagnosis"]["kind"], found["diagnosis"]["ranks"]) == ("busy", [7])
    assert len(found["ranks"]) == 40


def test_a_file_that_is_too_large(
    job: DumpBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.diagnosis.torch_dumps.MAX_BYTES", 99)
    with pytest.raises(UsageError, match=r"it has \d+ B, and at most 99 are read"):
        read_dumps(str(job.write(tmp_path)))


def test_json_and_a_path_with_a_prefix(job: DumpBuilder, tmp_path: Path) -> None:
    job.call((0, 1, 3), line=9).write(tmp_path, prefix="first_")
    for rank in range(4):
        content = job.get_content(rank)
        for entry in content["entries"]:
            del entry["frames"]
        (tmp_path / f"second{rank}.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"several jobs: first_N \(4 files\), secondN \(4 files\)"):
        read_dumps(str(tmp_path))
    for prefix in ("first_", "second"):
        diagnosis = diagnose(read_dumps(f"{tmp_path}/{prefix}"))
        assert (diagnosis.kind, diagnosis.ranks) == ("busy", (2,))


class Attack:
    """A malicious pickle, which would run code when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"hello", "it is damaged"),
    "truncated": (pickle.dumps({"entries": [], "version": "2.9"})[:-9], "it is damaged"),
    "list": (pickle.dumps([1]), "it has no entries"),
    "another format": (pickle.dumps({"entries": [], "version": "3.0"}), "its format is 3.0"),
    "an entry": (pickle.dumps({"entries": [{}], "version": "2.9"}), "its entry 1 is damaged"),
    "attack": (pickle.dumps({"entries": [Attack()], "version": "2.9"}), "asks for posix.mkdir"),
    "not JSON": (b'{"entries": [', "Expecting value"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_dump(
    kind: str, job: DumpBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reason = BAD[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace0").write_bytes(data)
    with pytest.raises(UsageError, match=f"no dump in .* can be read: its dump trace0 .*{reason}"):
        read_dumps(str(tmp_path))
    # What the other ranks say is said even so.
    job.call((0, 1, 3), line=9).write(tmp_path, prefix="trace")
    (tmp_path / "trace2").write_bytes(data)
    found = read_dumps(str(tmp_path))
    assert reason in found.ranks[2].problem
    assert diagnose(found).ranks == (2,)
    assert not (tmp_path / "attacked").exists()


def test_files_that_are_no_dumps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_dumps(str(tmp_path / "nothing" / "here"))
    (tmp_path / "readme.txt").write_text("no dump")
    with pytest.raises(UsageError, match="there are no dumps in"):
        read_dumps(str(tmp_path))
    (tmp_path / "trace1").write_text("1")
    (tmp_path / "trace01").write_text("1")
    with pytest.raises(UsageError, match="two dumps of rank 1, trace01 and trace1"):
        read_dumps(str(tmp_path))
    (tmp_path / "trace01").rename(tmp_path / "trace9999999")
    with pytest.raises(UsageError, match="is of rank 9999999: at most 65536"):
        read_dumps(str(tmp_path))
