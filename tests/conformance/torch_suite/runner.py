"""Runs tests of PyTorch's suite: one column, one world size, several tests at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ROOT = Path(__file__).parents[3]
LOGS = ROOT / "build" / "conformance"
# The suite skips some tests below 8 ranks.
SIZES = (2, 3, 4, 8)

# The environment that selects each of them.
COLUMNS = {
    "gloo": {"BACKEND": "gloo"},
    "phalanx": {"BACKEND": "phalanx"},
    "replace": {"BACKEND": "gloo", "PHALANX_REPLACE": "gloo"},
}
_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    # Only the kind matters: a test that forms the group again requires a file.
    "INIT_METHOD": "file://",
    "GLOO_SOCKET_IFNAME": "lo",
    # Ranks outnumber the cores, and a server without threads can fork safely.
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# Each changes the behaviour of the suite or of Phalanx.
_REMOVED = ("CI", "SANDCASTLE", "PHALANX_REPLACE", "RANK", "LOCAL_RANK", "TORCH_DISTRIBUTED_DEBUG")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: pass, fail, skip or timeout, the reason, and the seconds it took."""

    outcome: str
    reason: str
    seconds: float
    groups: str = ""


class Server:
    """A process that runs tests of a suite, one after another.

    Args:
        module: The module that it runs, which calls `server.serve`.
        folder: The directory of the logs of tests.
        environment: Variables besides those of every suite.
        limit: The time limit of a test, in seconds.
    """

    def __init__(
        self, module: str, folder: Path, environment: Mapping[str, str], limit: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "server.log"
        kept = {name: value for name, value in os.environ.items() if name not in _REMOVED}
        seconds = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(limit)}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder), str(limit)],
                cwd=ROOT,
                env={**kept, **_ENVIRONMENT, **environment, **seconds},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.tests: list[str] = self._answer()

    def run(self, test: str) -> Outcome:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{test}\n")
        self._process.stdin.flush()
        return Outcome(**self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a server of the suite died: its log is {self._log}")
        return json.loads(line)


def run(
    column: str,
    size: int,
    chosen: Callable[[str], bool],
    *,
    jobs: int,
    limit: int,
    begin: Callable[[int], None] = lambda _count: None,
    report: Callable[[str, Outcome], None] = lambda _test, _outcome: None,
) -> dict[str, Outcome]:
    """Run the chosen tests; blocks until all have ended.

    Args:
        column: A column of `COLUMNS`.
        size: The world size.
        chosen: Returns whether to run the test of a name.
        jobs: The number of tests to run at a time.
        limit: The time limit of a test, in seconds.
        begin: Called once with the number of tests.
        report: Called after each test, from several threads, one at a time.

    Returns:
        The outcome of each test.
    """

    def start() -> Server:
        environment = {**COLUMNS[column], "WORLD_SIZE": str(size)}
        return Server(f"{__package__}.server", LOGS / f"{column}-{size}", environment, limit)

    return run_on(start, chosen, jobs=jobs, begin=begin, report=report)


def run_on(
    start: Callable[[], Server],
    chosen: Callable[[str], bool],
    *,
    jobs: int,
    begin: Callable[[int], None] = lambda _count: None,
    report: Callable[[str, Outcome], None] = lambda _test, _outcome: None,
) -> dict[str, Outcome]:
    """Run the chosen tests on as many servers as there are jobs; arguments as for `run`."""
    first = start()
    tests = [test for test in first.tests if chosen(test)]
    begin(len(tests))
    queue: SimpleQueue[str] = SimpleQueue()
    for test in tests:
        queue.put(test)
    outcomes: dict[str, Outcome] = {}
    lock = threading.Lock()

    def work(server: Server | None = None) -> None:
        server = server or start()
        try:
            for test in _drained(queue):
                outcome = server.run(test)
                with lock:
                    outcomes[test] = outcome
                    report(test, outcome)
        finally:
            server.close()

    others = [threading.Thread(target=work) for _ in range(min(jobs, len(tests)) - 1)]
    for thread in others:
        thread.start()
    work(first)
    for thread in others:
        thread.join()
    if missing := set(tests) - outcomes.keys():
        raise RuntimeError(f"not run, since a server died: {sorted(missing)}")
    return outcomes


def _drained(queue: SimpleQueue[str]) -> Iterable[str]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return
