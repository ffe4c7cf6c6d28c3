"""Records of PyTorch that ranks on other backends have kept in their job's directory."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx import torch_versions
from phalanx.diagnosis import model
from phalanx.diagnosis.exit_reasons import parse_group_error
from phalanx.diagnosis.explain import as_text
from phalanx.diagnosis.job_reader import read_job
from phalanx.diagnosis.kinds import Diagnosis, diagnose
from phalanx.diagnosis.model import Job
from phalanx.diagnosis.torch_jobs import end_failed_operations, merge
from phalanx.recorder import torch_recorder
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from phalanx.recorder.torch_recorder import VERSION
from tests.torch_dumps import SECOND, DumpBuilder

CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:28411"
)
TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 3000ms for recv operation to complete"
)
ABORTED = (
    "gloo::EnforceNotMet: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446"
    "] op.preamble.length <= op.nbytes. 400 vs 396"
)
NCCL_TIMED_OUT = (
    "c10::DistBackendError: [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated "
    "with exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, "
    "OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=3000) ran for 3080 milliseconds before "
    "timing out."
)
CLOCK = 1_795_000_000 * SECOND
"""Unix time minus monotonic time."""


class KeptJob:
    """A job of ranks on Gloo, which have ended, and its directory.

    If its launcher is alive, it has not finished the job.
    """

    def __init__(self, base: Path, dumps: DumpBuilder, *, has_launcher: bool = False) -> None:
        self._has_launcher = has_launcher
        launcher = os.getpid() if has_launcher else find_ended_process()
        with JobDirectory(str(base), make_job_name(), create=True) as job:
            job.write_description(dumps.size, launcher=launcher)
            self._path = Path(job.path)
        self._dumps = dumps
        self.heads: list[dict[str, Any]] = [
            {
                "version": VERSION,
                "rank": rank,
                "clock": CLOCK,
                "left": {},
                "call": None,
                "is_last": False,
                "exception": "",
            }
            for rank in range(dumps.size)
        ]
        self.pids = [find_ended_process() for _ in range(dumps.size)]
        self._events: list[dict[str, Any]] = [
            {"event": "start", "rank": rank, "pid": pid, "world_size": dumps.size, "time": 1.0}
            for rank, pid in enumerate(self.pids)
        ]

    def log(self, event: str, rank: int, after: float = 1.0, **values: Any) -> KeptJob:
        """Log an event of a rank, some seconds after the last call of the job."""
        time = self._dumps.time / SECOND + after
        event_values = {"event": event, "rank": rank, "pid": self.pids[rank], "time": time}
        self._events.append({**event_values, **values})
        return self

    def end(self, rank: int, code: int, error: str = "", after: float = 1.0) -> KeptJob:
        return self.log("end", rank, after, code=code, stopped=False, error=error)

    def stop(self, rank: int, code: int = -15, error: str = "") -> KeptJob:
        return self.log("end", rank, 5.0, code=code, stopped=True, error=error)

    def read(self) -> Job:
        ends = {each["rank"]: each["time"] for each in self._events if each["event"] == "end"}
        for own in self.heads:
            content, pid = self._dumps.get_content(own["rank"]), self.pids[own["rank"]]
            config = content.pop("pg_config")
            content["entries"] = [{**each, "frames": []} for each in content["entries"]]
            groups = {name: json.loads(each["ranks"]) for name, each in config.items()}
            head = {"groups": groups, "time": self._dumps.time - CLOCK, **own}
            file = self._path / f"{pid}.torch"
            file.write_bytes(json.dumps(head).encode() + b"\n" + pickle.dumps(content))
            last = min(self._dumps.time / SECOND + 0.5, ends.get(own["rank"], math.inf))
            os.utime(file, (last, last))
        text = "".join(json.dumps(event) + "\n" for event in self._events)
        finish = json.dumps({"event": "finish", "code": 1, "time": 2.0}) + "\n"
        log = text if self._has_launcher else text + finish
        (self._path / "launcher.jsonl").write_text(log)
        return read_job()

    def explain(self) -> Diagnosis:
        found = self.read()
        as_text(found)
        return diagnose(found)


def find_ended_process() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def kept(jobs: Path) -> KeptJob:
    """A job of three ranks: after a broadcast, ranks 0 and 2 are in an all-reduce."""
    dumps = DumpBuilder(3, "gloo").call(range(3), "broadcast", done=True)
    return KeptJob(jobs, dumps.call((0, 2), line=9))


def test_a_rank_is_killed(kept: KeptJob) -> None:
    kept.end(1, -9).end(0, 1, CLOSED, after=1.5).stop(2)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
    assert "after broadcast #1 float32[8]" in diagnosis.describe()[0]


def test_a_rank_leaves_the_group(kept: KeptJob) -> None:
    kept.heads[1]["left"] = {"0": kept._dumps.time - CLOCK}
    kept.end(0, 1, CLOSED).end(2, 1, CLOSED).stop(1)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("finished", (1,))


def test_an_operation_that_has_failed_and_is_retired(kept: KeptJob) -> None:
    for rank in (0, 2):
        kept._dumps.entries[rank][-1]["retired"] = True
        kept.heads[rank]["call"] = {"name": "all_reduce", "site": "/srv/train.py:9"}
        kept.heads[rank]["is_last"] = True
    kept.heads[1]["left"] = {"0": kept._dumps.time - CLOCK}
    diagnosis = kept.end(0, 1, CLOSED).end(2, 1, CLOSED).stop(1).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("finished", (1,))
    assert "all_reduce #2 float32[8] at train.py:9" in " ".join(diagnosis.describe())


def test_an_operation_that_not_all_have_called_has_failed(kept: KeptJob) -> None:
    """The calls of DDP are in C++, and so have no call site."""
    for rank in (0, 2):
        kept._dumps.entries[rank][-1]["retired"] = True
    diagnosis = kept.end(0, 1, CLOSED).end(2, 1, CLOSED).end(1, 0, after=0.5).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("finished", (1,))
    assert "in all_reduce #2 float32[8]" in " ".join(diagnosis.describe())


def test_a_rank_that_has_no_record(kept: KeptJob) -> None:
    """`os._exit` ends a process without a last record."""
    del kept.heads[1]
    diagnosis = kept.end(0, 1, CLOSED).end(2, 1, CLOSED).end(1, 0, after=0.5).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("finished", (1,))
    assert "reached the end of its script." in diagnosis.describe()[0]
    assert "more operations" in diagnosis.suggest_fixes()[0]


def test_a_rank_is_late(kept: KeptJob) -> None:
    kept._dumps.time += 5 * SECOND
    kept._dumps.call([1], line=9)
    kept.heads[0]["is_last"] = kept.heads[2]["is_last"] = True
    kept.end(0, 1, TIMED_OUT, after=-2).end(2, 1, TIMED_OUT, after=-1.9).end(1, 1, CLOSED)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("late", (1,))


def test_a_rank_is_late_and_ends_first(kept: KeptJob) -> None:
    """The others' programs went on for a while after they had timed out."""
    kept._dumps.time += 5 * SECOND
    kept._dumps.call([1], line=9)
    for rank in range(3):
        kept._dumps.entries[rank][-1]["retired"] = True
        call = {"name": "all_reduce", "site": "/srv/train.py:9"}
        kept.heads[rank] |= {"call": call, "is_last": True, "exception": TIMED_OUT}
    kept.heads[1]["exception"] = CLOSED
    diagnosis = kept.end(1, 1, CLOSED).stop(0, error=TIMED_OUT).stop(2, error=TIMED_OUT).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("late", (1,))


