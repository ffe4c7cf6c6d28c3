"""Remote calls without an answer: whom the diagnosis names, while they wait and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx.observe.call_log_reader import Call, Worker
from phalanx.observe.diagnosis import diagnose
from phalanx.observe.explain import as_json, as_text
from phalanx.observe.model import Job
from tests.made_up import Story


def with_calls(story: Story, pairs: Sequence[tuple[int, int]], seconds: float = 20) -> Job:
    """Return the job of a story; each pair is a caller, and a callee that executes the call."""
    since = story.time
    job = story.passes(seconds).job()
    workers = [
        Worker(
            rank.pid,
            rank.rank,
            f"worker{rank.rank}",
            tuple(Call(of, to, f"ask{to}", since) for of, to in pairs if of == rank.rank),
            tuple(Call(of, of, "", since) for of, to in pairs if to == rank.rank),
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
def test_the_worker_at_which_calls_end(
    pairs: list[tuple[int, int]], ranks: tuple[int, ...]
) -> None:
    diagnosis = diagnose(with_calls(Story(3).together(), pairs))
    assert (diagnosis.kind, diagnosis.ranks) == ("unanswered", ranks)


def test_a_short_call_is_no_trouble() -> None:
    assert diagnose(with_calls(Story(2).together(), [(0, 1)], 0.9)).kind == "running"


def test_what_is_said_while_a_call_waits_and_after_ctrl_c() -> None:
    story = Story(2).together()
    job = with_calls(story, [(0, 1)])
    told = "'worker1' (rank 1, pid 801) {} not answered the call of ask1 by worker 'worker0' "
    assert told.format("has") + "(rank 0, pid 800) for 20 s" in as_text(job)
    assert "py-spy dump --pid 801" in "".join(as_json(job)["advice"])
    for rank in (0, 1):
        story.fails(rank, "KeyboardInterrupt")
    after = replace(story.launcher_stops(130).passes(100).job(), workers=job.workers)
    assert told.format("had") + "(rank 0, pid 800) for 20 s" in as_text(after)
    assert "executing it for 20 s." in as_text(after)


def test_a_death_comes_before_calls() -> None:
    story = Story(3).together()
    job = with_calls(story, [(0, 1)])
    story.dies(1, -9)
    diagnosis = diagnose(replace(story.passes(1).job(), workers=job.workers))
    assert (diagnosis.kind, diagnosis.ranks) == ("killed", (1,))
