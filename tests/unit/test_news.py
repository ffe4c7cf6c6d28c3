"""What launchers tell each other, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launch.news import News, meet
from phalanx.launch.store import host_store

LIMIT = 20.0


@pytest.fixture
def store() -> Any:
    return host_store()


@pytest.fixture
def news(store: Any) -> Iterator[list[News]]:
    made = [News(store, number, 3, has_store=number == 0) for number in range(3)]
    yield made
    for each in made:
        each.close()


def wait_until_heard(news: News) -> tuple[str, int]:
    end = time.monotonic() + LIMIT
    while news.heard is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return news.heard


def test_a_failure_is_heard_by_all_others(news: list[News]) -> None:
    news[1].tell("rank 2 has had enough", 7)
    for other in (news[0], news[2]):
        text, code = wait_until_heard(other)
        assert text.startswith("on ")
        assert text.endswith(": rank 2 has had enough")
        assert code == 7
    assert news[1].heard is None


def test_only_one_is_first(news: list[News]) -> None:
    threads = [threading.Thread(target=each.tell, args=("x", 3 + i)) for i, each in enumerate(news)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    end = time.monotonic() + LIMIT
    while sum(each.heard is not None for each in news) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    heard = {each.heard for each in news}
    assert None in heard
    assert len(heard) == 2, heard


def test_all_leave_together(news: list[News]) -> None:
    threads = [threading.Thread(target=each.leave, args=(LIMIT,)) for each in news]
    start = time.monotonic()
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.5)
    assert threads[0].is_alive()
    assert threads[1].is_alive()
    threads[2].start()
    for thread in threads:
        thread.join(LIMIT)
    assert time.monotonic() - start < LIMIT
    assert [each.heard for each in news] == [None] * 3


def test_host_0_leaves_first(news: list[News]) -> None:
    """That isn't a failure of the others, which need not wait for each other then."""
    news[0].leave(0.2)
    start = time.monotonic()
    news[1].leave(LIMIT)
    assert time.monotonic() - start < LIMIT
    assert news[1].heard is None


def test_the_host_with_the_store_may_have_any_number(store: Any) -> None:
    with_it, other = News(store, 1, 2, has_store=True), News(store, 0, 2, has_store=False)
    try:
        with_it.leave(0.2)
        start = time.monotonic()
        other.leave(LIMIT)
        assert time.monotonic() - start < LIMIT
        assert other.heard is None
    finally:
        with_it.close()
        other.close()


def test_who_leaves_hears_of_a_failure(news: list[News]) -> None:
    thread = threading.Thread(target=news[0].leave, args=(LIMIT,))
    thread.start()
    news[2].tell("no", 5)
    thread.join(LIMIT)
    assert wait_until_heard(news[0])[1] == 5


def meeting(store: Any, number: int, count: int, seconds: float, wrong: str = "") -> list[str]:
    told: list[str] = []
    meet(store, number, count, seconds, told.append, lambda: wrong)
    return told


def test_hosts_meet(store: Any) -> None:
    threads = [threading.Thread(target=meeting, args=(store.clone(), n, 3, LIMIT)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    assert meeting(store, 0, 3, LIMIT) == []
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_hosts_that_do_not_come(store: Any) -> None:
    store.set("phalanx/launcher/2", "node-c")
    with pytest.raises(LaunchError, match=r"^hosts 1, 3 of 4 didn't come within 0.3 s: is `phalan"):
        meeting(store, 0, 4, 0.3)


def test_a_host_that_does_not_fit(store: Any) -> None:
    with pytest.raises(LaunchError, match=r"^it has another version$"):
        meeting(store, 0, 2, LIMIT, "it has another version")
