"""`phalanx.backend.failure`: the messages of every status that the core can report."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx import _native
from phalanx.backend.failure import FailureFormatter, status_error
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    LaunchError,
    PeerLost,
    PhalanxError,
)
from phalanx.hierarchical.failure import GroupFailure


@dataclass
class Fingerprint:
    kind: str = "none"
    sequence: int = 0
    count: int = 0
    root: int = -1
    dtype: int = _native.DTYPES["float32"]
    op: int = 0


@dataclass
class Status:
    code: str
    peer: int = -1
    reporter: int = -1
    error: int = 0
    mine: Fingerprint = field(default_factory=Fingerprint)
    theirs: Fingerprint = field(default_factory=Fingerprint)


@dataclass
class Group:
    """The part of a native group that `status_error` uses."""

    ended: int | None = None
    closed: bool = False
    late: tuple[int, ...] = ()
    recorders: dict[int, dict[str, Any]] = field(default_factory=dict)
    identity: int = 77

    def flight_recorder(self, rank: int, _history: int) -> dict[str, Any] | None:
        return self.recorders.get(rank)

    def is_failing(self, _rank: int) -> bool:
        return False

    def pid(self, rank: int) -> int:
        return 800 + rank

    def host(self, rank: int) -> str:
        return "node-b" if rank == 7 else ""

    def ranks_behind(self, _rank: int) -> list[int]:
        return list(self.late)

    def wait_status(self, rank: int) -> int | None:
        return self.ended


# Rank 0 of the group is rank 10 of the job, and so on.
MEMBERSHIP = SimpleNamespace(rank_label="rank 2/8", rank=2, name="4", members=range(10, 50))


def make_error(status: Status, group: Group | None = None) -> PhalanxError:
    parts: Any = status, group or Group(), MEMBERSHIP
    return status_error(*parts, "all_reduce #41 at train.py:40", 7.5)


def explain(status: Status, group: Group | None = None) -> tuple[type[PhalanxError], str]:
    error = make_error(status, group)
    prefix = f"[rank 2/8 on {socket.gethostname()}] all_reduce #41 at train.py:40: "
    text = str(error)
    assert text.startswith(prefix)
    return type(error), text.removeprefix(prefix)


SUM = _native.REDUCE_OPS["sum"]
ALL_REDUCE = Fingerprint("all_reduce", 41, 1024, op=SUM)


@pytest.mark.parametrize(
    ("wait_status", "words"),
    [
        (int(signal.SIGKILL), "was killed by SIGKILL"),
        (int(signal.SIGSEGV) | 0x80, "was killed by SIGSEGV"),  # with a core dump
        (3 << 8, "exited with code 3"),
        (0, "exited with code 0"),
        (None, "has died"),
    ],
)
def test_a_lost_peer(wait_status: int | None, words: str) -> None:
    status = Status("peer_lost", peer=5, reporter=2)
    assert explain(status, Group(wait_status)) == (PeerLost, f"rank 5 (pid 805) {words}")


def test_a_real_time_signal_has_no_name_but_a_number() -> None:
    status = Status("peer_lost", peer=5, reporter=2)
    assert explain(status, Group(40)) == (PeerLost, "rank 5 (pid 805) was killed by signal 40")


def test_group_left_in_the_meantime_has_no_pids() -> None:
    status = Status("peer_lost", peer=5, reporter=2)
    assert explain(status, Group(closed=True)) == (PeerLost, "rank 5 has died")


@pytest.mark.parametrize(
    ("fingerprint", "words"),
    [
        (ALL_REDUCE, "all_reduce #41 float32[1024] SUM"),
        (Fingerprint("broadcast", 3, 7, 0, _native.DTYPES["int8"]), "broadcast #3 int8[7] root 0"),
        (Fingerprint("barrier", 9), "barrier #9"),
        (Fingerprint("send", 0, 5, 4), "send float32[5] to rank 4"),
        (Fingerprint("recv", 7, 5, 4), "recv float32[5] from rank 4 tag 7"),
        (Fingerprint("recv", 7, 5, -1), "recv float32[5] from any rank tag 7"),
        (Fingerprint(), "no operation"),
    ],
)
def test_a_mismatch_names_both_operations(fingerprint: Fingerprint, words: str) -> None:
    status = Status("mismatch", peer=5, reporter=3, mine=ALL_REDUCE, theirs=fingerprint)
    assert explain(status) == (
        CollectiveMismatch,
        f"ranks disagree: rank 3 is in all_reduce #41 float32[1024] SUM, rank 5 in {words}",
    )


def test_split_sizes_that_disagree() -> None:
    mine = Fingerprint("all_to_all", 4, 3, root=5)
    theirs = Fingerprint("all_to_all", 4, 2, root=3)
    assert explain(Status("mismatch", peer=5, reporter=3, mine=mine, theirs=theirs)) == (
        CollectiveMismatch,
        "split sizes disagree in all_to_all #4: rank 5 gives rank 3 2 elements, which expects 3",
    )


def test_a_rank_that_left() -> None:
    kind, text = explain(Status("left", peer=5, reporter=3, mine=ALL_REDUCE))
    assert kind is CollectiveMismatch
    assert text.startswith("rank 5 (pid 805) has left the group (destroy_process_group) while rank")


def test_deadline_names_the_missing_ranks() -> None:
    kind, text = explain(Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE))
    assert kind is CollectiveTimeout
    assert text.startswith("rank 3 waited for rank 5 (pid 805) in all_reduce #41 float32[1024] SUM")
    assert "7.5 s" in text
    assert text.endswith("; rank 5 is alive")
    _, text = explain(Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE), Group(late=(5, 6)))
    assert text.startswith("rank 3 waited for rank 5 (pid 805), rank 6 (pid 806) in all_reduce #41")
    assert text.endswith("; rank 5 is alive; rank 6 is alive")
    _, text = explain(Status("timeout", reporter=3, mine=Fingerprint("recv", 0, 5)))
    assert "rank 3 waited for any rank in recv float32[5] from any rank" in text


def test_aborts() -> None:
    assert explain(Status("aborted", reporter=3)) == (Aborted, "the group was aborted by rank 3")
    kind, text = explain(Status("interrupted", reporter=3, mine=ALL_REDUCE))
    assert (kind, text) == (Aborted, "rank 3 was interrupted in all_reduce #41 float32[1024] SUM")


def test_system_errors() -> None:
    kind, text = explain(Status("out_of_memory", reporter=3, error=errno.ENOMEM))
    assert kind is PhalanxError
    assert "rank 3 could not get memory" in text
    assert "fewer ranks" in text
    kind, text = explain(Status("system", reporter=3, error=errno.EMFILE))
    assert (kind, text) == (PhalanxError, "system error on rank 3: Too many open files")


def test_all_errors_are_dist_backend_errors() -> None:
    for kind in (PeerLost, CollectiveMismatch, CollectiveTimeout, Aborted):
        assert issubclass(kind, PhalanxError)
        assert issubclass(kind, dist.DistBackendError)


def operation(sequence: int, **fields: Any) -> dict[str, Any]:
    now = time.monotonic_ns()
    known = {
        "kind": "all_reduce",
        "group": 0,
        "sequence": sequence,
        "dtype": "float32",
        "count": 1024,
        "site": "/a/b/train.py:40",
        "begin": now - 4_000_000_000,
        "end": now - 2_000_000_000,
        "waiting_for": -1,
        "peer": -1,
        "number": sequence,
    }
    return {**known, **fields}


def recorder_content(**fields: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(
        (
            *("rank", "pid", "clock", "opened", "ended", "operations"),
            *("main_thread_wait", "lone_wait"),
        ),
        0,
    )
    texts = dict.fromkeys(("host", "ending", "exception", "note"), "")
    groups = [group_record(77, "0"), group_record(78, "pipe\x1b[2J")]
    lists = {"groups": groups, "reports": [], "open": [], "done": [], "links": []}
    return {**numbers, **texts, **lists, **fields}


def group_record(identity: int, name: str, **fields: str) -> dict[str, Any]:
    return {"identity": identity, "name": name, "rank": 0, "size": 8, "members": "0-7", **fields}


def test_call_sites_of_both_recorders() -> None:
    recorders = {
        3: recorder_content(
            done=[operation(41, site="/a/b/one.py:1"), operation(41, group=1, site="no.py:9")]
        ),
        5: recorder_content(open=[operation(41, kind="broadcast", site="two\n.py:2")]),
    }
    theirs = Fingerprint("broadcast", 41, 1024, 0, 0)
    _, text = explain(
        Status("mismatch", peer=5, reporter=3, mine=ALL_REDUCE, theirs=theirs),
        Group(recorders=recorders),
    )
    assert "rank 3 is in all_reduce #41 float32[1024] SUM at one.py:1, " in text
    assert text.endswith(" at two\\n.py:2")


def test_operation_that_ends_while_its_recorder_is_copied() -> None:
    """The operation is no longer among those in progress, and not yet among those that ended."""
    status = Status("mismatch", peer=1, reporter=0)
    status.mine, status.theirs = Fingerprint("barrier", 4), Fingerprint("all_reduce", 4, 9, op=1)
    copies = [
        recorder_content(),
        recorder_content(done=[operation(4, site="")]),
        recorder_content(done=[operation(4, site="b.py:7")]),
    ]

    class Copied(Group):
        def pid(self, _rank: int) -> int:
            return os.getpid()  # a process that runs, and may record more

        def flight_recorder(self, rank: int, _history: int) -> dict[str, Any] | None:
            return copies.pop(0) if rank == 1 else None

    assert explain(status, Copied())[1].endswith("#4 float32[9] SUM at b.py:7")


def test_messages_are_identified_by_all_their_fields() -> None:
    sent = [
        operation(7, kind="send", count=4, site="right.py:1"),
        operation(7, kind="send", count=5, site="wrong.py:2"),
    ]
    mine, theirs = Fingerprint("recv", 7, 5, 5), Fingerprint("send", 7, 4, 3)
    _, text = explain(
        Status("mismatch", peer=5, reporter=3, mine=mine, theirs=theirs),
        Group(recorders={5: recorder_content(done=sent)}),
    )
    assert text.endswith("send float32[4] to rank 3 tag 7 at right.py:1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "rank 5 is in its own code, and has done no operation yet"),
        (
            {"done": [operation(40)], "reports": [(1, 17, 0.5), (2, -1, 0.25)]},
            "rank 5 is in its own code since all_reduce #40 float32[1024] at train.py:40, "
            "N s ago, after step 17",
        ),
        (
            {"open": [operation(2, group=1, waiting_for=1)]},
            "rank 5 is in all_reduce #2 float32[1024] at train.py:40 of group 'pipe\\x1b[2J' "
            "for N s, waiting for rank 1 there",
        ),
        (  # a posted message is not the current operation
            {"done": [operation(40)], "open": [operation(7, kind="recv", peer=3)]},
            "rank 5 is in its own code since all_reduce #40 float32[1024] at train.py:40, N s ago",
        ),
        (
            {
                "open": [
                    operation(41, kind="barrier", dtype="", group=1),
                    operation(7, kind="send", peer=3),
                ]
            },
            "rank 5 is in barrier #41 at train.py:40 of group 'pipe\\x1b[2J' for N s",
        ),
        (
            {
                "open": [
                    operation(7, kind="recv", peer=3, waiting_for=3),
                    operation(8, kind="recv", peer=4),
                ]
            },
            "rank 5 is in recv float32[1024] at train.py:40 for N s, "
            "waiting for rank 3 (pid 803) there",
        ),
        (
            {"open": [operation(41, waiting_for=7)]},
            "rank 5 is in all_reduce #41 float32[1024] at train.py:40 for N s, "
            "waiting for rank 7 (pid 807 on node-b) there",
        ),
    ],
)
def test_activity_of_a_late_rank(fields: dict[str, Any], words: str) -> None:
    _, text = explain(
        Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE),
        Group(recorders={5: recorder_content(**fields)}),
    )
    assert re.sub(r"\d+\.\d s\b(?! on)", "N s", text).endswith("; " + words)


def test_many_late_ranks_are_named_and_some_described() -> None:
    status = Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE)
    recorders = {rank: recorder_content(done=[operation(40)]) for rank in range(20, 32)}
    _, text = explain(status, Group(late=tuple(range(20, 32)), recorders=recorders))
    assert all(f"rank {rank} (pid {800 + rank})" in text for rank in range(20, 32))
    assert text.count(" is in its own code") == 8
    assert text.endswith("; 4 more are late: see phalanx explain")


def test_stopped_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        group = Group()
        group.pid = lambda _rank: process.pid  # type: ignore[method-assign]
        _, text = explain(Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE), group)
        assert text.endswith("rank 5 is stopped by a signal (SIGSTOP)")
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_last_operation_of_a_dead_rank() -> None:
    def text(**fields: Any) -> str:
        return explain(
            Status("peer_lost", peer=5), Group(ended=9, recorders={5: recorder_content(**fields)})
        )[1]

    assert text() == "rank 5 (pid 805) was killed by SIGKILL"
    assert text(done=[operation(40)]).endswith(
        ", after all_reduce #40 float32[1024] at train.py:40"
    )
    assert text(done=[operation(40)], open=[operation(41)]).endswith(
        ", in all_reduce #41 float32[1024] at train.py:40"
    )
    posted = operation(41, kind="recv", peer=3)
    assert text(done=[operation(40)], open=[posted]).endswith(
        ", after all_reduce #40 float32[1024] at train.py:40"
    )
    assert "failed with ValueError: \\x1b[2J" in text(
        ending="failed", exception="ValueError: \x1b[2J"
    )


def test_abort_reason() -> None:
    note = group_record(77, "0", left_at="/a/train.py:8", abort_reason="loss is NaN\n!")
    _, text = explain(
        Status("aborted", reporter=3), Group(recorders={3: recorder_content(groups=[note])})
    )
    assert text == "the group was aborted by rank 3 at train.py:8: loss is NaN\\n!"
    _, text = explain(
        Status("deadlock", peer=5, reporter=3),
        Group(recorders={3: recorder_content(groups=[note])}),
    )
    assert text == "loss is NaN\\n!"
    _, text = explain(
        Status("left", peer=3, reporter=5, mine=ALL_REDUCE),
        Group(recorders={3: recorder_content(groups=[note])}),
    )
    assert "rank 3 (pid 803) has left the group (destroy_process_group) at train.py:8 while" in text


@pytest.mark.parametrize(
    ("code", "kept"),
    [("timeout", "timeout"), ("peer_lost", "peer_lost"), ("left", "mismatch")],
)
def test_failure_of_several_hosts_has_one_kind_on_all_ranks(code: str, kept: str) -> None:
    """This includes ranks that cannot reach the store, and learn it from their host's group."""
    group: Any = Group()
    words = FailureFormatter(group)
    why = words.abort_reason(GroupFailure(code, "rank 3 waited for rank 0", 3, 0))
    group.recorders[3] = recorder_content(groups=[group_record(77, "0", abort_reason=why)])
    assert words.explain(Status("aborted", reporter=3), 7.5) == (kept, "rank 3 waited for rank 0")


