"""Pending remote calls: the workers that the diagnosis names, during the job and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx.diagnosis.explain import as_json, as_text
from phalanx.diagnosis.kinds import diagnose
from phalanx.diagnosis.model import Call, Job, Worker
from tests.synthetic_jobs import JobBuilder


def with_calls(builder: JobBuilder, pairs: Sequence[tuple[int, int]], seconds: float = 20) -> Job:
    """Return a job with calls; each pair is a caller, and a callee that executes the call."""
    since = builder.time
    job = builder.advance(seconds).build()
    workers = [
        Worker(
            rank.pid,
            rank.rank,
            f"worker{rank.rank}",
            tuple(
                Call(caller, callee, f"ask{callee}", since)
                for caller, callee in pairs
                if caller == rank.rank
            ),
            tuple(
                Call(caller, caller, "", since) for caller, callee in pairs if callee == rank.rank
            ),
        )
        for rank in job.ranks
    ]
    return replace(job, workers=tuple(workers))


@pytest.mark.parametrize(
    ("pairs", "ranks"),
    [
        ([(0, 1)], (1,)),
        ([(0, 1), (1, 2)], (2,)),
        ([(0, 1), (2, 1)], (1,)),
        ([(0, 1), (1, 0)], (0, 1)),
        ([(0, 1), (1, 0), (2, 0)], (0, 1)),
        ([(1, 1)], (1,)),
        ([(0, 7)], ()),
    ],
)
def test_the_worker_at_the_end_of_the_calls_is_at_fault(
    pairs: list[tuple[int, int]], ranks: tuple[int, ...]
) -> None:
    diagnosis = diagnose(with_calls(JobBuilder(3).run_collectives(), pairs))
    assert (diagnosis.kind, diagnosis.ranks) == ("unanswered", ranks)


def test_a_short_call_is_no_failure() -> None:
    assert diagnose(with_calls(JobBuilder(2).run_collectives(), [(0, 1)], 0.9)).kind == "running"


def test_an_unanswered_call_while_pending_and_after_ctrl_c() -> None:
    builder = JobBuilder(2).run_collectives()
    job = with_calls(builder, [(0, 1)])
    expected = "'worker1' (rank 1, pid 801) {} not answered the call of ask1 by worker 'worker0' "
    assert expected.format("has") + "(rank 0, pid 800) for 20 s" in as_text(job)
    assert "py-spy dump --pid 801" in "".join(as_json(job)["advice"])
    for rank in (0, 1):
        builder.fail(rank, "KeyboardInterrupt")
    after = replace(builder.stop_job(130).advance(100).build(), workers=job.workers)
    assert expected.format("had") + "(rank 0, pid 800) for 20 s" in as_text(after)
    assert "executing it for 20 s." in as_text(after)


@pytest.mark.parametrize(
    ("pairs", "ranks"),
    [([], (1,)), ([(0, 1)], (1,)), ([(0, 1), (1, 2)], (2,)), ([(0, 1), (1, 2), (2, 1)], (1, 2))],
)
def test_the_timeout_of_a_call(pairs: list[tuple[int, int]], ranks: tuple[int, ...]) -> None:
    """The caller has failed, but the callee, or the worker that it waited for, is at fault."""
    builder = JobBuilder(3).run_collectives()
    workers = with_calls(builder, pairs, 3).workers
    text = "ask1 on worker 'worker1' (id 1, pid 801 on host) took longer than 3 s"
    builder.fail(0, f"phalanx.errors.CallTimeout: {text}").advance(0.1)
    builder.fail((1, 2), "phalanx.errors.PeerLost: worker 'worker0' (id 0) left RPC")
    job = replace(builder.build(), workers=workers)
    diagnosis = diagnose(job)
    assert (diagnosis.kind, diagnosis.ranks) == ("unanswered", ranks)
    assert text in as_text(job)
    assert as_json(job)["diagnosis"]["ranks"] == list(ranks)


def test_a_killed_rank_takes_precedence_over_calls() -> None:
    builder = JobBuilder(3).run_collectives()
    job = with_calls(builder, [(0, 1)])
    builder.end_process(1, -9)
    diagnosis = diagnose(replace(builder.advance(1).build(), workers=job.workers))
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