def test_a_rank_raises(kept: KeptJob) -> None:
    kept.end(1, 1, "ValueError: why").end(0, 1, CLOSED, after=0.9).stop(2)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    assert "ValueError: why" in diagnosis.describe()[0]


def test_ranks_that_have_ended_before_the_launcher_sees_it(jobs: Path) -> None:
    kept = KeptJob(jobs, DumpBuilder(2, "gloo").call(range(2), done=True), has_launcher=True)
    kept.heads[0]["is_last"] = kept.heads[1]["is_last"] = True
    assert kept.explain().kind == "ended"
    kept.heads[1]["exception"] = "ValueError: why"
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))


def test_a_rank_raises_from_another_exception(kept: KeptJob) -> None:
    kept.heads[1] |= {"is_last": True, "exception": "ValueError: why (caused by KeyError: 'lr')"}
    diagnosis = kept.end(1, 1, "ValueError: why").end(0, 1, CLOSED, after=0.9).stop(2).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    assert "ValueError: why (caused by KeyError: 'lr')" in diagnosis.describe()[0]


def test_a_rank_raises_and_gloo_waits_for_its_operations(kept: KeptJob) -> None:
    kept.heads[1] |= {"is_last": True, "exception": "ValueError: why"}
    kept.end(1, 1, "ValueError: why", after=45).end(0, 1, CLOSED, after=45.1).stop(2)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("failed", (1,))
    expected = kept._dumps.time + SECOND // 2 - CLOCK
    assert diagnosis.since == pytest.approx(expected, abs=SECOND // 1000)  # of a float


def test_a_rank_that_is_stopped_while_it_ends_by_itself(kept: KeptJob) -> None:
    """Its peers notice before its launcher does, and one of them ends first."""
    kept.heads[1] |= {"is_last": True, "exception": "KeyboardInterrupt"}
    kept.end(0, 1, CLOSED).stop(1, -2).stop(2)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("interrupted", (1,))


def test_nccl_has_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"profiling_name": str(time), "time_created_ns": time} for time in range(4)]
    dumps = [
        pickle.dumps({"version": "2.10", "entries": part}) for part in (entries[::2], entries[1::2])
    ]
    monkeypatch.setattr(torch_versions, "dump_flight_recorders", lambda: dumps)
    assert pickle.loads(torch_recorder._dump()) == {"version": "2.10", "entries": entries}


