"""Which rank is at fault, in made-up jobs: every kind, alive and dead, before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.diagnosis import Diagnosis, diagnose
from tests.made_up import Story

SIZES = (2, 3, 8, 64)
LOST = "PeerLost: [rank 0/2 on node-a] all_reduce #4: rank {} (pid {}) {}"
LATE = "CollectiveTimeout: [rank 0/2 on node-a] all_reduce #4: rank 0 waited for rank 1; rank {} {}"


@dataclass(frozen=True)
class Cast:
    """Who plays what: one rank is the rank at fault, the others wait."""

    size: int
    at_fault: int
    live: bool

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.size) if number != self.at_fault]

    def begin(self, **kwargs: object) -> Story:
        return Story(self.size, **kwargs).together(3)  # type: ignore[arg-type]

    def wait(self, story: Story, seconds: float = 5, kind: str = "all_reduce") -> Story:
        """The others enter a collective that the rank at fault doesn't come to."""
        place = [
            note.members.index(self.at_fault) for note in story.ranks[self.at_fault].groups[:1]
        ]
        story.begins(self.others, kind, waiting_for=(place or [self.at_fault])[0])
        return story.passes(seconds)

    def told(self, story: Story, outcome: str, words: str) -> Story:
        """What they wait in breaks; they fail because of it, and the launcher ends the rest."""
        story.ends(self.others, outcome)
        if self.live:
            return story.passes(3)
        story.passes(0.01).fails(self.others, words)
        return story.passes(0.5).launcher_stops()

    def timed_out(self, story: Story, where: str = "is in its own code") -> Story:
        return self.told(story, "timeout", LATE.format(self.at_fault, where))


def killed(cast: Cast) -> Story:
    story = cast.wait(cast.begin()).dies(cast.at_fault, -9).passes(0.004)
    return cast.told(story, "peer_lost", LOST.format(1, 801, "was killed by SIGKILL"))


def killed_inside(cast: Cast) -> Story:
    """In the middle of an operation that all are in."""
    story = cast.begin().begins(range(cast.size), count=10**7, waiting_for=cast.others[0])
    story.passes(0.1).dies(cast.at_fault, -11).passes(0.004)
    return cast.told(story, "peer_lost", LOST.format(1, 801, "was killed by SIGSEGV"))


def exited(cast: Cast) -> Story:
    story = cast.wait(cast.begin()).dies(cast.at_fault, 3).passes(0.004)
    return cast.told(story, "peer_lost", LOST.format(1, 801, "exited with code 3"))


def failed(cast: Cast) -> Story:
    story = cast.wait(cast.begin()).fails(cast.at_fault, "KeyError: 'lr'").passes(0.004)
    return cast.told(story, "peer_lost", LOST.format(1, 801, "failed with KeyError"))


def failed_unseen(cast: Cast) -> Story:
    """The others are in code of their own; the launcher ends them."""
    story = cast.begin().passes(2).fails(cast.at_fault, "KeyError: 'lr'").passes(0.1)
    return story if cast.live else story.launcher_stops()


def failed_in_session(cast: Cast) -> Story:
    """`with phalanx.init()` tells the others when its body raises."""
    why = "its session ended with KeyError: 'lr'"
    story = cast.wait(cast.begin()).leaves(cast.at_fault, why=why).passes(0.004)
    story.ends(cast.others, "peer_lost").passes(0.001).fails(cast.at_fault, "KeyError: 'lr'")
    if cast.live:
        return story.passes(1)
    return story.fails(cast.others, LOST.format(1, 801, "failed with KeyError")).passes(0.1)


def failed_in_session_and_lives(cast: Cast) -> Story:
    """Somebody catches the exception, and the process goes on without the group."""
    why = "its session ended with KeyError: 'lr'"
    story = cast.wait(cast.begin()).leaves(cast.at_fault, why=why).passes(0.004)
    story.ends(cast.others, "peer_lost").passes(0.1)
    story.fails(cast.others, LOST.format(1, 801, "failed with KeyError")).passes(3)
    return story if cast.live else story.exits(cast.at_fault)


def stopped(cast: Cast) -> Story:
    story = cast.wait(cast.begin().is_stopped(cast.at_fault), 60)
    return story if cast.live else cast.timed_out(story, "is stopped by a signal (SIGSTOP)")


