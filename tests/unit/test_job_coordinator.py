"""Coordination of launchers over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.launcher.job_coordinator import (
    AbsentHostError,
    Agreement,
    JobCoordinator,
    agree,
    end_reason,
    next_attempt,
    wait_for_hosts,
)
from phalanx.launcher.store import host_store

LIMIT = 20.0
NEVER = 1000.0
"""A limit that the watchdog of the test precedes: what waits for it hangs."""
HOSTS = ("a", "b", "c")


@pytest.fixture
def store() -> Any:
    return host_store()


@pytest.fixture
def coordinators(store: Any) -> Iterator[list[JobCoordinator]]:
    coordinators = [
        JobCoordinator(store, HOSTS[number], has_store=number == 0) for number in range(3)
    ]
    for each in coordinators:
        each.begin_attempt(0, HOSTS)
    yield coordinators
    for each in coordinators:
        each.close()


def wait_for_remote_failure(coordinator: JobCoordinator) -> tuple[str, int]:
    end = time.monotonic() + LIMIT
    while (failure := coordinator.remote_failure) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return failure.text, failure.code


def test_a_failure_reaches_all_other_hosts(coordinators: list[JobCoordinator]) -> None:
    coordinators[1].report("rank 2 has failed", 7)
    for other in (coordinators[0], coordinators[2]):
        text, code = wait_for_remote_failure(other)
        assert text.startswith("on ")
        assert text.endswith(": rank 2 has failed")
        assert code == 7
    assert coordinators[1].remote_failure is None


@pytest.mark.parametrize("are_known", [True, False])
def test_a_lost_host_of_an_elastic_job(store: Any, are_known: bool) -> None:
    """The job goes on without it, or starts again if nobody knows which ranks it had."""
    lost: list[tuple[str, list[int]]] = []
    first = JobCoordinator(
        store, "a", has_store=True, min_hosts=1, on_lost_host=lambda *host: lost.append(host)
    )
    try:
        first.begin_attempt(0, ("a", "b"), [0, 1])
        if are_known:
            store.set("phalanx/0/ranks/b", "[2, 3]")
        first.report_lost_host("b", "node-b")
        if are_known:
            first.finish(NEVER)
            assert (lost, first.remote_failure) == ([("node-b", [2, 3])], None)
        else:
            text, code = wait_for_remote_failure(first)
            assert (lost, code) == ([], 1)
            assert text == "lost the launcher on node-b, or the connection to it"
    finally:
        first.close()


def test_only_one_report_wins(coordinators: list[JobCoordinator]) -> None:
    threads = [
        threading.Thread(target=each.report, args=("x", 3 + i))
        for i, each in enumerate(coordinators)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    end = time.monotonic() + LIMIT
    while sum(each.remote_failure is not None for each in coordinators) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    failures = {each.remote_failure for each in coordinators}
    assert None in failures
    assert len(failures) == 2, failures


def test_all_hosts_finish_together(coordinators: list[JobCoordinator]) -> None:
    threads = [threading.Thread(target=each.finish, args=(NEVER,)) for each in coordinators]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.5)
    assert threads[0].is_alive()
    assert threads[1].is_alive()
    threads[2].start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert [each.remote_failure for each in coordinators] == [None] * 3


def test_host_0_finishes_first(coordinators: list[JobCoordinator]) -> None:
    """This is no failure of the others, which then need not wait for each other."""
    coordinators[0].finish(0.2)
    coordinators[1].finish(NEVER)
    assert coordinators[1].remote_failure is None


def test_the_host_with_the_store_may_have_any_number(store: Any) -> None:
    with_store, other = (
        JobCoordinator(store, "a", has_store=True),
        JobCoordinator(store, "b", has_store=False),
    )
    try:
        with_store.begin_attempt(0, ("a", "b"))
        other.begin_attempt(0, ("a", "b"))
        with_store.finish(0.2)
        other.finish(NEVER)
        assert other.remote_failure is None
    finally:
        with_store.close()
        other.close()


def test_a_finishing_host_receives_a_failure(coordinators: list[JobCoordinator]) -> None:
    thread = threading.Thread(target=coordinators[0].finish, args=(LIMIT,))
    thread.start()
    coordinators[2].report("no", 5)
    thread.join(LIMIT)
    assert wait_for_remote_failure(coordinators[0])[1] == 5


def test_a_new_attempt_discards_reports(store: Any, coordinators: list[JobCoordinator]) -> None:
    """All hosts restart; then another host is the first to report a failure."""
    assert next_attempt(store) == 0
    coordinators[1].report("rank 2 has failed", 7)
    for other in (coordinators[0], coordinators[2]):
        wait_for_remote_failure(other)
    assert next_attempt(store) == 1
    for each in coordinators:
        each.begin_attempt(1, HOSTS)
        assert each.refresh() is None
    coordinators[0].report("rank 0 too", 8)
    for other in coordinators[1:]:
        assert wait_for_remote_failure(other)[1] == 8
    assert [each.remote_failure is None for each in coordinators] == [True, False, False]
    assert next_attempt(store) == 2


def test_a_lost_host_is_reported(
    coordinators: list[JobCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts get the report, even the one that made it, unless the lost host had finished."""
    monkeypatch.setattr("phalanx.launcher.job_coordinator._LOSS_DELAY_SECONDS", 0.1)
    coordinators[0].report_lost_host("x", "a stranger")
    coordinators[0].report_lost_host("c", "node-c")
    for each in coordinators[:2]:
        assert wait_for_remote_failure(each) == (
            "lost the launcher on node-c, or the connection to it",
            1,
        )
    for each in coordinators:
        each.begin_attempt(1, HOSTS)
    coordinators[2].finish(0.5)
    coordinators[0].report_lost_host("c", "node-c")
    while coordinators[0]._attempt.lost_hosts:
        coordinators[0].refresh()
    assert [each.refresh() for each in coordinators] == [None] * 3


