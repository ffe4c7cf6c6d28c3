"""The thread of a group: calls end in the order in which they were submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.backend.progress import CollectiveThread

LIMIT = 10.0


def submit_while_others_wait(
    thread: CollectiveThread, before_going: Callable[[], None]
) -> list[str]:
    """A call that submits another, while a third has been submitted before that."""
    order: list[str] = []
    go = threading.Event()

    def outer() -> None:
        assert go.wait(LIMIT)
        thread.submit(lambda: order.append("inner"))
        order.append("outer")

    thread.submit(outer)
    thread.submit(lambda: order.append("between"))
    before_going()
    go.set()
    assert thread.stop(LIMIT)
    assert thread.pending == 0
    return order


def test_what_a_call_submits_has_ended_when_it_goes_on() -> None:
    order = submit_while_others_wait(CollectiveThread("test"), lambda: None)
    assert order == ["between", "inner", "outer"]


def test_the_thread_ends_after_what_a_call_submits() -> None:
    """Told to stop meanwhile, it still does what was submitted in its own thread, and ends."""
    thread = CollectiveThread("test")
    assert submit_while_others_wait(thread, lambda: stop_soon(thread)) == [
        "between",
        "inner",
        "outer",
    ]


def stop_soon(thread: CollectiveThread) -> None:
    assert not thread.stop(0.01)
