"""`phalanx.system`: names of signals, the identity of the host, polling."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from phalanx.system import polling
from phalanx.system.host_identity import boot_id, namespace_id
from phalanx.system.signals import signal_name


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (signal.SIGRTMIN + 8, f"signal {signal.SIGRTMIN + 8}"), (0, "signal 0")],
)
def test_names_of_signals(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_processes_of_one_host_agree() -> None:
    program = (
        "from phalanx.system.host_identity import boot_id, namespace_id;"
        "print(boot_id(), namespace_id('pid'), namespace_id('net'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert said.split() == [boot_id(), str(namespace_id("pid")), str(namespace_id("net"))]
    assert namespace_id("pid") != namespace_id("net")


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for number, _ in enumerate(polling.attempts(longest=0.003)):
        if number == 5:
            break
    assert clock.pauses == [0.0005, 0.001, 0.002, 0.003, 0.003]


@pytest.mark.parametrize("seconds", (0.0, 0.0005, 0.1))
def test_the_last_attempt_is_at_the_deadline(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    end = clock.now + seconds
    times = [clock.now for _ in polling.attempts(end)]
    assert times[0] == 100
    assert times[-1] == pytest.approx(end)
    assert len(set(times)) == len(times)


def test_one_attempt_after_the_deadline() -> None:
    assert len(list(polling.attempts(time.monotonic() - 1))) == 1