def stopped_after_deadline(cast: Cast) -> Story:
    """Where the rank is still stopped when the others have given up."""
    story = cast.wait(cast.begin().is_stopped(cast.at_fault), 60)
    story.ends(cast.others, "timeout").passes(1)
    return story if cast.live else story.fails(cast.others, LATE.format(0, "is")).passes(1)


def stopped_by_ctrl_z(cast: Cast) -> Story:
    """Somebody ends the launcher before the deadline: SIGTERM does nothing to the stopped rank."""
    story = cast.wait(cast.begin().is_stopped(cast.at_fault), 60)
    if cast.live:
        return story
    for rank in cast.others:
        story.dies(rank, -15, stopped=True)
    return story.passes(5).launcher_stops(signal=9)


def busy(cast: Cast) -> Story:
    story = cast.wait(cast.begin().runs(cast.at_fault), 60)
    return story if cast.live else cast.timed_out(story)


def busy_and_ended(cast: Cast) -> Story:
    """Ctrl-C at the launcher, before the deadline."""
    story = cast.wait(cast.begin().runs(cast.at_fault), 60)
    return story if cast.live else story.launcher_stops(130)


def busy_and_interrupted(cast: Cast) -> Story:
    """Ctrl-C at a terminal whose processes are the ranks themselves."""
    story = cast.wait(cast.begin(launched=False).runs(cast.at_fault), 60)
    if cast.live:
        return story
    story.fails(cast.at_fault, "KeyboardInterrupt", None).passes(0.01)
    story.ends(cast.others, "interrupted").fails(cast.others, "KeyboardInterrupt", None)
    return story


def busy_and_reports(cast: Cast) -> Story:
    """It goes on without the others, for ever."""
    story = cast.wait(cast.begin().runs(cast.at_fault), 60)
    story.reports([cast.at_fault], 17).passes(1)
    return story if cast.live else cast.timed_out(story)


def branch(cast: Cast) -> Story:
    story = cast.begin().begins(cast.others, count=10).passes(0.01)
    story.begins(cast.at_fault, "barrier", site="train.py:50", dtype="").passes(0.001)
    story.ends(outcome="mismatch")
    if cast.live:
        return story.passes(2)
    words = "CollectiveMismatch: [rank 0/2 on node-a] ranks disagree"
    return story.fails(range(cast.size), words).passes(0.1)


def finished(cast: Cast) -> Story:
    story = cast.wait(cast.begin()).leaves(cast.at_fault).passes(0.004)
    story.ends(cast.others, "left").passes(0.001).exits(cast.at_fault)
    if cast.live:
        return story.passes(1)
    words = f"CollectiveMismatch: rank {cast.at_fault} has left the group"
    return story.fails(cast.others, words).launcher_stops()


def ended(cast: Cast) -> Story:
    """The script comes to its end without leaving the group."""
    story = cast.wait(cast.begin()).exits(cast.at_fault).passes(0.004)
    words = f"PeerLost: rank {cast.at_fault} exited with code 0"
    return cast.told(story, "peer_lost", words)


def unsent(cast: Cast) -> Story:
    """The others are in a collective, the rank at fault waits for a message of one of them."""
    story = cast.wait(cast.begin(), 1)
    story.begins(cast.at_fault, "recv", peer=cast.others[0], tag=7, site="train.py:60").passes(30)
    if cast.live:
        return story
    return cast.timed_out(story, "is in recv float32[10] at train.py:60")


def unsent_by_ended(cast: Cast) -> Story:
    """The rank that should send has come to its end."""
    sender = cast.others[0]
    story = cast.begin().begins(cast.at_fault, "recv", peer=sender, tag=7).passes(5)
    story.leaves(sender).passes(0.01).ends(cast.at_fault, "left").exits(sender)
    if cast.live:
        return story.passes(1)
    return story.fails(cast.at_fault, "CollectiveMismatch: has left the group").launcher_stops()


def wrong_tag(cast: Cast) -> Story:
    """A message was sent, but with another tag; the sender has gone on."""
    sender = cast.others[0]
    story = cast.begin().begins(sender, "send", peer=cast.at_fault, tag=8).ends(sender)
    story.begins(cast.at_fault, "recv", peer=sender, tag=7).passes(60)
    if cast.live:
        return story
    story.ends(cast.at_fault, "timeout").passes(0.1)
    return story.fails(cast.at_fault, LATE.format(0, "is in its own code")).launcher_stops()


