"""What launchers tell each other, over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launcher.job_coordinator import (
    AbsentHostError,
    Agreed,
    News,
    agree,
    first_attempt,
    is_over,
    meet,
)
from phalanx.launcher.store import host_store

LIMIT = 20.0
HOSTS = ("a", "b", "c")


@pytest.fixture
def store() -> Any:
    return host_store()


@pytest.fixture
def news(store: Any) -> Iterator[list[News]]:
    made = [News(store, HOSTS[number], has_store=number == 0) for number in range(3)]
    for each in made:
        each.begin(0, HOSTS)
    yield made
    for each in made:
        each.close()


def wait_until_heard(news: News) -> tuple[str, int]:
    end = time.monotonic() + LIMIT
    while (heard := news.heard) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return heard.text, heard.code


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
    with_it, other = News(store, "a", has_store=True), News(store, "b", has_store=False)
    try:
        with_it.begin(0, ("a", "b"))
        other.begin(0, ("a", "b"))
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


def test_what_is_past_is_not_heard_again(store: Any, news: list[News]) -> None:
    """All start again; then some fail again, on a host that hadn't been first."""
    assert first_attempt(store) == 0
    news[1].tell("rank 2 has had enough", 7)
    for other in (news[0], news[2]):
        wait_until_heard(other)
    assert first_attempt(store) == 1
    for each in news:
        each.begin(1, HOSTS)
        assert each.catch_up() is None
    news[0].tell("rank 0 too", 8)
    for other in news[1:]:
        assert wait_until_heard(other)[1] == 8
    assert [each.heard is None for each in news] == [True, False, False]
    assert first_attempt(store) == 2


def test_a_host_that_has_gone_is_missed(news: list[News], monkeypatch: pytest.MonkeyPatch) -> None:
    """By all, that which has seen it among them; but not if it has nothing more to do."""
    monkeypatch.setattr("phalanx.launcher.job_coordinator._MISS_SECONDS", 0.1)
    news[0].miss("x", "a stranger")
    news[0].miss("c", "node-c")
    for each in news[:2]:
        assert wait_until_heard(each) == ("the launcher on node-c, or the way to it, is gone", 1)
    for each in news:
        each.begin(1, HOSTS)
    news[2].leave(0.5)
    news[0].miss("c", "node-c")
    while news[0]._now.gone:
        news[0].catch_up()
    assert [each.catch_up() for each in news] == [None] * 3


def test_who_leaves_may_be_missed_or_not(news: list[News]) -> None:
    news[1].tell("stopped", 130, left=True)
    heard = news[0].catch_up()
    assert heard is not None
    assert (heard.code, heard.final, heard.left) == (130, False, True)


def test_what_ends_the_job_is_heard_between_attempts(store: Any, news: list[News]) -> None:
    """Also by those that wait for the others, and after a failure that was told first."""
    news[2].tell("rank 4 has had enough", 7)
    assert is_over(store) == ""
    news[1].tell("stopped", 130, final=True)
    assert is_over(store).endswith(": stopped")
    for other in (news[0], news[2]):
        heard = other.catch_up()
        assert heard is not None
        assert (heard.code, heard.final) == (130, True)
        other.begin(1, HOSTS)
        assert other.heard == heard
    assert news[1].catch_up() is not None  # what was told first
    with pytest.raises(LaunchError, match=r"^on .*: stopped$"):
        meeting(store, 0, 2, LIMIT, attempt=1)


def test_hosts_agree_on_the_most_that_one_has_counted(store: Any) -> None:
    agreed: dict[int, Agreed] = {}

    def count(number: int, own: tuple[int, int]) -> None:
        agreed[number] = agree(store.clone(), number, 3, own, HOSTS[number], LIMIT)

    counts = [(4, 0), (2, 3), (0, 0)]
    threads = [threading.Thread(target=count, args=each) for each in enumerate(counts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert agreed == dict.fromkeys(range(3), Agreed(4, 3, HOSTS))


@pytest.mark.parametrize("absent", range(3))
def test_a_counted_host_that_is_not_there(store: Any, absent: int) -> None:
    """All others learn the same, and none is left with another opinion."""
    words: list[str] = []

    def count(number: int) -> None:
        with pytest.raises(AbsentHostError) as caught:
            agree(store.clone(), number, 3, (0, 0), HOSTS[number], 0.3)
        words.append(str(caught.value))

    threads = [threading.Thread(target=count, args=(each,)) for each in {0, 1, 2} - {absent}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert words == [f"host {absent} of 3 didn't come, though counted"] * 2
    with pytest.raises(AbsentHostError):  # too late
        agree(store, absent, 3, (0, 0), HOSTS[absent], LIMIT)


@pytest.mark.parametrize("number", range(3))
def test_who_was_to_decide_has_gone(
    store: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all have come, nobody waits for its word without a bound."""
    monkeypatch.setattr("phalanx.launcher.job_coordinator._NOTICE_SECONDS", 0.2)
    for other in range(3):
        store.set(f"phalanx/proposed/{other}", '[0, 0, "x"]')
    store.add("phalanx/decided", 1)
    with pytest.raises(AbsentHostError, match=r"^a host has gone while the hosts met$"):
        agree(store, number, 3, (0, 0), HOSTS[number], 0.1)


def test_a_host_that_goes_while_the_hosts_meet_is_missed(
    news: list[News], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launcher.job_coordinator._MISS_SECONDS", 0.1)
    news[0].begin(0, ())
    news[0].miss("c", "node-c")
    news[0].begin(1, HOSTS)
    news[1].begin(1, HOSTS)
    assert wait_until_heard(news[1]) == ("the launcher on node-c, or the way to it, is gone", 1)


def meeting(
    store: Any, number: int, count: int, seconds: float, wrong: str = "", attempt: int = 0
) -> list[str]:
    told: list[str] = []
    meet(store, attempt, number, count, seconds, told.append, lambda: wrong)
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
    store.set("phalanx/0/launcher/2", "node-c")
    store.set("phalanx/1/launcher/1", "node-b")
    with pytest.raises(LaunchError, match=r"^hosts 1, 3 of 4 didn't come within 0.3 s: is `phalan"):
        meeting(store, 0, 4, 0.3)


def test_a_host_that_does_not_fit(store: Any) -> None:
    with pytest.raises(LaunchError, match=r"^it has another version$"):
        meeting(store, 0, 2, LIMIT, "it has another version")
