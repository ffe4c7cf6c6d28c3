"""Coordination of the launchers of a job on several hosts through its store.

Each launcher announces that it is present, before any of them starts its ranks. When ranks fail on
one host, all launchers stop theirs, and either start again or end with the same report. Finally
each launcher announces that its ranks have ended.
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
    """A failure of the job on another host.

    Attributes:
        text: The description of the failure, for people.
        code: The exit code of the job that results from it.
    """

    text: str
    code: int
    final: bool = False
    """True if the job cannot continue, even if restarts are left."""
    left: bool = False
    """True if the host has left on purpose, which is no failure."""


def first_attempt(store: Any) -> int:
    """Return the number of the first start of all ranks that has not failed yet.

    Args:
        store: The store of the job.
    """
    attempt = 0
    while store.check([_key(attempt, "failed")]):
        attempt += 1
    return attempt


def is_over(store: Any) -> str:
    """Return why the job cannot continue, with or without restarts; empty if it can."""
    return str(json.loads(store.get(_OVER))["text"]) if store.check([_OVER]) else ""


class Agreed(NamedTuple):
    """The values on which all hosts agree for one start of all ranks."""

    attempt: int
    """The number of the start, from 0."""
    failures: int
    """The number of failures before this start."""
    hosts: tuple[str, ...]
    """The names of the participating hosts."""


class AbsentHostError(LaunchError):
    """A host that was counted in the rendezvous does not take part."""


def agree(
    store: Any, number: int, count: int, own: tuple[int, int], name: str, seconds: float
) -> Agreed:
    """Agree with all hosts on the numbers of starts and of failures; wait for all of them.

    Each host counts for itself and may have missed some: a host may be new, or may have been told
    to start again before it learned the reason. The highest count is therefore the right one.
    Ctrl-C ends the wait.

    Args:
        store: The store of this start of all ranks, without an agreement yet.
        number: The number of this host.
        count: The number of hosts.
        own: The numbers of starts and of failures that this host has counted.
        name: The name of this host, unique among the hosts.
        seconds: The limit of the wait, in seconds.

    Returns:
        The highest counts and the names of the hosts.

    Raises:
        AbsentHostError: A host is absent; all hosts raise this error.
        torch.distributed.DistError: The store is gone.
    """
    proposals = [f"{_PROPOSED}{each}" for each in range(count)]
    store.set(proposals[number], json.dumps((*own, name)))
    end = time.monotonic() + seconds
    while not store.check([_AGREED]):
        if time.monotonic() > end + _NOTICE_SECONDS:  # the host that decides is absent
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
    """Write a decision for all hosts, unless another host was first."""
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
    """Wait until all hosts of a job are present; Ctrl-C ends the wait.

    Args:
        store: The store of the job.
        attempt: The number of the start of all ranks for which the hosts meet.
        number: The number of this host.
        count: The number of hosts.
        seconds: The limit of the wait, in seconds.
        tell: A function that shows a sentence to the user if the wait takes long.
        wrong: A function that returns why the job cannot start, as far as known; empty otherwise.

    Raises:
        LaunchError: Hosts did not arrive in time, a host does not fit, or the job is over.
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
    """Return whether all hosts are present, and update `missing` on host 0.

    Only host 0 checks every host, and the others wait for its signal, because there may be many.
    """
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
    """The state of one start of all ranks."""

    number: int
    hosts: tuple[str, ...]
    gone: list[tuple[float, str, str]] = field(default_factory=list)
    """The hosts that are lost: the time in seconds at which to report it, the name and place."""
    story: str = ""
    """The report of a failure on this host, or of the loss of a host; empty if there is none."""
    heard: Heard | None = None
    leaving: bool = False
    has_ended: bool = False
    settled: threading.Event = field(default_factory=threading.Event)
    """Set once all hosts know the failure, or can know it."""
    all_ended: threading.Event = field(default_factory=threading.Event)

    def key(self, name: str) -> str:
        return _key(self.number, name)


class News:
    """The exchange of failures with the other launchers, in a thread of its own.

    It has a thread because a store behind a severed link can block for long. It lasts as long as
    the job. All reports are about one start of all ranks, until `begin` announces a new one, except
    reports that end the job.
    """

    def __init__(self, store: Any, name: str, *, has_store: bool) -> None:
        """Start to listen.

        Args:
            store: The store of the job.
            name: The name of this host, unique among the hosts.
            has_store: True if this host has the store; it need not be host 0.
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
        """The places of the lost hosts, by their names."""
        self._wake, self._is_told = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="phalanx-news", daemon=True).start()

    @property
    def heard(self) -> Heard | None:
        """The failure on another host; None if none is known."""
        return self._over or self._now.heard

    def begin(self, attempt: int, hosts: tuple[str, ...]) -> None:
        """Begin a new start of all ranks and discard the reports about the previous one.

        Args:
            attempt: The number of this start, from 0.
            hosts: The names of the participating hosts.
        """
        now = self._now = _Attempt(attempt, hosts)
        for name, place in list(self._gone.items()):  # lost while the hosts met
            self._await_words(now, name, place)

    def tell(self, text: str, code: int, *, final: bool = False, left: bool = False) -> None:
        """Report a failure on this host to the others, unless another host was first.

        Waits at most `_TELL_SECONDS` seconds until the report is in the store.

        Args:
            text: The description of the failure.
            code: The exit code of a job that ends with it.
            final: True if the job cannot continue without this host.
            left: True if this host leaves on purpose, which is no failure.
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
        """Report the loss of a host to all hosts, unless its ranks have ended.

        The report is delayed by some seconds, because the ranks of the other hosts have lost a peer
        and may know more. Does not wait for the report.

        Args:
            name: The unique name of the host.
            place: The name of the host, for people.
        """
        self._gone[name] = place
        self._await_words(self._now, name, place)

    def leave(self, seconds: float) -> None:
        """Wait until the ranks of all hosts have ended, or some have failed.

        Args:
            seconds: The limit of the wait, in seconds. Then the host with the store reports its
                own end to the others, because they are about to lose the store.
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
        """Return `heard` after reading the store again; wait `_TELL_SECONDS` seconds at most."""
        end = time.monotonic() + _TELL_SECONDS
        wanted = self._looks + 2  # one look may be in progress
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
        """Return the report stored at `key`; None if it is this host's own."""
        news = json.loads(self._store.get(key))
        if news["name"] == self._name:
            return None
        return Heard(news["text"], news["code"], news["final"], news["left"])

    def _lose(self, now: _Attempt) -> None:
        """Handle the loss of the store: its host keeps it until all ranks have ended."""
        if now.leaving:
            now.all_ended.set()
        else:
            words = "the launcher of host 0, or the way to it, is gone"
            self._over = Heard(words, 1, final=True)
        now.settled.set()
        self._is_told.set()
