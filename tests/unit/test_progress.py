"""The thread of a group: calls complete in the order of submission, deferred ones too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx import _native
from phalanx.backend import threads
from phalanx.backend.threads import CollectiveThread

LIMIT = 10.0


class State(_native.OperationState):
    """The part of a membership that its thread uses."""


def submit_during_call(thread: CollectiveThread, before_start: Callable[[], None]) -> list[str]:
    """Submit a call from a call, while a third call is already in the queue; return the order."""
    order: list[str] = []
    start = threading.Event()

    def outer() -> None:
        assert start.wait(LIMIT)
        thread.submit(lambda: order.append("inner"))
        order.append("outer")

    thread.submit(outer)
    thread.submit(lambda: order.append("between"))
    before_start()
    start.set()
    assert thread.stop(LIMIT)
    assert thread._state().pending == 0
    return order


def test_submitted_call_completes_before_caller_continues() -> None:
    state = State(object(), LIMIT)
    order = submit_during_call(CollectiveThread("test", state), lambda: None)
    assert order == ["between", "inner", "outer"]


def test_thread_stops_after_calls_submitted_by_calls() -> None:
    """If stopped meanwhile, the thread still runs calls submitted from its own thread."""
    state = State(object(), LIMIT)
    thread = CollectiveThread("test", state)
    assert submit_during_call(thread, lambda: stop_soon(thread)) == [
        "between",
        "inner",
        "outer",
    ]


def test_a_call_may_release_the_membership() -> None:
    """The thread counts the end of a call whose operation held the last reference."""
    states, failures = [State(object(), LIMIT)], []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        thread = CollectiveThread("test", states[0])
        thread.submit(states.clear)
        assert thread.stop(LIMIT)
    finally:
        threading.excepthook = hook
    assert not failures


def stop_soon(thread: CollectiveThread) -> None:
    assert not thread.stop(0.01)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls stay deferred until the test asks for them, however slow it is."""
    monkeypatch.setattr(threads, "_DEFERRAL_SECONDS", LIMIT)


@pytest.fixture
def thread() -> Iterator[CollectiveThread]:
    state = State(object(), LIMIT)
    thread = CollectiveThread("test", state)
    yield thread
    assert thread.stop(LIMIT)
    assert state.pending == 0


class Log:
    """The calls that have run, and whether in the thread that made them."""

    def __init__(self) -> None:
        self.order: list[tuple[str, bool]] = []

    def call(self, name: str) -> Callable[[], None]:
        """Return a call that logs its name, and whether this thread runs it."""
        here = threading.current_thread()
        return lambda: self.order.append((name, threading.current_thread() is here))


def wait_for_queue(thread: CollectiveThread) -> None:
    """Wait until the thread has run all that it was given, without giving it a call."""
    deadline = time.monotonic() + LIMIT
    while thread._state().pending:
        assert time.monotonic() < deadline


def test_a_call_submitted_within_a_submitted_one(thread: CollectiveThread) -> None:
    """The outer one waits for a call that the inner one has already run."""
    order: list[str] = []
    start = threading.Event()

    def first() -> None:
        assert start.wait(LIMIT)
        thread.submit(lambda: order.append("third"))
        order.append("first")

    def second() -> None:
        thread.submit(lambda: order.append("fourth"))
        order.append("second")

    thread.submit(first)
    thread.submit(second)
    start.set()
    thread.drain()
    assert order == ["third", "fourth", "second", "first"]


@pytest.mark.usefixtures("unhurried")
def test_deferred_calls_run_where_it_is_asked_for(thread: CollectiveThread) -> None:
    log = Log()
    assert thread.defer(log.call("first"))
    assert thread.defer(log.call("second"))
    thread.run_deferred()
    thread.run_deferred()
    assert log.order == [("first", True), ("second", True)]


@pytest.mark.parametrize("reason", ["submitted", "asked", "forgotten"])
def test_deferred_calls_run_in_the_thread_if_need_be(thread: CollectiveThread, reason: str) -> None:
    """They run there before a later call, if something waits for them, or else soon."""
    log = Log()
    expected = [("first", False), ("second", False)]
    assert thread.defer(log.call("first"))
    assert thread.defer(log.call("second"))
    if reason == "submitted":
        thread.submit(log.call("third"))
        expected.append(("third", False))
    elif reason == "asked":
        thread.hand_over()
    wait_for_queue(thread)
    thread.run_deferred()
    assert log.order == expected


def test_a_call_is_not_deferred_behind_others(thread: CollectiveThread) -> None:
    start, log = threading.Event(), Log()
    thread.submit(lambda: start.wait(LIMIT) and None)
    assert not thread.defer(log.call("deferred"))
    start.set()
    thread.drain()
    assert log.order == []


@pytest.mark.usefixtures("unhurried")
def test_calls_that_come_while_deferred_ones_run(thread: CollectiveThread) -> None:
    """They run after those, in the same thread; one of that thread has ended on return."""
    log = Log()
    after = log.call("other"), log.call("own")

    def submit_others() -> None:
        other = threading.Thread(target=thread.submit, args=(after[0],))
        other.start()
        other.join(LIMIT)
        thread.submit(after[1])
        log.call("first")()

    assert thread.defer(submit_others)
    assert thread.defer(log.call("second"))
    thread.run_deferred()
    assert [name for name, _ in log.order] == ["second", "other", "own", "first"]
    assert all(is_here for _, is_here in log.order)


@pytest.mark.usefixtures("unhurried")
def test_an_interrupt_between_deferred_calls(thread: CollectiveThread) -> None:
    """The thread runs what is left."""
    log = Log()

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert thread.defer(interrupt)
    assert thread.defer(log.call("second"))
    with pytest.raises(KeyboardInterrupt):
        thread.run_deferred()
    wait_for_queue(thread)
    assert log.order == [("second", False)]