def test_a_host_that_has_left(coordinators: list[JobCoordinator]) -> None:
    coordinators[1].report("stopped", 130, has_left=True)
    failure = coordinators[0].refresh()
    assert failure is not None
    assert (failure.code, failure.is_final, failure.has_left) == (130, False, True)


def test_a_final_failure_reaches_hosts_between_attempts(
    store: Any, coordinators: list[JobCoordinator]
) -> None:
    """Even hosts that wait for others get it, and after an earlier failure."""
    coordinators[2].report("rank 4 has failed", 7)
    assert end_reason(store) == ""
    coordinators[1].report("stopped", 130, is_final=True)
    assert end_reason(store).endswith(": stopped")
    for other in (coordinators[0], coordinators[2]):
        failure = other.refresh()
        assert failure is not None
        assert (failure.code, failure.is_final) == (130, True)
        other.begin_attempt(1, HOSTS)
        assert other.remote_failure == failure
    assert coordinators[1].refresh() is not None  # the earlier failure
    with pytest.raises(LaunchError, match=r"^on .*: stopped$"):
        wait_for_others(store, 0, 2, LIMIT, attempt=1)


def test_hosts_agree_on_the_highest_counts(store: Any) -> None:
    agreements: dict[int, Agreement] = {}

    def count(number: int, own_counts: tuple[int, int]) -> None:
        agreements[number] = agree(store.clone(), number, 3, own_counts, HOSTS[number], LIMIT)

    counts = [(4, 0), (2, 3), (0, 0)]
    threads = [threading.Thread(target=count, args=each) for each in enumerate(counts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert agreements == dict.fromkeys(range(3), Agreement(4, 3, HOSTS))


@pytest.mark.parametrize("absent", range(3))
def test_a_counted_host_that_is_absent(store: Any, absent: int) -> None:
    """All other hosts raise the same error."""
    messages: list[str] = []

    def count(number: int) -> None:
        with pytest.raises(AbsentHostError) as caught:
            agree(store.clone(), number, 3, (0, 0), HOSTS[number], 0.3)
        messages.append(str(caught.value))

    threads = [threading.Thread(target=count, args=(each,)) for each in {0, 1, 2} - {absent}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert messages == [f"host {absent} of 3 did not take part, although counted"] * 2
    with pytest.raises(AbsentHostError):  # too late
        agree(store, absent, 3, (0, 0), HOSTS[absent], LIMIT)


@pytest.mark.parametrize("number", range(3))
def test_the_deciding_host_is_lost(
    store: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all hosts are present, the wait for its decision is limited."""
    monkeypatch.setattr("phalanx.launcher.job_coordinator._NOTICE_SECONDS", 0.2)
    for other in range(3):
        store.set(f"phalanx/proposed/{other}", '[0, 0, "x"]')
    store.add("phalanx/decided", 1)
    with pytest.raises(AbsentHostError, match=r"^a host was lost during the rendezvous$"):
        agree(store, number, 3, (0, 0), HOSTS[number], 0.1)


def test_a_host_lost_during_the_rendezvous_is_reported(
    coordinators: list[JobCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.launcher.job_coordinator._LOSS_DELAY_SECONDS", 0.1)
    coordinators[0].begin_attempt(0, ())
    coordinators[0].report_lost_host("c", "node-c")
    coordinators[0].begin_attempt(1, HOSTS)
    coordinators[1].begin_attempt(1, HOSTS)
    assert wait_for_remote_failure(coordinators[1]) == (
        "lost the launcher on node-c, or the connection to it",
        1,
    )


def wait_for_others(
    store: Any, number: int, count: int, seconds: float, error: str = "", attempt: int = 0
) -> list[str]:
    notices: list[str] = []
    wait_for_hosts(store, attempt, number, count, seconds, notices.append, lambda: error)
    return notices


def test_all_hosts_join(store: Any) -> None:
    threads = [
        threading.Thread(target=wait_for_others, args=(store.clone(), n, 3, LIMIT)) for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    assert wait_for_others(store, 0, 3, LIMIT) == []
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_hosts_that_do_not_join(store: Any) -> None:
    store.set("phalanx/0/launcher/2", "node-c")
    store.set("phalanx/1/launcher/1", "node-b")
    with pytest.raises(
        LaunchError, match=r"^hosts 1, 3 of 4 did not join within 0.3 s: check that `phalan"
    ):
        wait_for_others(store, 0, 4, 0.3)


def test_a_rejected_host(store: Any) -> None:
    with pytest.raises(LaunchError, match=r"^it has another version$"):
        wait_for_others(store, 0, 2, LIMIT, "it has another version")
