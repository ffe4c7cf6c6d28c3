"""Random programs of the launchers of a job on several hosts, each with a thread of its own.

Whatever fails on which host: all agree on the attempt, the first report of an attempt is the one
that all the others get, and launchers whose ranks have ended wait for one another.
"""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

import torch.distributed as dist

from phalanx.launcher import job_coordinator
from phalanx.launcher.job_coordinator import JobCoordinator, agree, end_reason
from phalanx.launcher.store import host_store
from phalanx.system.polling import wait_until
from tests.fault_injection.pauses import LIMIT, HandOvers

HAND_OVERS: HandOvers = (
    (JobCoordinator, "_poll"),
    (JobCoordinator, "_announce"),
    (JobCoordinator, "_finish"),
    (JobCoordinator, "_read_failure"),
    (JobCoordinator, "begin_attempt"),
    (JobCoordinator, "report"),
    (job_coordinator, "_decide"),
    (job_coordinator, "_decode"),
    (job_coordinator, "_encode"),
)
_MAX_ATTEMPTS = 4


class _Launcher:
    """The launcher of one host.

    Args:
        name: The name of the host.
        number: The number of the host.
        store: The store of the job.
        ends: What happens on each host in each attempt: "ended", "failed" or "final".
    """

    def __init__(self, name: str, number: int, store: Any, ends: list[list[str]]) -> None:
        self._name, self._number, self._store, self._ends = name, number, store, ends
        self._coordinator = JobCoordinator(store, name, has_store=number == 0)
        self.wrong = ""
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.wrong = self._run_attempts()
        except Exception as error:
            self.wrong = f"{type(error).__name__}: {error}"
        finally:
            self._coordinator.close()

    def _run_attempts(self) -> str:
        for number, ends in enumerate(self._ends):
            store = dist.PrefixStore(f"start-{number}", self._store)  # type: ignore[attr-defined]
            hosts = len(ends)
            attempt, _, names = agree(
                store, self._number, hosts, (number, number), self._name, LIMIT
            )
            if (attempt, len(names)) != (number, hosts):
                return f"attempt {number} of {hosts} hosts: agreed on {attempt}, {names}"
            self._coordinator.begin_attempt(attempt, names)
            end = ends[self._number]
            if end == "ended":
                self._coordinator.finish(LIMIT)
            else:
                text = f"{end} on host {self._number} in attempt {number}"
                self._coordinator.report(text, 3, is_final=end == "final")
            if problem := self._check(number, ends):
                return problem
            if "final" in ends:
                return ""
        return ""

    def _check(self, number: int, ends: list[str]) -> str:
        """Compare what this host has been told with the report that was first in the store."""
        is_final = "final" in ends
        key = "phalanx/end" if is_final else f"phalanx/{number}/failed"
        if {*ends} == {"ended"}:
            found = self._coordinator.remote_failure
            return "" if found is None else f"host {self._number} was told of {found}"

        def was_told() -> bool:
            if not self._store.check([key]):
                return False
            name, text, *_ = json.loads(self._store.get(key))
            found = self._coordinator.refresh()
            if name == self._name:
                return found is None or is_final  # another one may have failed before
            return found is not None and found.text == text

        if wait_until(was_told, LIMIT):
            return ""
        return f"host {self._number} was told of {self._coordinator.remote_failure} in {ends}"


def run_program(chosen: Random) -> str:
    """Run a program; return what went wrong, or nothing."""
    hosts = chosen.randint(2, 4)
    ends = [
        [chosen.choice(("ended", "failed", "failed")) for _ in range(hosts)]
        for _ in range(chosen.randint(0, _MAX_ATTEMPTS - 1))
    ]
    ends = [each for each in ends if "failed" in each]  # else there is no next one
    ends.append([chosen.choice(("ended", "failed", "final")) for _ in range(hosts)])
    if chosen.random() < 0.5:
        ends[-1] = ["ended"] * hosts
    store = host_store()
    launchers = [_Launcher(f"host-{number}", number, store, ends) for number in range(hosts)]
    for each in launchers:
        each.thread.start()
    for each in launchers:
        each.thread.join()
    if wrong := [each.wrong for each in launchers if each.wrong]:
        return f"{wrong[0]}; the job's end is {end_reason(store)!r}"
    return ""
