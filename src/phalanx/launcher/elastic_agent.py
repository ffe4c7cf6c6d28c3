"""`phalanx run`: PyTorch's elastic agent, with the ranks' output and one report on a failure.

The agent handles rendezvous, ranks, restarts and several hosts. This module adds the rank to every
line of output, the sharing of the cores among the ranks, the exit of the ranks with the agent
(`rank_bootstrap`), and a failure report that begins with the cause of the other failures.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from phalanx.launcher import rank_bootstrap
from phalanx.launcher.failures import (
    Failure,
    RemoteFailure,
    excerpt,
    find_root_cause,
    format_report,
    mark_late_causes,
    may_have_unknown_cause,
    record_exceptions,
)
from phalanx.launcher.job_coordinator import AbsentHostError, Agreement, JobCoordinator, agree
from phalanx.launcher.options import Job, presence_timeout
from phalanx.launcher.output_forwarder import Exit, OutputForwarder, Sink
from phalanx.launcher.preload import Copies
from phalanx.launcher.rendezvous import HostRendezvous
from phalanx.launcher.store import HOST
from phalanx.recorder.launcher_log_writer import LauncherLogWriter
from phalanx.system.processes import signal_exit_code, signal_group
from phalanx.torch_sources import shutdown_timeout
from phalanx.torch_versions import start_processes_by

# Time for the forwarder to see the exits of ranks that the agent has stopped.
_EXIT_SECONDS = 1.0
_TAIL_BYTES = 1 << 16


class Agent(LocalElasticAgent):
    """PyTorch's agent for one host, which distinguishes causes of failures from consequences."""

    def __init__(
        self,
        job: Job,
        rendezvous: HostRendezvous,
        forwarder: OutputForwarder,
        launcher_log: LauncherLogWriter,
        key: int,
    ) -> None:
        self.failures: list[Failure] = []
        self._forwarder = forwarder
        self._forwarder.on_exit = self._record_exit
        self._launcher_log = launcher_log
        self._processes: dict[int, tuple[int, int]] = {}
        self._output = RankOutput(forwarder, job.log_files, job.shown_ranks)
        self._copies = Copies(job, key)
        self._stop_time = float("inf")
        self._unprompted: set[int] = set()
        """The local ranks that failed before the agent stopped any."""
        self._host_rendezvous = rendezvous
        self._attempt = -1
        self._agreement = Agreement(0, 0, ())
        self._presence_timeout = presence_timeout(job.config)
        self._min_hosts = job.config.min_nodes
        self.coordinator: JobCoordinator | None = None
        if rendezvous.store is not None:
            server = rendezvous.tunnel_server
            self.coordinator = JobCoordinator(
                rendezvous.store,
                rendezvous.name,
                has_store=server is not None,
                **self._coordinator_options(job),
            )
            if server is not None:
                server.on_host_lost = self.coordinator.report_lost_host
        timeout: Any = shutdown_timeout(job.config)
        self._shutdown_options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            _spec(job, rendezvous, key),
            self._output,
            job.config.start_method,
            log_line_prefix_template=job.config.log_line_prefix_template,
            **({"shutdown_timeout": timeout} if timeout is not None else {}),
        )

    def _coordinator_options(self, _job: Job) -> dict[str, Any]:
        """Return further options of the coordinator."""
        return {}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except (AbsentHostError, dist.DistStoreError) as error:  # a counted host is lost
                if self._remaining_restarts <= 0:
                    raise
                self._remaining_restarts -= 1
                print_message(f"{error}\n  repeating the rendezvous")
        group: Any = worker_group
        self._attempt = self._agreement.attempt
        self._remaining_restarts = max(group.spec.max_restarts - self._agreement.failures, 0)
        if (get_port := self._host_rendezvous.rank_store_port) is not None:
            group.master_addr, group.master_port = HOST, get_port(self._attempt)
        if self.coordinator is not None:
            ranks = [worker.global_rank for worker in worker_group.workers]
            self.coordinator.begin_attempt(self._attempt, self._agreement.hosts, ranks)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> Any:
        own_counts = self._attempt + 1, spec.max_restarts - self._remaining_restarts
        name = self._host_rendezvous.name
        self._agreement = agree(
            store, group_rank, group_world_size, own_counts, name, self._presence_timeout
        )
        before = store.timeout
        store.set_timeout(timedelta(seconds=self._presence_timeout))
        try:
            return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        finally:
            store.set_timeout(before)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:  # another host waits to join
            if self.coordinator is not None and self.coordinator.refresh():
                return  # ranks have failed there: handled, and counted, next
            print_message("another host has joined\n  restarting all ranks")
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._forwarder.reset()
        self._stop_time = float("inf")
        self._unprompted = set()
        self._output.attempt = self._attempt
        start = self._copies.start if self._copies.can_start else None
        try:
            with start_processes_by(start):
                pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._output.close_write_ends()
        for local_rank, pid in pids.items():
            self._record_start(worker_group.workers[local_rank], local_rank, pid)
        return pids

    def _record_start(self, worker: Worker, local_rank: int, pid: int) -> None:
        self._launcher_log.start(worker.global_rank, pid, self._attempt, worker.world_size)
        self._processes[local_rank] = worker.global_rank, pid
        self._forwarder.add_process(local_rank, pid)

    def _record_exit(self, local_rank: int, end: Exit) -> None:
        rank, pid = self._processes[local_rank]
        self._launcher_log.end(rank, pid, end.code, stopped=self._was_stopped(local_rank, end.time))

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._stop_time = min(self._stop_time, time.monotonic())
        self._launcher_log.note_suspended(self._processes.values())
        if args and self.coordinator is not None and self._attempt >= 0:
            # A signal: the ranks on other hosts are about to lose those on this one.
            is_final = not self._is_optional()
            text = f"stopped by {args[0].name}"
            self.coordinator.report(
                text, signal_exit_code(args[0]), is_final=is_final, has_left=not is_final
            )
        super()._shutdown(*args, **options)
        self._record_exit_codes()

    def _record_exit_codes(self) -> None:
        """Record the exit codes of ranks that the agent reaped before the forwarder saw them."""
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        for local_rank, handler in handlers.items():
            end, code = self._forwarder.exits().get(local_rank), handler.proc.returncode
            rank, pid = self._processes.get(local_rank, (-1, -1))
            if pid != handler.proc.pid:
                continue  # a signal came before its start was recorded
            if code is not None and (end is None or end.code is None):
                stopped = self._was_stopped(local_rank, float("inf") if end is None else end.time)
                self._launcher_log.end(rank, pid, code, stopped=stopped)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before the agent looks: it would stop the other ranks without finding the first failure.
        self._forwarder.step(0)
        failures = self._failures_so_far(worker_group)
        if failures or self.remote_failure:
            if not self.remote_failure and self._may_have_unknown_cause(worker_group, failures):
                return RunResult(state=WorkerState.HEALTHY)
            self._stop(failures)
        before, has_stopped = time.monotonic(), self._stop_time < float("inf")
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and self.coordinator is not None:
            self.coordinator.finish(self._exit_barrier_timeout)
        failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if not failed and not (self.remote_failure and result.state is WorkerState.SUCCEEDED):
            return result
        if not has_stopped:  # the forwarder may see later that these ranks have ended
            self._unprompted = {failure.local_rank for failure in result.failures.values()}
        self._stop_time = min(self._stop_time, before)
        self.failures = self._all_failures(worker_group, result)
        if self.coordinator is not None and self.failures:
            cause = find_root_cause(self.failures)
            self.coordinator.report(cause.verdict, cause.exit_code)
        if not (self.failures or self.remote_failure) or not self._should_restart():
            return result
        print_message(
            f"{format_report(self.failures, self.remote_failure)}\n  restarting all ranks"
        )
        self.failures = []
        return RunResult(state=WorkerState.UNHEALTHY)

    def _should_restart(self) -> bool:
        """Return whether to start all ranks again; adapt the remaining restarts to other hosts."""
        if (remote_failure := self.remote_failure) is not None:
            if remote_failure.is_final:
                self._remaining_restarts = 0
            elif remote_failure.has_left:
                self._remaining_restarts += 1  # the agent will count it, but it is no failure
        return self._remaining_restarts > 0

    def _is_optional(self) -> bool:
        """Return whether the other hosts can continue without this one."""
        group: Any = self._worker_group
        has_enough_hosts: bool = group.group_world_size > self._min_hosts
        has_store = self._host_rendezvous.tunnel_server is not None
        return has_enough_hosts and not has_store and group.spec.max_restarts > 0

    @property
    def remote_failure(self) -> RemoteFailure | None:
        """The failure of the job on another host; None if none is known."""
        return None if self.coordinator is None else self.coordinator.remote_failure

    def _exit_barrier(self) -> None:
        if self.coordinator is None:  # otherwise the ranks of all hosts have already ended
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _may_have_unknown_cause(self, group: WorkerGroup, failures: Sequence[Failure]) -> bool:
        """Return whether the failures here may have a cause, on any host, that is not known yet."""
        others = self.coordinator or len(self._forwarder.exits()) < group.spec.local_world_size
        return bool(others and may_have_unknown_cause(failures))

    def _was_stopped(self, local_rank: int, ended_at: float) -> bool:
        """Return whether the agent stopped a rank that ended at this time (monotonic seconds)."""
        return ended_at > self._stop_time and local_rank not in self._unprompted

    def _failures_so_far(self, worker_group: WorkerGroup) -> list[Failure]:
        return [
            self._failure(worker_group, local_rank, worker_group.workers[local_rank].id, end.code)
            for local_rank, end in self._forwarder.exits().items()
            if end.code
        ]

    def _all_failures(self, worker_group: WorkerGroup, result: RunResult) -> list[Failure]:
        self._forwarder.wait_for_exits(_EXIT_SECONDS)
        failures = [
            self._failure(worker_group, failure.local_rank, failure.pid, failure.exitcode)
            for failure in result.failures.values()
        ]
        record_exceptions(self._launcher_log, failures)
        return mark_late_causes(failures)

    def _failure(self, worker_group: WorkerGroup, local_rank: int, pid: int, code: int) -> Failure:
        end = self._forwarder.exits().get(local_rank)
        ended_at = end.time if end else time.monotonic()
        rank = worker_group.workers[local_rank].global_rank
        text = excerpt(self._output.tail(local_rank))
        stopped = self._was_stopped(local_rank, ended_at)
        if end is None or end.code is None:  # the agent reaped the rank first and has its code
            self._launcher_log.end(rank, pid, code, stopped=stopped)
        is_shown = self._output.is_shown(local_rank)
        return Failure(rank, pid, code, ended_at, text, stopped=stopped, is_shown=is_shown)

    def close(self) -> None:
        """Free what the agent has beside its ranks."""

    def _stop(self, failures: Sequence[Failure]) -> None:
        self._stop_time = time.monotonic()
        for failure in failures:
            # Kill the children that a dead rank has left behind. The rank has not been reaped, so
            # its pid has not been reused.
            signal_group(failure.pid, signal.SIGKILL)
        self._shutdown(**self._shutdown_options)