def unreceived(cast: Cast) -> Story:
    story = cast.wait(cast.begin(), 1)
    story.begins(cast.at_fault, "send", peer=cast.others[0], count=10**7).passes(30)
    return story if cast.live else cast.timed_out(story, "is in send float32[10000000]")


def missing(cast: Cast) -> Story:
    story = Story(cast.size, joined=cast.others)
    story.begins(cast.others, "join", site="train.py:3", waiting_for=cast.at_fault).passes(30)
    return story if cast.live else cast.timed_out(story, "did not come")


def missing_without_launcher(cast: Cast) -> Story:
    story = Story(cast.size, joined=cast.others, launched=False)
    story.ranks[cast.at_fault].pid, story.ranks[cast.at_fault].state = 0, "gone"
    story.begins(cast.others, "join", site="train.py:3", waiting_for=cast.at_fault).passes(30)
    return story if cast.live else cast.timed_out(story, "did not come")


def dead_before_it_joined(cast: Cast) -> Story:
    story = Story(cast.size, joined=cast.others).begins(cast.others, "join", site="train.py:3")
    story.passes(1).dies(cast.at_fault, -9).passes(30)
    return story if cast.live else cast.timed_out(story, "did not come")


def order(cast: Cast) -> Story:
    members = range(cast.size)
    story = Story(cast.size, groups={"a": members, "b": members}).together(2)
    story.begins(cast.others, group="a", waiting_for=cast.at_fault)
    story.begins(cast.at_fault, group="b", waiting_for=cast.others[0], site="train.py:50").passes(2)
    if cast.live:
        return story
    story.ends(outcome="deadlock").passes(0.01)
    words = "CollectiveMismatch: ranks use groups in different orders"
    return story.fails(range(cast.size), words).passes(0.1)


def aborted(cast: Cast) -> Story:
    story = cast.wait(cast.begin()).leaves(cast.at_fault, why="the loss is NaN").passes(0.004)
    return cast.told(story, "aborted", "Aborted: the group was aborted by rank 1")


def late(cast: Cast) -> Story:
    """It comes after the deadline, and is told as well."""
    story = cast.wait(cast.begin(), 60).ends(cast.others, "timeout").passes(0.01)
    story.fails(cast.others, LATE.format(cast.at_fault, "is in its own code")).passes(2)
    return story.fails(cast.at_fault, LATE.format(cast.at_fault, "is in its own code"))


PLOTS: dict[str, tuple[Callable[[Cast], Story], str]] = {
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
    "unsent by one that ended": (unsent_by_ended, "unsent"),
    "wrong tag": (wrong_tag, "unsent"),
    "unreceived": (unreceived, "unreceived"),
    "missing": (missing, "missing"),
    "missing, no launcher": (missing_without_launcher, "missing"),
    "dead before it joined": (dead_before_it_joined, "killed"),
    "order": (order, "order"),
    "aborted": (aborted, "aborted"),
    "late": (late, "late"),
}


def diagnosis(cast: Cast, plot: str) -> Diagnosis:
    return diagnose(PLOTS[plot][0](cast).job())


@pytest.mark.parametrize("plot", PLOTS)
def test_the_culprit_is_found(plot: str) -> None:
    for size, live in itertools.product(SIZES, (True, False)):
        found = diagnosis(Cast(size, 1, live), plot)
        assert found.kind == PLOTS[plot][1], (size, live, found)
        # Of two ranks that disagree, neither is in the minority.
        expected = (0, 1) if size == 2 and plot in ("branch", "order") else (1,)
        assert found.ranks == expected, (size, live, found)


@given(
    plot=st.sampled_from(sorted(PLOTS)),
    size=st.integers(3, 64),
    live=st.booleans(),
    at_fault=st.integers(0, 63),
)
def test_whoever_it_is(plot: str, size: int, live: bool, at_fault: int) -> None:
    found = diagnosis(Cast(size, at_fault % size, live), plot)
    assert (found.kind, found.ranks) == (PLOTS[plot][1], (at_fault % size,))
