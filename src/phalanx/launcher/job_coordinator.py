"""Coordination of the launchers of a job on several hosts through its store.

Each launcher announces that it is present, before any of them starts its ranks. When ranks fail on
one host, all launchers stop theirs, and either restart them or end with the same report. Finally
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
from phalanx.launcher.failures import RemoteFailure
from phalanx.system.polling import attempts, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_END = "phalanx/end"
_PROPOSED, _DECIDED, _AGREED = "phalanx/proposed/", "phalanx/decided", "phalanx/agreed"
_POLL_SECONDS = 0.1
_AGREE_POLL_SECONDS = 0.02
_NOTICE_SECONDS = 5.0
_IDLE_POLL_SECONDS = 0.5
_REPORT_SECONDS = 2.0
_REFRESH_POLL_SECONDS = 0.01
_LOSS_DELAY_SECONDS = 5.0
_MAX_NAMED = 8


def next_attempt(store: Any) -> int:
    """Return the number of the first start of all ranks that has not failed yet.

    Args:
        store: The store of the job.
    """
    attempt = 0
    while store.check([_key(attempt, "failed")]):
        attempt += 1
    return attempt


def end_reason(store: Any) -> str:
    """Return why the job cannot continue, with or without restarts; empty if it can."""
    return _decode(store.get(_END))[1].text if store.check([_END]) else ""


class Agreement(NamedTuple):
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
    store: Any, number: int, count: int, own_counts: tuple[int, int], name: str, seconds: float
) -> Agreement:
    """Agree with all hosts on the numbers of starts and of failures; wait for all of them.

    Each host counts for itself and may have missed some: a host may be new, or may have been told
    to start again before it learned the reason. The highest count is therefore the right one.
    Ctrl-C ends the wait.

    Args:
        store: The store of this start of all ranks, without an agreement yet.
        number: The number of this host.
        count: The number of hosts.
        own_counts: The numbers of starts and of failures that this host has counted.
        name: The name of this host, unique among the hosts.
        seconds: The limit of the wait, in seconds.

    Returns:
        The highest counts and the names of the hosts.

    Raises:
        AbsentHostError: A host is absent; all hosts raise this error.
        torch.distributed.DistError: The store is lost.
    """
    proposals = [f"{_PROPOSED}{each}" for each in range(count)]
    store.set(proposals[number], json.dumps((*own_counts, name)))
    end = time.monotonic() + seconds
    for _ in attempts(longest=_AGREE_POLL_SECONDS):
        if store.check([_AGREED]):
            break
        if time.monotonic() > end + _NOTICE_SECONDS:  # the host that decides is absent
            raise AbsentHostError("a host was lost during the rendezvous")
        if number == 0 and store.check(proposals):
            starts, failures, names = zip(*map(json.loads, store.multi_get(proposals)), strict=True)
            _decide(store, json.dumps([max(starts), max(failures), names]))
        elif time.monotonic() > end:
            missing = [each for each, key in enumerate(proposals) if not store.check([key])]
            reason = f"{_format_hosts(missing)} of {count} did not take part, although counted"
            _decide(store, json.dumps(reason))
    agreement = json.loads(store.get(_AGREED))
    if isinstance(agreement, str):
        raise AbsentHostError(agreement)
    attempt, most_failures, hosts = agreement
    return Agreement(attempt, most_failures, tuple(hosts))


def _decide(store: Any, decision: str) -> None:
    """Write a decision for all hosts, unless another host was first."""
    if store.add(_DECIDED, 1) == 1:
        store.set(_AGREED, decision)


def wait_for_hosts(
    store: Any,
    attempt: int,
    number: int,
    count: int,
    seconds: float,
    notify: Callable[[str], None],
    find_error: Callable[[], str],
) -> None:
    """Wait until all hosts of a job are present; Ctrl-C ends the wait.

    Args:
        store: The store of the job.
        attempt: The number of the start of all ranks for which the hosts wait.
        number: The number of this host.
        count: The number of hosts.
        seconds: The limit of the wait, in seconds.
        notify: A function that shows a sentence to the user if the wait takes long.
        find_error: A function that returns why the job cannot start; empty if no reason is known.

    Raises:
        LaunchError: Hosts did not arrive in time, a host does not fit, or the job is over.
    """
    start = time.monotonic()
    notice = start + _NOTICE_SECONDS
    store.set(_key(attempt, f"launcher/{number}"), socket.gethostname())
    missing = list(range(1, count))
    for _ in attempts(longest=_POLL_SECONDS):
        if _are_hosts_present(store, attempt, number, missing):
            return
        if reason := find_error() or end_reason(store):
            raise LaunchError(reason)
        if time.monotonic() > start + seconds:
            raise LaunchError(
                f"{_format_hosts(missing)} of {count} did not join within {seconds:g} s: check "
                "that `phalanx run --node-rank N` is running there"
            )
        if time.monotonic() > notice:
            notice = float("inf")
            notify(f"waiting for {_format_hosts(missing)} of {count}, up to {seconds:g} s")


def _are_hosts_present(store: Any, attempt: int, number: int, missing: list[int]) -> bool:
    """Return whether all hosts are present, and update `missing` on host 0.

    Only host 0 checks every host, and the others wait for its signal, because there may be many.
    """
    all_present = _key(attempt, "launchers")
    try:
        if number:
            return bool(store.check([all_present]))
        missing[:] = [
            other for other in missing if not store.check([_key(attempt, f"launcher/{other}")])
        ]
        if not missing:
            store.set(all_present, "")
    except dist.DistError as error:
        raise LaunchError(f"host 0 ended while this host waited for it: {error}") from None
    return not missing


def _encode(name: str, failure: RemoteFailure) -> str:
    """Return a failure, reported by the host with a unique name, as a value for the store."""
    return json.dumps([name, *failure])


def _decode(value: bytes) -> tuple[str, RemoteFailure]:
    name, *failure = json.loads(value)
    return name, RemoteFailure(*failure)


def _key(attempt: int, name: str) -> str:
    return f"phalanx/{attempt}/{name}"


def _format_hosts(missing: list[int]) -> str:
    names = ", ".join(map(str, missing[:_MAX_NAMED])) + (
        ", ..." if len(missing) > _MAX_NAMED else ""
    )
    return f"host{'s' if len(missing) > 1 else ''} {names}"


@dataclass
class _Attempt:
    """The state of one start of all ranks."""

    number: int
    hosts: tuple[str, ...]
    ranks: list[int] = field(default_factory=list)
    """The ranks of this host."""
    is_announced: bool = False
    """True once the ranks of this host are in the store."""
    lost_hosts: list[tuple[float, str, str]] = field(default_factory=list)
    """The lost hosts: the time in seconds at which to report it, the name and the host name."""
    report: str = ""
    """The failure of this host, or the loss of a host, to be published; empty if there is none."""
    remote_failure: RemoteFailure | None = None
    is_finishing: bool = False
    has_ended: bool = False
    published: threading.Event = field(default_factory=threading.Event)
    """Set once a failure is in the store for all hosts, or the store is lost."""
    all_ended: threading.Event = field(default_factory=threading.Event)

    def key(self, name: str) -> str:
        return _key(self.number, name)


class JobCoordinator:
    """The exchange of failures with the other launchers, in a thread of its own.

    It has a thread because a store behind a severed link can block for long. It lasts as long as
    the job. All reports are about one start of all ranks, until `begin_attempt` announces a new
    one, except reports that end the job.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        has_store: bool,
        min_hosts: int = 0,
        on_lost_host: Callable[[str, list[int]], None] = lambda _host, _ranks: None,
    ) -> None:
        """Start to poll the store.

        Args:
            store: The store of the job.
            name: The name of this host, unique among the hosts.
            has_store: True if this host has the store; it need not be host 0.
            min_hosts: The least number of hosts with which an elastic job continues after the loss
                of others; 0 if the loss of a host is a failure.
            on_lost_host: A function called with the host name and the ranks of a lost host, without
                which the job continues; on the host with the store, in the thread of this object.
        """
        self._store = store.clone()
        self._has_store = has_store
        self._min_hosts = min_hosts
        self._on_lost_host = on_lost_host
        self._name = name
        self._attempt = _Attempt(0, (), is_announced=True)
        self._final_report = ""
        self._final_failure: RemoteFailure | None = None
        self._is_closed = self._has_lost_store = False
        self._polls = 0
        self._lost_hosts: dict[str, str] = {}
        """The host names of the lost hosts, by their unique names."""
        self._wake, self._final_published = threading.Event(), threading.Event()
        threading.Thread(target=self._poll_store, name="phalanx-coordinator", daemon=True).start()

    @property
    def has_lost_store(self) -> bool:
        """True if the store, on another host, cannot be reached any more."""
        return self._has_lost_store

    @property
    def remote_failure(self) -> RemoteFailure | None:
        """The failure on another host; None if none is known."""
        return self._final_failure or self._attempt.remote_failure

    def begin_attempt(self, number: int, hosts: tuple[str, ...], ranks: Sequence[int] = ()) -> None:
        """Begin a new start of all ranks and discard the reports about the previous one.

        Args:
            number: The number of this start, from 0.
            hosts: The names of the hosts that took part in its begin.
            ranks: The ranks of this host.
        """
        attempt = self._attempt = _Attempt(number, hosts, list(ranks))
        for name, hostname in list(self._lost_hosts.items()):  # lost during the rendezvous
            self._schedule_loss(attempt, name, hostname)

    def report(
        self, text: str, code: int, *, is_final: bool = False, has_left: bool = False
    ) -> None:
        """Report a failure on this host to the others, unless another host was first.

        Waits at most `_REPORT_SECONDS` seconds until the report is in the store.

        Args:
            text: The description of the failure.
            code: The exit code of a job that ends with it.
            is_final: True if the job cannot continue without this host.
            has_left: True if this host leaves on purpose, which is no failure.
        """
        if has_left and self._min_hosts:
            return  # the host with the store records it as lost
        failure = RemoteFailure(f"on {socket.gethostname()}: {text}", code, is_final, has_left)
        attempt, report = self._attempt, _encode(self._name, failure)
        if is_final:
            self._final_report, published = report, self._final_published
        else:
            attempt.report, published = report, attempt.published
        self._wake.set()
        published.wait(_REPORT_SECONDS)

    def report_lost_host(self, name: str, hostname: str) -> None:
        """Report the loss of a host to all hosts, unless its ranks have ended.

        The report is delayed by some seconds, because the ranks of the other hosts have lost a peer
        and may know more. Does not wait for the report.

        Args:
            name: The unique name of the host.
            hostname: The name of the host, for people.
        """
        self._lost_hosts[name] = hostname
        self._schedule_loss(self._attempt, name, hostname)

    def finish(self, seconds: float) -> None:
        """Wait until the ranks of all hosts have ended, or some have failed.

        Args:
            seconds: The limit of the wait, in seconds. Then the host with the store reports its
                own end to the others, because they are about to lose the store.
        """
        attempt = self._attempt
        attempt.is_finishing = True
        self._wake.set()
        end = time.monotonic() + seconds
        while self.remote_failure is None and time.monotonic() < end:
            if attempt.all_ended.wait(_POLL_SECONDS):
                return
        if self.remote_failure is None and self._has_store:
            self.report("the ranks of this host have ended", 0)

    def refresh(self) -> RemoteFailure | None:
        """Return `remote_failure` after polling the store, within `_REPORT_SECONDS` seconds."""
        wanted = self._polls + 2  # one poll may be in progress

        def has_polled() -> bool:
            self._wake.set()
            return self._polls >= wanted or self._final_failure is not None

        wait_until(has_polled, _REPORT_SECONDS, longest=_REFRESH_POLL_SECONDS)
        return self.remote_failure

    def close(self) -> None:
        """Stop polling the store."""
        self._is_closed = True
        self._wake.set()

    def _schedule_loss(self, attempt: _Attempt, name: str, hostname: str) -> None:
        # Hosts may have joined an elastic job since its begin.
        is_candidate = name in attempt.hosts or self._min_hosts
        if is_candidate and all(name != other for _, other, _ in attempt.lost_hosts):
            delay = 0.0 if self._min_hosts else _LOSS_DELAY_SECONDS
            attempt.lost_hosts.append((time.monotonic() + delay, name, hostname))
            self._wake.set()

    def _poll_store(self) -> None:
        while not self._is_closed:
            attempt = self._attempt
            try:
                self._poll(attempt)
            except dist.DistError:
                self._handle_lost_store(attempt)
                return
            self._polls += 1
            self._wake.wait(_POLL_SECONDS if attempt.is_finishing else _IDLE_POLL_SECONDS)
            self._wake.clear()

    def _poll(self, attempt: _Attempt) -> None:
        if self._final_report and not self._final_published.is_set():
            self._store.compare_set(_END, "", self._final_report)
            self._final_published.set()
        if self._final_failure is None and self._store.check([_END]):
            self._final_failure = self._read_failure(_END)
        if attempt.published.is_set():
            return
        self._announce(attempt)
        self._report_due_losses(attempt)
        if attempt.report:
            self._store.compare_set(attempt.key("failed"), "", attempt.report)
        if self._store.check([attempt.key("failed")]):
            attempt.remote_failure = self._read_failure(attempt.key("failed"))
            if attempt.remote_failure is not None and attempt.remote_failure.code == 0:
                attempt.remote_failure = None
                attempt.all_ended.set()
            attempt.published.set()
        elif attempt.is_finishing:
            self._finish(attempt)

    def _announce(self, attempt: _Attempt) -> None:
        """Publish the ranks of this host, and that it takes part if it has come late."""
        if not self._min_hosts or attempt.is_announced:
            return
        attempt.is_announced = True
        self._store.set(attempt.key(f"ranks/{self._name}"), json.dumps(attempt.ranks))
        if self._name not in attempt.hosts:
            self._store.add(attempt.key("hosts"), 1)

    def _finish(self, attempt: _Attempt) -> None:
        """Publish that the ranks of this host have ended, and look at the others."""
        if not attempt.has_ended:
            self._store.set(attempt.key(f"ended/{self._name}"), "")
            self._store.add(attempt.key("ended"), 1)
            attempt.has_ended = True
        if self._store.add(attempt.key("ended"), 0) >= self._count_hosts(attempt):
            attempt.all_ended.set()

    def _count_hosts(self, attempt: _Attempt) -> int:
        """Return the number of hosts that take part, without those that are lost."""
        return len(attempt.hosts) + int(self._store.add(attempt.key("hosts"), 0))

    def _report_due_losses(self, attempt: _Attempt) -> None:
        due = [each for each in attempt.lost_hosts if time.monotonic() > each[0]]
        for each in due:
            attempt.lost_hosts.remove(each)
            _, name, hostname = each
            if attempt.report or self._store.check([attempt.key(f"ended/{name}")]):
                continue
            if self._min_hosts and self._store.check([attempt.key(f"ranks/{name}")]):
                if self._count_hosts(attempt) > self._min_hosts:
                    self._store.add(attempt.key("hosts"), -1)
                    ranks = json.loads(self._store.get(attempt.key(f"ranks/{name}")))
                    self._on_lost_host(hostname, ranks)
                    continue
            elif self._min_hosts and name not in attempt.hosts:
                continue  # it has not joined
            text = f"lost the launcher on {hostname}, or the connection to it"
            attempt.report = _encode(name, RemoteFailure(text, 1))

    def _read_failure(self, key: str) -> RemoteFailure | None:
        """Return the report stored at `key`; None if it is this host's own."""
        name, failure = _decode(self._store.get(key))
        return None if name == self._name else failure

    def _handle_lost_store(self, attempt: _Attempt) -> None:
        """Handle the loss of the store: its host keeps it until all ranks have ended."""
        if attempt.is_finishing:
            attempt.all_ended.set()
        else:
            self._has_lost_store = True
            description = "lost the launcher of host 0, or the connection to it"
            self._final_failure = RemoteFailure(description, 1, is_final=True)
        attempt.published.set()
        self._final_published.set()
