"""A Hypothesis strategy for jobs as read from damaged or hostile directories.

Numbers are as wide as the fields of a flight recorder, and texts are arbitrary.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from phalanx.diagnosis.model import Group, Job, Link, Operation, Process, Rank, Report, Start
from tests.synthetic_jobs import NOW

UNSIGNED = st.one_of(st.integers(0, 5), st.integers(NOW - 10**10, NOW), st.integers(0, 2**64 - 1))
SMALL = st.integers(-(2**15), 2**15 - 1) | st.integers(-1, 3)
TEXT = st.text(max_size=12) | st.sampled_from(["", "train.py:40", "\x1b[31m", "a\nb", "\u202e"])

operations = st.builds(
    Operation,
    number=UNSIGNED,
    kind=st.sampled_from(["all_reduce", "broadcast", "reduce", "send", "recv", "join", "barrier"]),
    group=st.integers(-1, 3),
    sequence=UNSIGNED,
    dtype=st.sampled_from(["", "float32"]),
    count=UNSIGNED,
    op=st.sampled_from(["", "SUM"]),
    peer=SMALL,
    site=TEXT,
    begin=UNSIGNED,
    end=st.just(0) | UNSIGNED,
    waited=UNSIGNED,
    waiting_for=SMALL,
    outcome=st.sampled_from(["ok", "peer_lost", "timeout"]),
    thread=st.integers(0, 255),
)
groups = st.builds(
    Group,
    identity=st.integers(0, 3) | UNSIGNED,
    name=TEXT,
    rank=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
    size=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
    members=st.lists(st.integers(-2, 70), max_size=5).map(tuple),
    sequence=UNSIGNED,
    left_time=st.just(0) | UNSIGNED,
    left_at=TEXT,
    abort_reason=TEXT,
)
reports = st.builds(
    Report,
    time=UNSIGNED,
    step=st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 9),
    loss=st.floats(),
)
link_bytes = st.tuples(UNSIGNED, UNSIGNED, UNSIGNED)
links = st.builds(Link, host=TEXT, now=link_bytes, earlier=link_bytes)
starts = st.builds(
    Start,
    pid=st.integers(0, 2**31 - 1),
    time=st.floats(),
    ended=st.none() | st.floats(),
    code=st.none() | st.integers(-70, 255),
    stopped=st.booleans(),
)
processes = st.builds(
    Process,
    state=st.sampled_from(["running", "sleeping", "stopped", "disk", "zombie", "gone"]),
    memory=st.integers(0, 2**62),
)


def lists(
    elements: st.SearchStrategy[object], most: int = 5
) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


ranks = st.builds(
    Rank,
    rank=st.just(0),
    pid=st.integers(-1, 2**31 - 1) | st.just(7),
    host=TEXT,
    clock=st.integers(-(2**63), 2**63 - 1),
    opened=UNSIGNED,
    ending=st.sampled_from(["", "left", "exited", "failed"]),
    exception=TEXT,
    ended=UNSIGNED,
    groups=lists(groups),
    open=lists(operations),
    history=lists(operations, 8),
    operations=UNSIGNED,
    reports=lists(reports),
    links=lists(links, 20),
    note=TEXT,
    start=st.none() | starts,
    process=st.none() | processes,
    problem=st.just("") | TEXT,
)


@st.composite
def jobs(draw: st.DrawFn, many: int = 70) -> Job:
    """Draw a job of a few ranks, or of `many`, of which up to four are different."""
    kinds = draw(st.lists(ranks, min_size=1, max_size=4))
    size = draw(st.integers(0, 6) | st.just(many))
    made = tuple(replace(kinds[number % len(kinds)], rank=number) for number in range(size))
    return Job(
        name=draw(TEXT),
        path=draw(TEXT),
        command=draw(lists(TEXT)),  # type: ignore[arg-type]
        started=draw(st.floats()),
        world_size=size,
        attempt=draw(st.integers(0, 3)),
        code=draw(st.none() | st.integers(-70, 255)),
        now=NOW,
        ranks=made,
        problems=draw(lists(TEXT)),  # type: ignore[arg-type]
    )
