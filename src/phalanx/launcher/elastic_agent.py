"""`phalanx run`: PyTorch's elastic agent, with the ranks' output and one report on a failure.

The agent handles rendezvous, ranks, restarts and several hosts. This module adds the rank to every
line of output, the sharing of the cores among the ranks, the exit of the ranks with the agent
(`rank_bootstrap`), and a failure report that begins with the cause of the other failures.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from phalanx import key as keys
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher import rank_bootstrap
from phalanx.launcher.failures import (
    CONSEQUENCE,
    STOPPED,
    Failure,
    RemoteFailure,
    excerpt,
    find_root_cause,
    format_report,
    is_remote_cause,
    mark_late_causes,
    may_have_unknown_cause,
)
from phalanx.launcher.host_resources import check_host, rank_defaults
from phalanx.launcher.job_coordinator import AbsentHostError, Agreement, JobCoordinator, agree
from phalanx.launcher.options import Job, make_job, presence_timeout
from phalanx.launcher.output_forwarder import Exit, OutputForwarder, Sink
from phalanx.launcher.rendezvous import HostRendezvous, open_rendezvous
from phalanx.launcher.store import HOST
from phalanx.observe.launcher_log_writer import LauncherLogWriter
from phalanx.system.processes import signal_exit_code, signal_group
from phalanx.torch_versions import shutdown_timeout

_POLL_SECONDS = 0.1
# Time for the forwarder to see the exits of ranks that the agent has stopped.
_EXIT_SECONDS = 1.0
_TAIL_BYTES = 1 << 16


class HostOutcome(NamedTuple):
    """The outcome of a job on this host.

    Attributes:
        code: 0, the exit code of the rank that failed first, or 128 + N if that rank or this
            process was ended by signal N.
        job: The name of the job if its flight recorders are kept for `phalanx explain`, else
            empty.
        report: A report for people that names the failing rank and the reason; empty if none
            failed.
        distance: The distance of the failure from the cause, as in `Failure.distance`; other hosts
            may know more.
        is_remote: True if the report is about another host, which has explained it there.
    """

    code: int
    job: str
    report: str = ""
    distance: int = 0
    is_remote: bool = False


def run(args: Namespace) -> HostOutcome:
    """Run a script on many ranks, as `phalanx run` does, and block until all have ended.

    Must be called in the main thread, because it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT: each
    stops the ranks.

    Args:
        args: The arguments of `phalanx run`, without `hosts`.

    Raises:
        UsageError: An argument is invalid, or a port is in use.
        LaunchError: The rendezvous of the hosts failed, or this host cannot start ranks.
    """
    _silence_agent_log()
    job = make_job(args)
    with _restore_signal_handlers(job.config.signals_to_handle):
        try:
            return _run(job)
        except SignalException as caught:  # a second signal, while the job was ending
            return HostOutcome(
                signal_exit_code(caught.sigval), "", f"stopped by {caught.sigval.name}", STOPPED
            )


def _run(job: Job) -> HostOutcome:
    check_host(job.config.nproc_per_node)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = job.config.signals_to_handle
    hosts = job.config.max_nodes
    with LauncherLogWriter(job.config.nproc_per_node * hosts, hosts=hosts) as launcher_log:
        with (
            _run_forwarder() as forwarder,
            _open_key(job.key) as key,
            open_rendezvous(job, lambda text: _print(f"phalanx run: {text}")) as rendezvous,
        ):
            os.environ.update(
                {
                    **rank_defaults(job.config.nproc_per_node, os.environ),
                    **launcher_log.environment(),
                    **rendezvous.environment,
                }
            )
            agent = _Agent(job, rendezvous, forwarder, launcher_log, key)
            outcome = _run_agent(agent, job.config.rdzv_endpoint)
            forwarder.wait_for_exits(_EXIT_SECONDS)
        is_kept = launcher_log.finish(outcome.code)
    return outcome._replace(job=launcher_log.name if is_kept else "")


def _silence_agent_log() -> None:
    """Suppress the console log of the agent, unless the user has set a log level."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("elastic", "launcher", "run"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextlib.contextmanager
