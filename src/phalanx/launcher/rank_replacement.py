"""The agent of an elastic job: it replaces a lost rank instead of restarting all ranks.

The other ranks continue meanwhile, and let the new process join (`phalanx.replace`). If they
cannot, they fail, and the job ends or restarts as without `--elastic`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from phalanx.env import unreplaced_key
from phalanx.launcher.elastic_agent import Agent, print_message
from phalanx.launcher.failures import CONSEQUENCE
from phalanx.launcher.newcomers import Newcomers, stop
from phalanx.launcher.store import join_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.elastic.agent.server.api import WorkerGroup

    from phalanx.launcher.failures import Failure
    from phalanx.launcher.options import Elastic, Job


_NEWCOMER = "PHALANX_NEWCOMER"
_STORE_TIMEOUT = timedelta(seconds=10)


class ReplacingAgent(Agent):
    """An agent that replaces lost ranks as long as the job has restarts left."""

    def __init__(self, elastic: Elastic, job: Job, rendezvous: Any, *arguments: Any) -> None:
        super().__init__(job, rendezvous, *arguments)
        *_, key = arguments
        assert job.script is not None  # otherwise the job is not elastic
        self._newcomers = Newcomers(job.script, elastic.spares, job.simulated_hosts, key)
        self._min_ranks = elastic.min_ranks
        self._given_up: set[int] = set()
        """The local ranks that are lost and not replaced."""
        self._last_loss: Failure | None = None

    def close(self) -> None:
        """End the spares."""
        self._newcomers.close()

    def _coordinator_options(self, job: Job) -> dict[str, Any]:
        return {"min_hosts": job.config.min_nodes, "on_lost_host": self._continue_without_host}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._given_up.clear()
        self._last_loss = None
        joins_late = self.coordinator is not None and (
            self._host_rendezvous.name not in self._agreement.hosts
        )
        if joins_late:
            self._mark_ranks([each.global_rank for each in worker_group.workers], lost=False)
            os.environ[_NEWCOMER] = "1"  # for all of them
        try:
            pids = super()._start_workers(worker_group)
        finally:
            os.environ.pop(_NEWCOMER, None)
        self._newcomers.prepare()
        return pids

    def _continue_without_host(self, host: str, ranks: list[int]) -> None:
        """Continue after the loss of a host; called on the host with the store."""
        print_message(f"lost the launcher on {host}, or the connection to it\n  continuing without")
        self._mark_ranks(ranks, lost=True)

    def _mark_ranks(self, ranks: Sequence[int], *, lost: bool) -> None:
        """Tell the others, in the store of the ranks, whether to wait for newcomers for these."""
        group: Any = self._worker_group
        store = join_store(group.master_addr, group.master_port, _STORE_TIMEOUT)
        for rank in ranks:
            if lost:
                store.set(unreplaced_key(rank), "1")
            else:
                store.delete_key(unreplaced_key(rank))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._forwarder.step(0)
        exits = self._forwarder.exits()
        losses = {
            local_rank: self._failure(
                worker_group, local_rank, worker_group.workers[local_rank].id, end.code
            )
            for local_rank, end in exits.items()
            if end.code and local_rank not in self._given_up
        }
        # If all ranks of the job are lost, nothing is left of their state.
        group: Any = worker_group
        may_continue = len(exits) < len(group.workers) or (losses and group.group_world_size > 1)
        if may_continue and not self.remote_failure and self._continue_after(worker_group, losses):
            self._newcomers.prepare()
            # The agent must not look at the ranks: it would stop all if it saw another loss first.
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _continue_after(self, worker_group: WorkerGroup, losses: dict[int, Failure]) -> bool:
        """Replace lost ranks, or give them up; return False if the job cannot continue."""
        exits = self._forwarder.exits()
        training_has_ended = any(end.code == 0 for end in exits.values())
        is_consequence = any(loss.distance >= CONSEQUENCE for loss in losses.values())
        if losses and (training_has_ended or is_consequence):
            return False
        for local_rank, loss in losses.items():
            self._last_loss = loss
            text = loss.headline if loss.code < 0 else loss.summary
            if self._remaining_restarts > 0:
                self._remaining_restarts -= 1
                try:
                    self._replace(worker_group, local_rank)
                except OSError as error:
                    print_message(f"{text}\n  can't replace it: {error.strerror}")
                    return False
                left = f"{self._remaining_restarts} more restarts are allowed"
                print_message(f"{text}\n  replacing it; {left}")
                continue
            number = len(worker_group.workers) - len(self._given_up) - 1
            if number < self._min_ranks:
                return False
            self._given_up.add(local_rank)
            running: set[int] = self._pcontext._running_local_ranks  # type: ignore[union-attr]
            running.discard(local_rank)
            stop(self._pcontext.subprocess_handlers[local_rank])  # type: ignore[union-attr]
            self._mark_ranks([loss.rank], lost=True)
            print_message(f"{text}\n  continuing with {number} ranks on this host")
        return True

    def _replace(self, worker_group: WorkerGroup, local_rank: int) -> None:
        context: Any = self._pcontext
        worker, environment = worker_group.workers[local_rank], context.envs[local_rank]
        stop(context.subprocess_handlers[local_rank])  # and the children that the rank has left
        newcomer = self._newcomers.start(local_rank, environment, self._output.logs(local_rank))
        context.subprocess_handlers[local_rank] = newcomer.handler
        worker.id = pid = newcomer.handler.proc.pid
        self._output.replace(local_rank, environment["RANK"], newcomer.stdout, newcomer.stderr)
        self._record_start(worker, local_rank, pid)

    def _failures_so_far(self, worker_group: WorkerGroup) -> list[Failure]:
        failures = super()._failures_so_far(worker_group)
        given_up = {worker_group.workers[each].global_rank for each in self._given_up}
        return self._with_cause([each for each in failures if each.rank not in given_up])

    def _all_failures(self, worker_group: WorkerGroup, result: RunResult) -> list[Failure]:
        return self._with_cause(super()._all_failures(worker_group, result))

    def _with_cause(self, failures: list[Failure]) -> list[Failure]:
        """Add the last loss if all failures are consequences, so that the report begins with it."""
        are_consequences = all(failure.distance >= CONSEQUENCE for failure in failures)
        if failures and are_consequences and self._last_loss is not None:
            return [self._last_loss, *failures]
        return failures
