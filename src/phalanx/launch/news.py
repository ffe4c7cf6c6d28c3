"""What the launchers of a job on several hosts tell each other, through its store.

That they are there, before any of them starts its ranks; that the job has failed on one of them, so
that all stop and say the same; and that their ranks have ended.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from phalanx.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Heard", "News", "meet"]

_HERE, _ALL_HERE = "phalanx/launcher/", "phalanx/launchers"
_FAILED, _ENDED = "phalanx/failed", "phalanx/ended"
_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 5.0
_WATCH_SECONDS = 0.5
_TELL_SECONDS = 2.0
_NAMED = 8


class Heard(NamedTuple):
    """How the job failed on another host, and the exit code that follows from it."""

    text: str
    code: int


def meet(
    store: Any,
    number: int,
    count: int,
    seconds: float,
    tell: Callable[[str], None],
    wrong: Callable[[], str],
) -> None:
    """Wait until all hosts of a job are there; Ctrl-C ends it.

    Args:
        store: The job's.
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
    store.set(f"{_HERE}{number}", socket.gethostname())
    missing = list(range(1, count))
    while not _are_all_there(store, number, missing):
        if why := wrong():
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


def _are_all_there(store: Any, number: int, missing: list[int]) -> bool:
    """Host 0 looks who is missing; the others wait for its word, since they may be many."""
    try:
        if number:
            return bool(store.check([_ALL_HERE]))
        missing[:] = [other for other in missing if not store.check([f"{_HERE}{other}"])]
        if not missing:
            store.set(_ALL_HERE, "")
    except dist.DistError as error:
        raise LaunchError(f"host 0 has given up while this one waited: {error}") from None
    return not missing


def _hosts(missing: list[int]) -> str:
    names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return f"host{'s' if len(missing) > 1 else ''} {names}"


class News:
    """Listens, and tells, in a thread of its own: a store behind a cut link can block for long.

    Attributes:
        heard: How the job failed on another host; None as long as nothing is known.
    """

    def __init__(self, store: Any, number: int, count: int, *, has_store: bool) -> None:
        """Begin to listen.

        Args:
            store: The job's.
            number: This host's.
            count: How many there are.
            has_store: Whether the store is this host's, which need not be number 0.
        """
        self.heard: Heard | None = None
        self._store = store.clone()
        self._number, self._count = number, count
        self._has_store = has_store
        self._failure = ""
        self._leaving = self._closed = False
        self._wake, self._told, self._all_ended = (threading.Event() for _ in range(3))
        threading.Thread(target=self._listen, name="phalanx-news", daemon=True).start()

    def tell(self, text: str, code: int) -> None:
        """Tell the others that the job has failed here, unless one of them was first.

        Waits some seconds at most until they can know it.
        """
        where = socket.gethostname()
        self._failure = json.dumps(
            {"host": self._number, "text": f"on {where}: {text}", "code": code}
        )
        self._wake.set()
        self._told.wait(_TELL_SECONDS)

    def leave(self, seconds: float) -> None:
        """Wait until the ranks of all hosts have ended, or the job has failed on one of them.

        Args:
            seconds: How long. Then the host whose store goes tells the others to mind themselves.
        """
        self._leaving = True
        self._wake.set()
        end = time.monotonic() + seconds
        while self.heard is None and time.monotonic() < end:
            if self._all_ended.wait(_POLL_SECONDS):
                return
        if self.heard is None and self._has_store:
            self.tell("ended well", 0)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._wake.set()

    def _listen(self) -> None:
        ended = False
        while not self._closed:
            try:
                if self._failure and not self._told.is_set():
                    self._store.compare_set(_FAILED, "", self._failure)
                    self._told.set()
                if self._store.check([_FAILED]):
                    self._hear(json.loads(self._store.get(_FAILED)))
                    return
                if self._leaving:
                    ended = ended or bool(self._store.add(_ENDED, 1))
                    if self._store.add(_ENDED, 0) >= self._count:
                        self._all_ended.set()
            except dist.DistError:
                self._lose()
                return
            self._wake.wait(_POLL_SECONDS if self._leaving else _WATCH_SECONDS)
            self._wake.clear()

    def _hear(self, news: dict[str, Any]) -> None:
        self._told.set()
        if news["code"] == 0:
            self._all_ended.set()
        elif news["host"] != self._number:
            self.heard = Heard(news["text"], news["code"])

    def _lose(self) -> None:
        """The host with the store is there until all have ended."""
        self._told.set()
        if self._leaving:
            self._all_ended.set()
        else:
            self.heard = Heard("the launcher of host 0, or the way to it, is gone", 1)
