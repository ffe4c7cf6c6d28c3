"""What the launchers of a job on several hosts tell each other, through its store.

That they are there, before any of them starts its ranks; that ranks of one of them have failed, so
that all stop theirs, and either start again or end and say the same; and that their ranks have
ended.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AbsentHostError",
    "Agreed",
    "Heard",
    "News",
    "agree",
    "first_attempt",
    "is_over",
    "meet",
]

_OVER = "phalanx/over"
_PROPOSED, _DECIDED, _AGREED = "phalanx/proposed/", "phalanx/decided", "phalanx/agreed"
_POLL_SECONDS = 0.1
_AGREE_SECONDS = 0.02
_NOTICE_SECONDS = 5.0
_WATCH_SECONDS = 0.5
_TELL_SECONDS = 2.0
_CATCH_UP_SECONDS = 0.01
_MISS_SECONDS = 5.0
_NAMED = 8


class Heard(NamedTuple):
    """How the job failed on another host, and the exit code that follows from it."""

    text: str
    code: int
    final: bool = False
    """The job can't go on, whatever restarts are left."""
    left: bool = False
    """That host has left, on purpose: no failure."""


def first_attempt(store: Any) -> int:
    """The number of the first start of all ranks that hasn't failed yet.

    Args:
        store: The job's.
    """
    attempt = 0
    while store.check([_key(attempt, "failed")]):
        attempt += 1
    return attempt


def is_over(store: Any) -> str:
    """Why the job can't go on, whatever a host could do; empty if it can."""
    return str(json.loads(store.get(_OVER))["text"]) if store.check([_OVER]) else ""


class Agreed(NamedTuple):
    """What all hosts of a start of all ranks know."""

    attempt: int
    """Which one it is, from 0."""
    failures: int
    """Before it."""
    hosts: tuple[str, ...]
    """The names of those that take part."""


class AbsentHostError(LaunchError):
    """A host that was counted when the hosts met doesn't take part."""


def agree(
    store: Any, number: int, count: int, own: tuple[int, int], name: str, seconds: float
) -> Agreed:
    """Have all hosts know the same number of starts and of failures; waits for all of them.

    Each counts for itself, and may not have seen all: a host may be new, or have been told to start
    again before it heard why. So the most that anyone counts is right. Ctrl-C ends the wait.

    Args:
        store: Of this start of all ranks, in which nobody has agreed yet.
        number: This host's.
        count: How many there are.
        own: How many starts and failures this host counts.
        name: This host's, unlike those of the others.
        seconds: How long to wait.

    Raises:
        AbsentHostError: A host isn't there; the others learn it too.
        torch.distributed.DistError: The store has gone.
    """
    proposals = [f"{_PROPOSED}{each}" for each in range(count)]
    store.set(proposals[number], json.dumps((*own, name)))
    end = time.monotonic() + seconds
    while not store.check([_AGREED]):
        if time.monotonic() > end + _NOTICE_SECONDS:  # who was to decide is the one that is absent
            raise AbsentHostError("a host has gone while the hosts met")
        if number == 0 and store.check(proposals):
            starts, failures, names = zip(*map(json.loads, store.multi_get(proposals)), strict=True)
            _decide(store, json.dumps([max(starts), max(failures), names]))
        elif time.monotonic() > end:
            missing = [each for each, key in enumerate(proposals) if not store.check([key])]
            _decide(store, json.dumps(f"{_hosts(missing)} of {count} didn't come, though counted"))
        time.sleep(_AGREE_SECONDS)
    agreed = json.loads(store.get(_AGREED))
    if isinstance(agreed, str):
        raise AbsentHostError(agreed)
    attempt, most, hosts = agreed
    return Agreed(attempt, most, tuple(hosts))


def _decide(store: Any, words: str) -> None:
    """Who is first has decided for all."""
    if store.add(_DECIDED, 1) == 1:
        store.set(_AGREED, words)


