"""`phalanx.system`: processes, names of signals, the identity of the host, polling, pickling."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

import pytest

from phalanx.system import pickling, polling
from phalanx.system.host_identity import boot_id, has_content, host_identity, namespace_id
from phalanx.system.processes import (
    ChildProcess,
    RankPidfds,
    describe_exit,
    signal_group,
    signal_name,
)


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


def test_an_identity_names_the_boot_and_the_namespaces() -> None:
    assert host_identity() == boot_id()
    assert host_identity("pid", "net").split() == [
        boot_id(),
        str(namespace_id("pid")),
        str(namespace_id("net")),
    ]


def test_the_content_of_a_file_of_another_process() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, b"nonce and more")
        assert has_content(os.getpid(), descriptor, b"nonce")
        assert not has_content(os.getpid(), descriptor, b"other")
        assert not has_content(os.getpid(), descriptor, b"nonce and more than that")
    finally:
        os.close(descriptor)
    assert not has_content(os.getpid(), descriptor, b"nonce")


TREE = "sleep 1000 & echo $!; read line; exit 3"


def test_a_child_and_what_it_has_started() -> None:
    child = ChildProcess(["sh", "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    grandchild = int(child.stdout.readline())
    pidfds = RankPidfds()
    pidfds.add(0, child.pid)
    pidfds.add(7, grandchild)
    assert os.getsid(grandchild) == child.pid != os.getsid(0)
    assert pidfds.wait(0) == [0, 7]
    child.stdin.close()
    assert pidfds.wait(60, [0]) == []
    assert pidfds.wait(0) == [7]
    signal_group(child.pid, signal.SIGKILL)
    assert pidfds.wait(60) == []
    child.end(0)
    assert child.returncode == 3
    signal_group(child.pid, signal.SIGKILL)  # nothing is left
    pidfds.signal_all(signal.SIGKILL)
    child.stdout.close()
    pidfds.close()


def test_a_child_that_does_not_end_is_killed() -> None:
    child = ChildProcess(["sleep", "1000"])
    child.end(0.01)
    assert describe_exit(child.returncode) == "was killed by SIGKILL"
    assert describe_exit(3) == "exited with code 3"


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


def test_waiting_for_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert polling.wait_until(lambda: clock.now > 100.002, 1)
    assert clock.now < 100.01
    assert not polling.wait_until(lambda: False, 1)


def test_pickled_code_keeps_the_locations_of_its_source() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        raise KeyError\n    inner()\n"
    exec(compile(source, "<cell 1>", "exec"), scope)
    function = pickle.loads(pickling.dumps(scope["outer"]))
    with pytest.raises(KeyError) as caught:
        function()
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(each.filename, each.lineno, each.name) for each in frames] == [
        ("<cell 1>", 4, "outer"),
        ("<cell 1>", 3, "inner"),
    ]
