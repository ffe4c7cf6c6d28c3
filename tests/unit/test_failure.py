"""`phalanx.backend.failure`: the words of every status that the core can report."""

from __future__ import annotations

import errno
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from phalanx import _native
from phalanx.backend.failure import error_for
from phalanx.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    PhalanxError,
)


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
    """What `error_for` asks a native group for."""

    ended: int | None = None
    closed: bool = False
    late: tuple[int, ...] = ()

    def pid(self, rank: int) -> int:
        return 800 + rank

    def behind(self, _rank: int) -> list[int]:
        return list(self.late)

    def wait_status(self, rank: int) -> int | None:
        return self.ended


def explain(status: Status, group: Group | None = None) -> tuple[type[PhalanxError], str]:
    ours: Any = status
    error = error_for(ours, group or Group(), "rank 2/8", "all_reduce #41 at train.py:40", 7.5)  # type: ignore[arg-type]
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


def test_a_group_that_was_left_meanwhile_has_no_pids() -> None:
    status = Status("peer_lost", peer=5, reporter=2)
    assert explain(status, Group(closed=True)) == (PeerLost, "rank 5 has died")


@pytest.mark.parametrize(
    ("fingerprint", "words"),
    [
        (ALL_REDUCE, "all_reduce #41 float32[1024] SUM"),
        (Fingerprint("broadcast", 3, 7, 0, _native.DTYPES["int8"]), "broadcast #3 int8[7] root 0"),
        (Fingerprint("barrier", 9), "barrier #9"),
        (Fingerprint("send", 0, 5, 4), "send float32[5] to rank 4 tag 0"),
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


def test_a_deadline_names_who_is_missing() -> None:
    kind, text = explain(Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE))
    assert kind is CollectiveTimeout
    assert text.startswith("rank 3 waited for rank 5 (pid 805) in all_reduce #41 float32[1024] SUM")
    assert "7.5 s" in text
    assert "alive" in text
    _, text = explain(Status("timeout", peer=5, reporter=3, mine=ALL_REDUCE), Group(late=(5, 6)))
    assert text.startswith("rank 3 waited for rank 5 (pid 805), rank 6 (pid 806) in all_reduce #41")
    assert text.endswith("the processes are alive")
    _, text = explain(Status("timeout", reporter=3, mine=Fingerprint("recv", 0, 5)))
    assert "rank 3 waited for any rank in recv float32[5] from any rank" in text


def test_aborts() -> None:
    assert explain(Status("aborted", reporter=3)) == (Aborted, "the group was aborted by rank 3")
    kind, text = explain(Status("interrupted", reporter=3, mine=ALL_REDUCE))
    assert (kind, text) == (Aborted, "rank 3 was interrupted in all_reduce #41 float32[1024] SUM")


def test_the_system_refuses() -> None:
    kind, text = explain(Status("out_of_memory", reporter=3, error=errno.ENOMEM))
    assert kind is PhalanxError
    assert "rank 3 could not get memory" in text
    assert "fewer ranks" in text
    kind, text = explain(Status("system", reporter=3, error=errno.EMFILE))
    assert (kind, text) == (PhalanxError, "system error on rank 3: Too many open files")


def test_torchs_handlers_catch_them_all() -> None:
    for kind in (PeerLost, CollectiveMismatch, CollectiveTimeout, Aborted):
        assert issubclass(kind, PhalanxError)
        assert issubclass(kind, dist.DistBackendError)
