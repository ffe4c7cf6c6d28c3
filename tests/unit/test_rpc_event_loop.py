"""The event loop of `phalanx.rpc`: its timer, changes of the lead, and deferred notifications."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from phalanx.errors import PhalanxError
from phalanx.rpc.event_loop import LeaderFollowers, Reactor
from phalanx.rpc.reference_counting import ReleaseNotifier

SECONDS = 20.0


@pytest.fixture
def work() -> Iterator[queue.Queue[Callable[[], None] | None]]:
    """A queue of work for a leader and its followers; None ends the thread that takes it."""
    made: queue.Queue[Callable[[], None] | None] = queue.Queue()
    threads = LeaderFollowers(made.get)
    made.threads = threads  # type: ignore[attr-defined]
    threads.start()
    yield made
    made.put(None)
    threads.stop(SECONDS)


def run_and_wait(work: queue.Queue[Callable[[], None] | None]) -> None:
    done = threading.Event()
    work.put(done.set)
    assert done.wait(SECONDS)


def test_short_requests_share_a_timer(work) -> None:
    """With the follower stopped, the timer is set once, however much work follows."""
    timer = work.threads._timer
    settings, start = [], timer.start
    timer.start = settings.append
    for _ in range(100):
        run_and_wait(work)
    timer.start = start
    assert len(settings) <= 1  # none if the timer has been set before
    start(1)  # what was swallowed


def test_long_work_loses_the_lead_after_short_work(work) -> None:
    for _ in range(20):  # the timer is set by one of these
        run_and_wait(work)
    is_released = threading.Event()
    work.put(lambda: is_released.wait(SECONDS))
    run_and_wait(work)  # by another thread
    assert not is_released.is_set()
    is_released.set()


def test_work_that_waits_passes_on_the_lead_at_once(work) -> None:
    is_released = threading.Event()

    def wait() -> None:
        work.threads.promote_follower()
        is_released.wait(SECONDS)

    for _ in range(20):
        work.put(wait)
    run_and_wait(work)
    is_released.set()


def test_notification_by_the_leader_wakes_nobody() -> None:
    """It is sent once the leader's present work is done."""
    notifier = ReleaseNotifier(lambda: reactor.wake())
    reactor = Reactor(lambda _: None, notifier.take_work)
    wakes = []
    notify, reactor._eventfd.notify = reactor._eventfd.notify, lambda: wakes.append(1)  # type: ignore[method-assign]
    reactor.threads.start()
    sent = threading.Event()
    reactor._work.append(lambda: notifier.queue(0, sent.set))
    notify()
    assert sent.wait(SECONDS)
    assert not wakes
    reactor._eventfd.notify = notify  # type: ignore[method-assign]
    reactor.stop()
    reactor.close()


def test_failed_notification_is_retried_later_and_in_order() -> None:
    woken = threading.Event()
    notifier = ReleaseNotifier(woken.set)
    attempts: list[str] = []

    def send_first() -> None:
        attempts.append("first")
        if len(attempts) == 1:
            raise PhalanxError("not yet")

    notifier.queue(1, send_first)
    notifier.queue(1, lambda: attempts.append("second"))
    woken.clear()
    send = notifier.take_work()
    assert send is not None
    send()
    assert attempts == ["first"]
    assert notifier.take_work() is None  # the leader would otherwise retry without a pause
    assert woken.wait(SECONDS)
    send = notifier.take_work()
    assert send is not None
    send()
    assert attempts == ["first", "first", "second"]