def test_abort_of_several_hosts() -> None:
    group: Any = Group()
    words = FailureFormatter(group)
    why = words.abort_reason(
        GroupFailure("aborted", "the group was aborted by rank 0: loss is NaN", 0)
    )
    group.recorders[3] = recorder_content(groups=[group_record(77, "0", abort_reason=why)])
    code, text = words.explain(Status("aborted", reporter=3), 7.5)
    assert code == "aborted"
    assert text.endswith(why)


@pytest.mark.parametrize(
    ("status", "ranks", "seconds"),
    [
        (Status("peer_lost", peer=5, reporter=2), (15,), None),
        (Status("left", peer=5, reporter=2, mine=ALL_REDUCE), (15,), None),
        (Status("mismatch", peer=5, reporter=2, mine=ALL_REDUCE), (12, 15), None),
        (Status("timeout", peer=5, reporter=2, mine=ALL_REDUCE), (14, 15), 7.5),
        (Status("timeout", peer=2, reporter=2, mine=ALL_REDUCE), (12,), 7.5),
        (Status("aborted", reporter=0), (10,), None),
        (Status("interrupted", reporter=2, mine=ALL_REDUCE), (12,), None),
        (Status("out_of_memory", reporter=3, error=12), (13,), None),
    ],
)
def test_the_attributes_name_ranks_of_the_job(
    status: Status, ranks: tuple[int, ...], seconds: float | None
) -> None:
    error = make_error(status, Group(late=(4, 5)))
    assert (error.ranks, error.seconds) == (ranks, seconds)
    assert (error.operation, error.group) == ("all_reduce #41", "4")


