"""The thread of a group: calls complete in the order of submission."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx import _native
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
