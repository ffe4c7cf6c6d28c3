"""The rank at fault in synthetic jobs: every kind of failure, in running and ended jobs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.diagnosis.kinds import Diagnosis, diagnose
from tests.synthetic_jobs import JobBuilder

SIZES = (2, 3, 8, 64)
LOST = "PeerLost: [rank 0/2 on node-a] all_reduce #4: rank {} (pid {}) {}"
LATE = "CollectiveTimeout: [rank 0/2 on node-a] all_reduce #4: rank 0 waited for rank 1; rank {} {}"


@dataclass(frozen=True)
class Scenario:
    """The parameters of a failure: one rank is at fault, the others wait."""

    size: int
    at_fault: int
    live: bool

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.size) if number != self.at_fault]

    def build(self, **kwargs: object) -> JobBuilder:
        return JobBuilder(self.size, **kwargs).run_collectives(3)  # type: ignore[arg-type]

    def wait(self, builder: JobBuilder, seconds: float = 5, kind: str = "all_reduce") -> JobBuilder:
        """Let the others enter a collective that the rank at fault does not reach."""
        place = [
            note.members.index(self.at_fault) for note in builder.ranks[self.at_fault].groups[:1]
        ]
        builder.begin(self.others, kind, waiting_for=(place or [self.at_fault])[0])
        return builder.advance(seconds)

    def notify(self, builder: JobBuilder, outcome: str, exception: str) -> JobBuilder:
        """Let the operations of the others fail; the launcher stops the remaining ranks."""
        builder.end(self.others, outcome)
        if self.live:
            return builder.advance(3)
        builder.advance(0.01).fail(self.others, exception)
        return builder.advance(0.5).stop_job()

    def time_out(self, builder: JobBuilder, state: str = "is in its own code") -> JobBuilder:
        return self.notify(builder, "timeout", LATE.format(self.at_fault, state))


def killed(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build()).end_process(scenario.at_fault, -9).advance(0.004)
    return scenario.notify(builder, "peer_lost", LOST.format(1, 801, "was killed by SIGKILL"))


def killed_inside(scenario: Scenario) -> JobBuilder:
    """The rank is killed inside an operation of all ranks."""
    builder = scenario.build().begin(
        range(scenario.size), count=10**7, waiting_for=scenario.others[0]
    )
    builder.advance(0.1).end_process(scenario.at_fault, -11).advance(0.004)
    return scenario.notify(builder, "peer_lost", LOST.format(1, 801, "was killed by SIGSEGV"))


def exited(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build()).end_process(scenario.at_fault, 3).advance(0.004)
    return scenario.notify(builder, "peer_lost", LOST.format(1, 801, "exited with code 3"))


def failed(scenario: Scenario) -> JobBuilder:
    builder = (
        scenario.wait(scenario.build()).fail(scenario.at_fault, "KeyError: 'lr'").advance(0.004)
    )
    return scenario.notify(builder, "peer_lost", LOST.format(1, 801, "failed with KeyError"))


def failed_unseen(scenario: Scenario) -> JobBuilder:
    """The others are in their own code; the launcher stops them."""
    builder = scenario.build().advance(2).fail(scenario.at_fault, "KeyError: 'lr'").advance(0.1)
    return builder if scenario.live else builder.stop_job()


def failed_in_session(scenario: Scenario) -> JobBuilder:
    """`with phalanx.init()` notifies the others when its body raises."""
    abort_reason = "its session ended with KeyError: 'lr'"
    builder = (
        scenario.wait(scenario.build())
        .leave(scenario.at_fault, abort_reason=abort_reason)
        .advance(0.004)
    )
    builder.end(scenario.others, "peer_lost").advance(0.001).fail(
        scenario.at_fault, "KeyError: 'lr'"
    )
    if scenario.live:
        return builder.advance(1)
    return builder.fail(scenario.others, LOST.format(1, 801, "failed with KeyError")).advance(0.1)


def failed_in_session_and_lives(scenario: Scenario) -> JobBuilder:
    """The exception is caught, and the process continues without the group."""
    abort_reason = "its session ended with KeyError: 'lr'"
    builder = (
        scenario.wait(scenario.build())
        .leave(scenario.at_fault, abort_reason=abort_reason)
        .advance(0.004)
    )
    builder.end(scenario.others, "peer_lost").advance(0.1)
    builder.fail(scenario.others, LOST.format(1, 801, "failed with KeyError")).advance(3)
    return builder if scenario.live else builder.exit(scenario.at_fault)


def stopped(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build().stop_rank(scenario.at_fault), 60)
    return (
        builder if scenario.live else scenario.time_out(builder, "is stopped by a signal (SIGSTOP)")
    )


def stopped_after_deadline(scenario: Scenario) -> JobBuilder:
    """The rank is still stopped when the others have timed out."""
    builder = scenario.wait(scenario.build().stop_rank(scenario.at_fault), 60)
    builder.end(scenario.others, "timeout").advance(1)
    return (
        builder if scenario.live else builder.fail(scenario.others, LATE.format(0, "is")).advance(1)
    )


def stopped_by_ctrl_z(scenario: Scenario) -> JobBuilder:
    """The launcher is stopped before the timeout: SIGTERM does not end the stopped rank."""
    builder = scenario.wait(scenario.build().stop_rank(scenario.at_fault), 60)
    if scenario.live:
        return builder
    for rank in scenario.others:
        builder.end_process(rank, -15, stopped=True)
    return builder.advance(5).stop_job(signal=9)


def busy(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build().set_running(scenario.at_fault), 60)
    return builder if scenario.live else scenario.time_out(builder)


def busy_and_ended(scenario: Scenario) -> JobBuilder:
    """Ctrl-C at the launcher, before the timeout."""
    builder = scenario.wait(scenario.build().set_running(scenario.at_fault), 60)
    return builder if scenario.live else builder.stop_job(130)


def busy_and_interrupted(scenario: Scenario) -> JobBuilder:
    """Ctrl-C at a terminal in which the ranks run without a launcher."""
    builder = scenario.wait(scenario.build(launched=False).set_running(scenario.at_fault), 60)
    if scenario.live:
        return builder
    builder.fail(scenario.at_fault, "KeyboardInterrupt", None).advance(0.01)
    builder.end(scenario.others, "interrupted").fail(scenario.others, "KeyboardInterrupt", None)
    return builder


def busy_and_reports(scenario: Scenario) -> JobBuilder:
    """The rank continues without the others."""
    builder = scenario.wait(scenario.build().set_running(scenario.at_fault), 60)
    builder.report([scenario.at_fault], 17).advance(1)
    return builder if scenario.live else scenario.time_out(builder)


def branch(scenario: Scenario) -> JobBuilder:
    builder = scenario.build().begin(scenario.others, count=10).advance(0.01)
    builder.begin(scenario.at_fault, "barrier", site="train.py:50", dtype="").advance(0.001)
    builder.end(outcome="mismatch")
    if scenario.live:
        return builder.advance(2)
    exception = "CollectiveMismatch: [rank 0/2 on node-a] ranks disagree"
    return builder.fail(range(scenario.size), exception).advance(0.1)


def finished(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build()).leave(scenario.at_fault).advance(0.004)
    builder.end(scenario.others, "left").advance(0.001).exit(scenario.at_fault)
    if scenario.live:
        return builder.advance(1)
    exception = f"CollectiveMismatch: rank {scenario.at_fault} has left the group"
    return builder.fail(scenario.others, exception).stop_job()


def ended(scenario: Scenario) -> JobBuilder:
    """The script completes without leaving the group."""
    builder = scenario.wait(scenario.build()).exit(scenario.at_fault).advance(0.004)
    exception = f"PeerLost: rank {scenario.at_fault} exited with code 0"
    return scenario.notify(builder, "peer_lost", exception)


def unsent(scenario: Scenario) -> JobBuilder:
    """The others are in a collective, the rank at fault waits for a message of one of them."""
    builder = scenario.wait(scenario.build(), 1)
    builder.begin(
        scenario.at_fault, "recv", peer=scenario.others[0], tag=7, site="train.py:60"
    ).advance(30)
    if scenario.live:
        return builder
    return scenario.time_out(builder, "is in recv float32[10] at train.py:60")


def unsent_by_ended(scenario: Scenario) -> JobBuilder:
    """The rank that should send has completed."""
    sender = scenario.others[0]
    builder = scenario.build().begin(scenario.at_fault, "recv", peer=sender, tag=7).advance(5)
    builder.leave(sender).advance(0.01).end(scenario.at_fault, "left").exit(sender)
    if scenario.live:
        return builder.advance(1)
    return builder.fail(scenario.at_fault, "CollectiveMismatch: has left the group").stop_job()


def wrong_tag(scenario: Scenario) -> JobBuilder:
    """A message was sent, but with another tag; the sender has continued."""
    sender = scenario.others[0]
    builder = scenario.build().begin(sender, "send", peer=scenario.at_fault, tag=8).end(sender)
    builder.begin(scenario.at_fault, "recv", peer=sender, tag=7).advance(60)
    if scenario.live:
        return builder
    builder.end(scenario.at_fault, "timeout").advance(0.1)
    return builder.fail(scenario.at_fault, LATE.format(0, "is in its own code")).stop_job()


def unreceived(scenario: Scenario) -> JobBuilder:
    builder = scenario.wait(scenario.build(), 1)
    builder.begin(scenario.at_fault, "send", peer=scenario.others[0], count=10**7).advance(30)
    return builder if scenario.live else scenario.time_out(builder, "is in send float32[10000000]")


def missing(scenario: Scenario) -> JobBuilder:
    builder = JobBuilder(scenario.size, joined=scenario.others)
    builder.begin(
        scenario.others, "join", site="train.py:3", waiting_for=scenario.at_fault
    ).advance(30)
    return builder if scenario.live else scenario.time_out(builder, "did not come")


def missing_without_launcher(scenario: Scenario) -> JobBuilder:
    builder = JobBuilder(scenario.size, joined=scenario.others, launched=False)
    builder.ranks[scenario.at_fault].pid, builder.ranks[scenario.at_fault].state = 0, "gone"
    builder.begin(
        scenario.others, "join", site="train.py:3", waiting_for=scenario.at_fault
    ).advance(30)
    return builder if scenario.live else scenario.time_out(builder, "did not come")


def dead_before_it_joined(scenario: Scenario) -> JobBuilder:
    builder = JobBuilder(scenario.size, joined=scenario.others).begin(
        scenario.others, "join", site="train.py:3"
    )
    builder.advance(1).end_process(scenario.at_fault, -9).advance(30)
    return builder if scenario.live else scenario.time_out(builder, "did not come")


def order(scenario: Scenario) -> JobBuilder:
    members = range(scenario.size)
    builder = JobBuilder(scenario.size, groups={"a": members, "b": members}).run_collectives(2)
    builder.begin(scenario.others, group="a", waiting_for=scenario.at_fault)
    builder.begin(
        scenario.at_fault, group="b", waiting_for=scenario.others[0], site="train.py:50"
    ).advance(2)
    if scenario.live:
        return builder
    builder.end(outcome="deadlock").advance(0.01)
    exception = "CollectiveMismatch: ranks use groups in different orders"
    return builder.fail(range(scenario.size), exception).advance(0.1)


def aborted(scenario: Scenario) -> JobBuilder:
    builder = (
        scenario.wait(scenario.build())
        .leave(scenario.at_fault, abort_reason="the loss is NaN")
        .advance(0.004)
    )
    return scenario.notify(builder, "aborted", "Aborted: the group was aborted by rank 1")


def late(scenario: Scenario) -> JobBuilder:
    """The rank arrives after the timeout, and is notified."""
    builder = scenario.wait(scenario.build(), 60).end(scenario.others, "timeout").advance(0.01)
    builder.fail(scenario.others, LATE.format(scenario.at_fault, "is in its own code")).advance(2)
    return builder.fail(scenario.at_fault, LATE.format(scenario.at_fault, "is in its own code"))


FAILURES: dict[str, tuple[Callable[[Scenario], JobBuilder], str]] = {
    "killed": (killed, "killed"),
    "killed inside": (killed_inside, "killed"),
    "exited": (exited, "exited"),
    "failed": (failed, "failed"),
    "failed, unseen": (failed_unseen, "failed"),
    "failed in a session": (failed_in_session, "failed"),
    "failed in a session, and lives": (failed_in_session_and_lives, "aborted"),
    "stopped": (stopped, "stopped"),
    "stopped after the deadline": (stopped_after_deadline, "stopped"),
    "stopped, then Ctrl-C": (stopped_by_ctrl_z, "stopped"),
    "busy": (busy, "busy"),
    "busy, then ended": (busy_and_ended, "busy"),
    "busy, then Ctrl-C": (busy_and_interrupted, "busy"),
    "busy and reporting": (busy_and_reports, "busy"),
    "branch": (branch, "branch"),
    "finished": (finished, "finished"),
    "ended": (ended, "finished"),
    "unsent": (unsent, "unsent"),
    "unsent by an ended rank": (unsent_by_ended, "unsent"),
    "wrong tag": (wrong_tag, "unsent"),
    "unreceived": (unreceived, "unreceived"),
    "missing": (missing, "missing"),
    "missing, no launcher": (missing_without_launcher, "missing"),
    "dead before it joined": (dead_before_it_joined, "killed"),
    "order": (order, "order"),
    "aborted": (aborted, "aborted"),
    "late": (late, "late"),
}


def diagnosis(scenario: Scenario, failure: str) -> Diagnosis:
    return diagnose(FAILURES[failure][0](scenario).build())


@pytest.mark.parametrize("failure", FAILURES)
def test_the_rank_at_fault_is_found(failure: str) -> None:
    for size, live in itertools.product(SIZES, (True, False)):
        found = diagnosis(Scenario(size, 1, live), failure)
        assert found.kind == FAILURES[failure][1], (size, live, found)
        # Of two ranks that disagree, neither is in the minority.
        expected = (0, 1) if size == 2 and failure in ("branch", "order") else (1,)
        assert found.ranks == expected, (size, live, found)


@given(
    failure=st.sampled_from(sorted(FAILURES)),
    size=st.integers(3, 64),
    live=st.booleans(),
    at_fault=st.integers(0, 63),
)
def test_any_rank_at_fault_is_found(failure: str, size: int, live: bool, at_fault: int) -> None:
    found = diagnosis(Scenario(size, at_fault % size, live), failure)
    assert (found.kind, found.ranks) == (FAILURES[failure][1], (at_fault % size,))