def test_nccl_ends_the_processes(kept: KeptJob) -> None:
    """With an error in C++, which is not an exception of the rank."""
    for rank in (0, 2):
        kept.end(rank, -6, NCCL_TIMED_OUT, after=3.1)
    diagnosis = kept.stop(1).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (1,))
    assert (
        diagnosis.graph.moment == kept._dumps.entries[0][-1]["time_created_ns"] + 3 * SECOND - CLOCK
    )


def test_nccl_times_out_in_a_group_of_phalanx(kept: KeptJob) -> None:
    other = kept.read().ranks[0]
    pending = model.Operation(1, "barrier", 0, 1, begin=3)
    own = model.Rank(
        0,
        other.pid,
        clock=CLOCK,
        groups=(model.Group(7, "0", 0, 3, (0, 1, 2), 1),),
        open=(pending,),
        operations=1,
        start=model.Start(other.pid, 1.0, kept._dumps.time / SECOND + 4, -6, error=NCCL_TIMED_OUT),
    )
    (rank,) = end_failed_operations([merge(own, other)], {other.pid: other})
    assert rank.open == (pending,)
    assert [(each.kind, each.outcome) for each in rank.history] == [
        ("broadcast", "ok"),
        ("all_reduce", "timeout"),
    ]


def test_gloo_ends_the_process(kept: KeptJob) -> None:
    kept.end(1, -6, ABORTED).end(0, 1, CLOSED, after=1.5).stop(2)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
    assert "killed by SIGABRT" in diagnosis.describe()[0]
    assert "op.preamble.length <= op.nbytes. 400 vs 396" in diagnosis.describe()[0]
    assert "compare the sizes" in diagnosis.suggest_fixes()[0]


@pytest.mark.parametrize(("is_suspended", "kind"), [(False, "busy"), (True, "stopped")])
def test_a_rank_that_needs_sigkill(kept: KeptJob, is_suspended: bool, kind: str) -> None:
    """Ranks in Gloo don't see Ctrl-C; only the launcher's note says that one was stopped."""
    if is_suspended:
        kept.log("suspended", 1, 4.9)
    kept.stop(0, -9).stop(1, -9 if is_suspended else -2).stop(2, -9)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == (kind, (1,))


def test_a_rank_is_stopped_when_the_others_time_out(kept: KeptJob) -> None:
    kept.end(0, 1, TIMED_OUT, after=3).end(2, 1, TIMED_OUT, after=3)
    diagnosis = kept.log("suspended", 1, 4.9).stop(1, -9).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("stopped", (1,))


def test_ranks_with_different_roots(jobs: Path) -> None:
    kept = KeptJob(jobs, DumpBuilder(4, "gloo").call(range(4), "broadcast", line=9))
    kept._dumps.entries[1][-1]["retired"] = True  # it has the other ranks' data
    for rank, root in enumerate((0, 0, 3, 0)):
        call = {"name": "broadcast", "site": "/srv/train.py:9", "group": "0", "peer": root}
        kept.heads[rank]["call"] = None if rank == 1 else {**call, "tag": 0}
        kept.stop(rank)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("branch", (2,))
    assert "root 3" in diagnosis.describe()[0]
    assert "ranks 0 and 3 called broadcast #1 float32[8] root 0" in diagnosis.describe()[0]


