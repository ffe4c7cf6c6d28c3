"""The values that `RRef`s name, and who refers to them.

The owner of a value counts references by worker; a value goes when all counts are zero. Who passes
a reference on tells the owner so itself, before the message with it leaves, and the owner hears of
one worker's words in order: so a reference that is on its way is counted before its sender can let
go of its own. The receiver may let go before the owner has heard that it ever held one: then its
count is below zero for a while, and the sender's is still above. So nobody waits for anybody, and
passing a reference costs one message without an answer. (The scheme of weighted reference counting,
Bevan 1987, with the counts kept by the owner.)

What a dead worker held counts no longer.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Change", "Hold", "Name", "Value", "Values"]


class Name(NamedTuple):
    """Which value: the worker that made its first reference, and a number of that worker's."""

    creator: int
    number: int


class Change(NamedTuple):
    """References of a worker that came (or went, if below zero)."""

    name: Name
    holder: int
    more: int


class Value:
    """A value, or why there is none, or neither yet."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """It is there."""
        with self._lock:
            self._value, self._error = value, error
            self._trace = None if error is None else error.__traceback__
            self._ready.set()
            then, self._then = self._then, []
        for callback in then:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function when it is there: now, if it is."""
        with self._lock:
            if not self._ready.is_set():
                self._then.append(callback)
                return
        callback()

    def wait(self, seconds: float | None) -> bool:
        """Wait until it is there; returns whether it is."""
        return self._ready.wait(seconds)

    @property
    def is_ready(self) -> bool:
        """Whether it is there."""
        return self._ready.is_set()

    def get(self) -> Any:
        """The value, once it is there; raises what making it raised."""
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # else it would grow each time
        return self._value


class Values:
    """All that this worker owns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Name, Value] = {}
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return len(self._values)

    def at(self, name: Name) -> Value:
        """A value; if nobody has spoken of it yet, one that isn't there yet."""
        with self._lock:
            return self._values.setdefault(name, Value())

    def count(self, change: Change) -> None:
        """References came or went; the last one takes the value with it."""
        with self._lock:
            if change.holder in self._dead:
                return
            value = self._values.setdefault(change.name, Value())
            left = value.holders.pop(change.holder, 0) + change.more
            if left:
                value.holders[change.holder] = left
            elif not value.holders:
                del self._values[change.name]
        # What its end runs is the user's: without the lock, here.

    def forget(self, worker: int) -> None:
        """A worker is dead: what it held counts no longer."""
        with self._lock:
            self._dead.add(worker)
            gone = [
                name
                for name, value in self._values.items()
                if value.holders.pop(worker, 0) and not value.holders
            ]
            ended = [self._values.pop(name) for name in gone]
        del ended

    def clear(self) -> None:
        """Let go of all; who waits for one that isn't there yet hears that it never will be."""
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
        for value in values:
            if not value.is_ready:
                value.settle(error=PhalanxError("this worker has left RPC"))


class Hold:
    """One reference of this worker to a value; when it is collected, the owner hears of it.

    Each `RRef` has its own: one that several shared could be found, by a weak reference, while it
    is being collected, and what was counted then would be lost.
    """

    def __init__(
        self, name: Name, owner: int, me: int, ended: Callable[[int, Change], None]
    ) -> None:
        self.name, self.owner = name, owner
        self._me, self._ended = me, ended

    def __del__(self) -> None:
        # In any thread, whatever that does just now: so `ended` only notes it.
        self._ended(self.owner, Change(self.name, self._me, -1))