class RankOutput(LogsSpecs):
    """A log specification with a pipe for each stream that a rank would write to the console.

    The agent opens the pipes by their paths in /proc, as if they were log files. Lines therefore
    appear live and whole, each with its rank, and nothing is written to the disk unless the user
    asked for log files, which `log_files` handles.
    """

    def __init__(
        self, forwarder: OutputForwarder, log_files: LogsSpecs | None, shown_ranks: set[int] | None
    ) -> None:
        """Create the specification.

        Args:
            forwarder: The forwarder that reads the pipes.
            log_files: The specification of the log files; None if there are none.
            shown_ranks: The local ranks whose output is shown; None for all.
        """
        super().__init__()
        self.attempt = 0
        """The number of the next start of all ranks, from 0, as the ranks get it."""
        self._forwarder = forwarder
        self._log_files = log_files
        self._shown_ranks = shown_ranks
        self._sinks = Sink("stdout"), Sink("stderr")
        self._writers: list[int] = []
        self._logs: dict[int, tuple[str, str]] = {}

    @property
    def root_log_dir(self) -> str:
        """The directory of the log files; the null device if there are none."""
        return self._log_files.root_log_dir if self._log_files else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the pipes for one attempt to run all ranks; called by the agent."""
        for local_rank, env in envs.items():
            # The agent counts only the failures on this host, which differ between hosts.
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
            # A traceback that nobody sees must not stand for those of other ranks.
            if os.environ["PHALANX_TRACEBACKS"] == "once" and not self._is_selected(local_rank):
                env["PHALANX_TRACEBACKS"] = "folded"
        dest = self._log_files.reify(envs) if self._log_files else self._discard_logs(envs)
        for local_rank, env in envs.items():
            streams = dest.stdouts, dest.stderrs
            stdout, stderr = (each[local_rank].replace(os.devnull, "") for each in streams)
            self._logs[local_rank] = stdout, stderr
            for index, paths in enumerate(streams):
                if not self._logs[local_rank][index]:
                    reader, writer = os.pipe()
                    self._writers.append(writer)
                    self._forward(local_rank, env["RANK"], index, reader)
                    paths[local_rank] = f"/proc/{os.getpid()}/fd/{writer}"
        return dest

    def logs(self, local_rank: int) -> tuple[str, str]:
        """Return the paths of a rank's log files, of stdout and stderr; empty if there is none."""
        return self._logs[local_rank]

    def replace(self, local_rank: int, rank: str, stdout: int, stderr: int) -> None:
        """Forward the output of a new process of a rank from pipes, as far as there are no logs."""
        self._forwarder.forget(local_rank)
        for index, reader in enumerate((stdout, stderr)):
            self._forward(local_rank, rank, index, reader)

    def close_write_ends(self) -> None:
        """Close this process's write ends of the pipes, once the ranks have opened theirs."""
        while self._writers:
            os.close(self._writers.pop())

    def tail(self, local_rank: int) -> str:
        """Return the end of a rank's stderr, whether it is shown, hidden or in a log file."""
        if not (log := self._logs[local_rank][1]):
            return self._forwarder.tail(local_rank)
        return Path(log).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    def is_shown(self, local_rank: int) -> bool:
        """Return whether this object, rather than log files, shows the stderr of a rank."""
        return not self._logs[local_rank][1] and self._is_selected(local_rank)

    def _is_selected(self, local_rank: int) -> bool:
        return self._shown_ranks is None or local_rank in self._shown_ranks

    def _forward(self, local_rank: int, rank: str, index: int, reader: int) -> None:
        sink = self._sinks[index] if self._is_selected(local_rank) else None
        self._forwarder.add_stream(
            local_rank,
            reader,
            sink,
            f"[rank {rank}] ",
            keep=index == 1,
            replaced=f"[rank{rank}]: ",  # PyTorch's, before the lines of an uncaught exception
        )

    @staticmethod
    def _discard_logs(envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, ""),
        )


def _spec(job: Job, rendezvous: HostRendezvous, key: int) -> WorkerSpec:
    config = job.config
    arguments = (str(os.getpid()), str(job.simulated_hosts), str(key))
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=("-I", "-S", rank_bootstrap.__file__, *arguments, *job.command),
        rdzv_handler=rendezvous.handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def print_message(text: str) -> None:
    """Print a message of `phalanx run`."""
    sys.stderr.write(f"phalanx run: {text}\n")
    sys.stderr.flush()