def meet(
    store: Any,
    attempt: int,
    number: int,
    count: int,
    seconds: float,
    tell: Callable[[str], None],
    wrong: Callable[[], str],
) -> None:
    """Wait until all hosts of a job are there; Ctrl-C ends it.

    Args:
        store: The job's.
        attempt: The number of the start of all ranks that they meet for.
        number: This host's.
        count: How many there are.
        seconds: How long to wait.
        tell: Is given a sentence for the user, when it takes long.
        wrong: Why the job can't be, if that is known by now; else empty.

    Raises:
        LaunchError: They didn't come in time, or one that came doesn't fit.
    """
    start = time.monotonic()
    notice = start + _NOTICE_SECONDS
    store.set(_key(attempt, f"launcher/{number}"), socket.gethostname())
    missing = list(range(1, count))
    while not _are_all_there(store, attempt, number, missing):
        if why := wrong() or is_over(store):
            raise LaunchError(why)
        if time.monotonic() > start + seconds:
            raise LaunchError(
                f"{_hosts(missing)} of {count} didn't come within {seconds:g} s: is `phalanx run "
                "--node-rank N` running there?"
            )
        if time.monotonic() > notice:
            notice = float("inf")
            tell(f"waiting for {_hosts(missing)} of {count}, up to {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _are_all_there(store: Any, attempt: int, number: int, missing: list[int]) -> bool:
    """Host 0 looks who is missing; the others wait for its word, since they may be many."""
    all_here = _key(attempt, "launchers")
    try:
        if number:
            return bool(store.check([all_here]))
        missing[:] = [
            other for other in missing if not store.check([_key(attempt, f"launcher/{other}")])
        ]
        if not missing:
            store.set(all_here, "")
    except dist.DistError as error:
        raise LaunchError(f"host 0 has given up while this one waited: {error}") from None
    return not missing


def _story(name: str, text: str, code: int, *, final: bool = False, left: bool = False) -> str:
    return json.dumps({"name": name, "text": text, "code": code, "final": final, "left": left})


def _key(attempt: int, name: str) -> str:
    return f"phalanx/{attempt}/{name}"


def _hosts(missing: list[int]) -> str:
    names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return f"host{'s' if len(missing) > 1 else ''} {names}"


@dataclass
class _Attempt:
    """What is known of one start of all ranks."""

    number: int
    hosts: tuple[str, ...]
    gone: list[tuple[float, str, str]] = field(default_factory=list)
    """The hosts that have gone without a word: when that is told, their names and places."""
    story: str = ""
    """Of a failure on this host, or of a host that has gone."""
    heard: Heard | None = None
    leaving: bool = False
    has_ended: bool = False
    settled: threading.Event = field(default_factory=threading.Event)
    """All hosts know how it failed, or can."""
    all_ended: threading.Event = field(default_factory=threading.Event)

    def key(self, name: str) -> str:
        return _key(self.number, name)


class News:
    """Listens, and tells, in a thread of its own: a store behind a cut link can block for long.

    It lasts as long as the job. What is told and heard is about one start of all ranks, until
    `begin` says that there is a new one; but for what ends the job.
    """

    def __init__(self, store: Any, name: str, *, has_store: bool) -> None:
        """Begin to listen.

        Args:
            store: The job's.
            name: This host's, unlike those of the others.
            has_store: Whether the store is this host's, which need not be number 0.
        """
        self._store = store.clone()
        self._has_store = has_store
        self._name = name
        self._now = _Attempt(0, ())
        self._last_words = ""
        self._over: Heard | None = None
        self._is_closed = False
        self._looks = 0
        self._gone: dict[str, str] = {}
        """The places of the hosts that have gone, by their names."""
        self._wake, self._is_told = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="phalanx-news", daemon=True).start()

    @property
    def heard(self) -> Heard | None:
        """How the ranks failed on another host; None as long as nothing is known."""
        return self._over or self._now.heard

    def begin(self, attempt: int, hosts: tuple[str, ...]) -> None:
        """All ranks are started again: what was heard of those before is past.

        Args:
            attempt: Which start this is, from 0.
            hosts: The names of those that take part.
        """
        now = self._now = _Attempt(attempt, hosts)
        for name, place in list(self._gone.items()):  # while the hosts met
            self._await_words(now, name, place)

    def tell(self, text: str, code: int, *, final: bool = False, left: bool = False) -> None:
        """Tell the others that ranks have failed here, unless one of them was first.

        Waits some seconds at most until they can know it.

        Args:
            text: How.
            code: The exit code of a job that ends with it.
            final: The job can't go on without this host.
            left: It is no failure, this host leaves.
        """
        words = f"on {socket.gethostname()}: {text}"
        story = _story(self._name, words, code, final=final, left=left)
        now = self._now
        if final:
            self._last_words = story
        else:
            now.story = story
        self._wake.set()
        (self._is_told if final else now.settled).wait(_TELL_SECONDS)

    def miss(self, name: str, place: str) -> None:
        """Have all hosts know that one has gone without a word, unless its ranks have ended.

        Soon: the ranks of the others, which have lost a peer, may know more. Doesn't wait for that.

        Args:
            name: The host's.
            place: The same, for people.
        """
        self._gone[name] = place
        self._await_words(self._now, name, place)

    def leave(self, seconds: float) -> None:
        """Wait until the ranks of all hosts have ended, or some have failed.

        Args:
            seconds: How long. Then the host whose store goes tells the others to mind themselves.
        """
        now = self._now
        now.leaving = True
        self._wake.set()
        end = time.monotonic() + seconds
        while self.heard is None and time.monotonic() < end:
            if now.all_ended.wait(_POLL_SECONDS):
                return
        if self.heard is None and self._has_store:
            self.tell("ended well", 0)

    def catch_up(self) -> Heard | None:
        """What is heard by now, of all that others have told; waits for that, some seconds at most.

        Returns:
            As `heard`.
        """
        end = time.monotonic() + _TELL_SECONDS
        wanted = self._looks + 2  # one may be under way
        while self._looks < wanted and self._over is None and time.monotonic() < end:
            self._wake.set()
            time.sleep(_CATCH_UP_SECONDS)
        return self.heard

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        self._wake.set()

    def _await_words(self, now: _Attempt, name: str, place: str) -> None:
        if name in now.hosts and all(name != other for _, other, _ in now.gone):
            now.gone.append((time.monotonic() + _MISS_SECONDS, name, place))

    def _listen(self) -> None:
        while not self._is_closed:
            now = self._now
            try:
                self._look(now)
            except dist.DistError:
                self._lose(now)
                return
            self._looks += 1
            self._wake.wait(_POLL_SECONDS if now.leaving else _WATCH_SECONDS)
            self._wake.clear()

    def _look(self, now: _Attempt) -> None:
        if self._last_words and not self._is_told.is_set():
            self._store.compare_set(_OVER, "", self._last_words)
            self._is_told.set()
        if self._over is None and self._store.check([_OVER]):
            self._over = self._heard(_OVER)
        if now.settled.is_set():
            return
        self._miss(now)
        if now.story:
            self._store.compare_set(now.key("failed"), "", now.story)
        if self._store.check([now.key("failed")]):
            now.heard = self._heard(now.key("failed"))
            if now.heard is not None and now.heard.code == 0:
                now.heard = None
                now.all_ended.set()
            now.settled.set()
        elif now.leaving:
            if not now.has_ended:
                self._store.set(now.key(f"ended/{self._name}"), "")
                self._store.add(now.key("ended"), 1)
                now.has_ended = True
            if self._store.add(now.key("ended"), 0) >= len(now.hosts):
                now.all_ended.set()

    def _miss(self, now: _Attempt) -> None:
        due = [each for each in now.gone if time.monotonic() > each[0]]
        for each in due:
            now.gone.remove(each)
            _, name, place = each
            if not now.story and not self._store.check([now.key(f"ended/{name}")]):
                now.story = _story(name, f"the launcher on {place}, or the way to it, is gone", 1)

    def _heard(self, key: str) -> Heard | None:
        """What stands there, if it isn't this host's own story."""
        news = json.loads(self._store.get(key))
        if news["name"] == self._name:
            return None
        return Heard(news["text"], news["code"], news["final"], news["left"])

    def _lose(self, now: _Attempt) -> None:
        """The host with the store is there until all have ended."""
        if now.leaving:
            now.all_ended.set()
        else:
            words = "the launcher of host 0, or the way to it, is gone"
            self._over = Heard(words, 1, final=True)
        now.settled.set()
        self._is_told.set()