def _restore_signal_handlers(names: str) -> Iterator[None]:
    """Restore the signal handlers at the end, because the agent leaves its own installed."""
    before = {
        number: signal.getsignal(number)
        for name in names.split(",")
        if (number := getattr(signal, name.strip(), None)) is not None
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed by Python
                signal.signal(number, handler)


@contextlib.contextmanager
def _run_forwarder() -> Iterator[OutputForwarder]:
    forwarder, done = OutputForwarder(), threading.Event()

    def forward() -> None:
        while not done.is_set():
            forwarder.step(_POLL_SECONDS)

    thread = threading.Thread(target=forward, name="phalanx-output", daemon=True)
    thread.start()
    try:
        yield forwarder
    finally:
        done.set()
        thread.join()
        forwarder.close()


@contextlib.contextmanager
def _open_key(key: bytes | None) -> Iterator[int]:
    """Yield a descriptor from which ranks read the job's key; -1 if there is none."""
    descriptor = -1 if key is None else keys.to_sealed_memory(key)
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Agent(LocalElasticAgent):
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
        self._output = _RankOutput(forwarder, job.log_files, job.shown_ranks)
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
                rendezvous.store, rendezvous.name, has_store=server is not None
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

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except (AbsentHostError, dist.DistStoreError) as error:  # a counted host is lost
                if self._remaining_restarts <= 0:
                    raise
                self._remaining_restarts -= 1
                _print(f"phalanx run: {error}\n  repeating the rendezvous")
        group: Any = worker_group
        self._attempt = self._agreement.attempt
        self._remaining_restarts = max(group.spec.max_restarts - self._agreement.failures, 0)
        if (get_port := self._host_rendezvous.rank_store_port) is not None:
            group.master_addr, group.master_port = HOST, get_port(self._attempt)
        if self.coordinator is not None:
            self.coordinator.begin_attempt(self._attempt, self._agreement.hosts)

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
            _print("phalanx run: another host has joined\n  restarting all ranks")
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._forwarder.reset()
        self._stop_time = float("inf")
        self._unprompted = set()
        self._output.attempt = self._attempt
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._output.close_write_ends()
        for local_rank, pid in pids.items():
            worker = worker_group.workers[local_rank]
            self._launcher_log.start(worker.global_rank, pid, self._attempt, worker.world_size)
            self._processes[local_rank] = worker.global_rank, pid
            self._forwarder.add_process(local_rank, pid)
        return pids

    def _record_exit(self, local_rank: int, end: Exit) -> None:
        rank, pid = self._processes[local_rank]
        self._launcher_log.end(rank, pid, end.code, stopped=self._was_stopped(local_rank, end.time))

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._stop_time = min(self._stop_time, time.monotonic())
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
            if code is not None and (end is None or end.code is None):
                rank, pid = self._processes[local_rank]
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
            self.coordinator.report(cause.headline, cause.exit_code)
        if not (self.failures or self.remote_failure) or not self._should_restart():
            return result
        _print(
            f"phalanx run: {format_report(self.failures, self.remote_failure)}\n"
            "  restarting all ranks"
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
        return mark_late_causes(
            [
                self._failure(worker_group, failure.local_rank, failure.pid, failure.exitcode)
                for failure in result.failures.values()
            ]
        )

    def _failure(self, worker_group: WorkerGroup, local_rank: int, pid: int, code: int) -> Failure:
        end = self._forwarder.exits().get(local_rank)
        ended_at = end.time if end else time.monotonic()
        rank = worker_group.workers[local_rank].global_rank
        text = excerpt(self._output.tail(local_rank))
        stopped = self._was_stopped(local_rank, ended_at)
        if end is None or end.code is None:  # the agent reaped the rank first and has its code
            self._launcher_log.end(rank, pid, code, stopped=stopped)
        return Failure(rank, pid, code, ended_at, text, stopped=stopped)

    def _stop(self, failures: Sequence[Failure]) -> None:
        self._stop_time = time.monotonic()
        for failure in failures:
            # Kill the children that a dead rank has left behind. The rank has not been reaped, so
            # its pid has not been reused.
            signal_group(failure.pid, signal.SIGKILL)
        self._shutdown(**self._shutdown_options)


class _RankOutput(LogsSpecs):
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
        self._stderr_logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The directory of the log files; the null device if there are none."""
        return self._log_files.root_log_dir if self._log_files else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the pipes for one attempt to run all ranks; called by the agent."""
        for env in envs.values():
            # The agent counts only the failures on this host, which differ between hosts.
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        dest = self._log_files.reify(envs) if self._log_files else self._discard_logs(envs)
        self._stderr_logs.clear()
        for local_rank, env in envs.items():
            prefix = f"[rank {env['RANK']}] "
            for paths, sink in zip((dest.stdouts, dest.stderrs), self._sinks, strict=True):
                is_stderr = paths is dest.stderrs
                if paths[local_rank] not in ("", os.devnull):
                    if is_stderr:
                        self._stderr_logs[local_rank] = paths[local_rank]
                    continue
                is_shown = self._shown_ranks is None or local_rank in self._shown_ranks
                visible_sink = sink if is_shown else None
                paths[local_rank] = self._create_pipe(
                    local_rank, visible_sink, prefix, keep=is_stderr
                )
        return dest

    def close_write_ends(self) -> None:
        """Close this process's write ends of the pipes, once the ranks have opened theirs."""
        while self._writers:
            os.close(self._writers.pop())

    def tail(self, local_rank: int) -> str:
        """Return the end of a rank's stderr, whether it is shown, hidden or in a log file."""
        if local_rank not in self._stderr_logs:
            return self._forwarder.tail(local_rank)
        return (
            Path(self._stderr_logs[local_rank]).read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        )

    def _create_pipe(self, local_rank: int, sink: Sink | None, prefix: str, *, keep: bool) -> str:
        reader, writer = os.pipe()
        self._writers.append(writer)
        self._forwarder.add_stream(local_rank, reader, sink, prefix, keep=keep)
        return f"/proc/{os.getpid()}/fd/{writer}"

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


def _run_agent(agent: _Agent, endpoint: str) -> HostOutcome:
    """Run the job until it ends and return its outcome."""
    try:
        result = agent.run()
    except SignalException as caught:
        return HostOutcome(
            signal_exit_code(caught.sigval), "", f"stopped by {caught.sigval.name}", STOPPED
        )
    except UsageError:
        raise
    except (LaunchError, RendezvousError, dist.DistError, RuntimeError) as error:
        remote_failure = None if agent.coordinator is None else agent.coordinator.refresh()
        if remote_failure is not None and remote_failure.is_final:
            return _make_outcome([], remote_failure, 1)
        raise LaunchError(f"the rendezvous of the hosts at {endpoint} failed: {error}") from error
    finally:
        if agent.coordinator is not None:
            agent.coordinator.close()
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    return _make_outcome(
        agent.failures, agent.remote_failure, int(result is not None and result.is_failed())
    )


def _make_outcome(
    failures: Sequence[Failure], remote_failure: RemoteFailure | None, code: int
) -> HostOutcome:
    if remote_failure is not None and is_remote_cause(failures, remote_failure):
        report = format_report(failures, remote_failure)
        return HostOutcome(remote_failure.code, "", report, CONSEQUENCE, is_remote=True)
    if not failures:  # failed without a failed rank: one is stuck in the kernel
        return HostOutcome(code, "")
    cause = find_root_cause(failures)
    return HostOutcome(cause.exit_code, "", format_report(failures), cause.distance)


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