@pytest.mark.parametrize(
    ("failure", "ranks", "seconds"),
    [
        (GroupFailure("peer_lost", "rank 5 has died", 0, 5), (15,), None),
        (GroupFailure("timeout", "rank 0 waited for rank 5", 0, 5), (15,), 7.5),
        (GroupFailure("timeout", "rank 0 waited for a rank of another host", 0, -1), (), 7.5),
        (GroupFailure("mismatch", "ranks disagree", 0, 5), (10, 15), None),
    ],
)
def test_a_failure_of_another_host_has_the_attributes(
    failure: Any, ranks: tuple[int, ...], seconds: float | None
) -> None:
    error = make_error(failure)
    assert (error.ranks, error.seconds) == (ranks, seconds)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "kind",
    [PhalanxError, PeerLost, CollectiveMismatch, CollectiveTimeout, Aborted, LaunchError],
)
def test_attributes_survive_copies(kind: type[PhalanxError], copied: Any) -> None:
    error = kind("text", ranks=[3, 1], operation="barrier #2", group="0", seconds=2.0, job="a")
    found = copied(error)
    assert type(found) is kind
    assert found.args == ("text",)
    assert vars(found) == vars(error)
    assert found.ranks == (3, 1)
    other = found.replace("more text", operation="broadcast #3")
    assert type(other) is kind
    assert (str(other), other.ranks, other.operation) == ("more text", (3, 1), "broadcast #3")
    assert str(found) == "text"


def test_an_error_has_all_attributes_by_default() -> None:
    error = PhalanxError("text")
    assert vars(error) == {
        "ranks": (),
        "operation": None,
        "group": None,
        "seconds": None,
        "job": None,
    }