def test_some_ranks_make_a_new_group(kept: KeptJob) -> None:
    join = {"name": "new_group", "site": "/srv/train.py:8", "group": "1", "ranks": [0, 1, 2]}
    kept._dumps.entries[0].pop()
    kept.heads[0]["call"] = kept.heads[1]["call"] = join
    for rank in range(3):
        kept.stop(rank)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("missing", (2,))
    assert "new_group" in " ".join([*diagnosis.describe(), *diagnosis.suggest_fixes()])


def test_a_rank_does_not_come_to_the_first_group(jobs: Path) -> None:
    kept = KeptJob(jobs, DumpBuilder(3, "gloo"))
    join = {"name": "init_process_group", "site": "/srv/train.py:8", "group": "0"}
    for rank, head in enumerate(kept.heads):
        head["groups"], head["call"] = {}, {**join, "ranks": [0, 1, 2]}
        kept.stop(rank)
    del kept.heads[1]
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("missing", (1,))


def test_a_message_that_nobody_sends(kept: KeptJob) -> None:
    kept._dumps.entries[0].pop()
    call = {"name": "recv", "site": "/srv/train.py:8", "group": "0", "peer": 2, "tag": 5}
    kept.heads[0]["call"] = call
    for rank in range(3):
        kept.stop(rank)
    diagnosis = kept.explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("unsent", (0,))
    assert "recv from rank 2 tag 5 at train.py:8" in diagnosis.describe()[0]


def test_a_message_to_one_of_several_ranks_that_have_left(kept: KeptJob) -> None:
    call = {"name": "send", "site": "/srv/train.py:8", "group": "0", "peer": 1, "tag": 0}
    kept.heads[0] |= {"call": call, "is_last": True}
    for rank in (0, 2):
        kept._dumps.entries[rank].pop()
    for rank in (1, 2):
        kept.heads[rank]["left"] = {"0": kept._dumps.time - CLOCK}
    diagnosis = kept.end(0, 1, CLOSED).end(1, 0, after=0.5).end(2, 0, after=0.5).explain()
    assert (diagnosis.kind, diagnosis.ranks) == ("finished", (1,))
    assert any("work.wait()" in text for text in diagnosis.suggest_fixes())


def test_a_rank_with_groups_on_several_backends(kept: KeptJob) -> None:
    other = kept.read().ranks[0]
    own = model.Rank(
        0,
        groups=(model.Group(7, "0", 0, 3, (0, 1, 2), 1),),
        history=(model.Operation(1, "barrier", 0, 1, begin=3, end=4),),
        operations=1,
    )
    rank = merge(own, other)
    assert [group.name for group in rank.groups] == ["0", "0"]
    assert [(each.kind, each.number, each.group) for each in rank.records] == [
        ("barrier", 1, 0),
        ("broadcast", 2, 1),
        ("all_reduce", 3, 1),
    ]
    assert rank.operations == 3
    assert rank.ended == 0
    assert merge(own, replace(other, ended=5)).ended == 5
    assert merge(own, replace(other, ended=5, exception="ValueError: why")).ended == 0


def test_a_rank_that_cannot_look(kept: KeptJob) -> None:
    """A C extension keeps the lock of its interpreter."""
    found, now = kept.read(), kept._dumps.time - CLOCK + 30 * SECOND
    ranks = tuple(
        replace(rank, process=model.Process("running"), recorded=now - time * SECOND)
        for rank, time in zip(found.ranks, (0, 20, 0), strict=True)
    )
    diagnosis = diagnose(replace(found, code=None, launcher_lost=False, ranks=ranks, now=now))
    assert (diagnosis.kind, diagnosis.ranks) == ("busy", (1,))
    assert "something keeps the interpreter's lock" in diagnosis.describe()[1]


@pytest.mark.parametrize(
    ("head", "problem"),
    [({"version": 1}, "version 1, expected 3"), ({"left": None}, "cannot be read")],
)
def test_a_file_that_cannot_be_read(kept: KeptJob, head: dict[str, Any], problem: str) -> None:
    kept.heads[1] |= head
    found = kept.end(1, -9).stop(0).stop(2).read()
    (text,) = found.problems
    assert problem in text
    assert diagnose(found).ranks == (1,)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CLOSED, "PeerLost"),
        (TIMED_OUT, "CollectiveTimeout"),
        ("RuntimeError: Connection closed by peer", ""),
        ("ValueError: timed out", ""),
        (
            "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=2)",
            "CollectiveTimeout",
        ),
    ],
)
def test_errors_of_other_backends(text: str, error: str) -> None:
    assert parse_group_error(text) == error
