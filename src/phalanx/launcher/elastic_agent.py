"""`phalanx run`: PyTorch's elastic agent, with the ranks' output and one report on a failure.

The agent handles rendezvous, ranks, restarts and several hosts. This module adds the rank to every
line of output, the sharing of the cores among the ranks, the exit of the ranks with the agent
(`child`), and a failure report that begins with the cause of the other failures.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from phalanx import key as keys
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher import endpoint, rank_bootstrap
from phalanx.launcher.failure_report import is_elsewhere, told
from phalanx.launcher.job_coordinator import AbsentHostError, Agreed, Heard, News, agree
from phalanx.launcher.options import Job, parse
from phalanx.launcher.output_forwarder import Exit, Relay
from phalanx.launcher.output_pipes import RankOutput
from phalanx.launcher.rank_environment import rank_defaults
from phalanx.launcher.rendezvous import Meeting, meeting
from phalanx.launcher.requirements import check_host
from phalanx.launcher.root_cause import CONSEQUENCE, GRACE, STOPPED, Failure, excerpt, first_cause
from phalanx.observe.launcher_log_writer import LauncherLogWriter
from phalanx.torch_versions import shutdown_timeout

__all__ = ["Ended", "run"]

_TICK = 0.1
# Time for the relay to see the exits of ranks that the agent has stopped.
_SETTLE_SECONDS = 1.0


class Ended(NamedTuple):
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
        elsewhere: True if the report is about another host, which has explained it there.
    """

    code: int
    job: str
    report: str = ""
    distance: int = 0
    elsewhere: bool = False


def run(argv: Sequence[str]) -> Ended:
    """Run a script on many ranks, as `phalanx run ARGV` does, and block until all have ended.

    Must be called in the main thread, because it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT: each
    stops the ranks.

    Args:
        argv: The options of torchrun, the script and its arguments.

    Raises:
        UsageError: An argument is invalid, or a port is in use.
        LaunchError: The hosts of the job did not meet, or this host cannot start ranks.
    """
    _quieten()
    job = parse(argv)
    with _own_handlers(job.config.signals_to_handle):
        try:
            return _run(job)
        except SignalException as caught:  # a second signal, while the job was ending
            return Ended(128 + caught.sigval, "", f"stopped by {caught.sigval.name}", STOPPED)


def _run(job: Job) -> Ended:
    check_host(job.config.nproc_per_node)
    os.environ.update(rank_defaults(job.config.nproc_per_node, os.environ))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = job.config.signals_to_handle
    hosts = job.config.max_nodes
    with LauncherLogWriter(job.config.nproc_per_node * hosts, hosts=hosts) as launcher_log:
        os.environ.update(launcher_log.environment())
        relay = Relay()
        with _forwarding(relay), _readable(job.key) as key, _met(job) as met:
            os.environ.update(met.environment)
            ended = _supervise(job, met, relay, launcher_log, key)
            relay.settle(_SETTLE_SECONDS)
        kept = launcher_log.finish(ended.code)
    return ended._replace(job=launcher_log.name if kept else "")


def _quieten() -> None:
    """Suppress the console log of the agent, unless the user has set a log level."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("elastic", "launcher", "run"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextlib.contextmanager
def _own_handlers(names: str) -> Iterator[None]:
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
def _forwarding(relay: Relay) -> Iterator[None]:
    done = threading.Event()

    def forward() -> None:
        while not done.is_set():
            relay.step(_TICK)

    thread = threading.Thread(target=forward, name="phalanx-relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        relay.close()


@contextlib.contextmanager
def _readable(key: bytes | None) -> Iterator[int]:
    """Yield a descriptor from which ranks read the job's key; -1 if there is none."""
    descriptor = -1 if key is None else keys.to_sealed_memory(key)
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _met(job: Job) -> contextlib.AbstractContextManager[Meeting]:
    return meeting(job, lambda text: _say(f"phalanx run: {text}"))


class _Agent(LocalElasticAgent):
    """PyTorch's agent for one host, which distinguishes causes of failures from consequences."""

    def __init__(
        self, job: Job, met: Meeting, relay: Relay, launcher_log: LauncherLogWriter, key: int
    ) -> None:
        self.failures: list[Failure] = []
        self._relay = relay
        self._relay.on_exit = self._note_end
        self._launcher_log = launcher_log
        self._started: dict[int, tuple[int, int]] = {}
        self._output = RankOutput(relay, job.files, job.shown)
        self._stop_time = float("inf")
        self._meeting = met
        self._attempt = -1
        self._agreed = Agreed(0, 0, ())
        self._presence = endpoint.presence(job.config)
        self._least_hosts = job.config.min_nodes
        self.news: News | None = None
        if met.store is not None:
            self.news = News(met.store, met.name, has_store=met.has_store)
            met.watch(self.news.miss)
        limit: Any = shutdown_timeout(job.config)
        self._limit: dict[str, Any] = {} if limit is None else {"timeout": limit}
        super().__init__(
            _spec(job, met, key),
            self._output,
            job.config.start_method,
            log_line_prefix_template=job.config.log_line_prefix_template,
            **({"shutdown_timeout": limit} if limit is not None else {}),
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except (AbsentHostError, dist.DistStoreError) as error:  # a counted host is gone
                if self._remaining_restarts <= 0:
                    raise
                self._remaining_restarts -= 1
                _say(f"phalanx run: {error}\n  meeting again")
        group: Any = worker_group
        self._attempt = self._agreed.attempt
        self._remaining_restarts = max(group.spec.max_restarts - self._agreed.failures, 0)
        if (place := self._meeting.place(self._attempt)) is not None:
            group.master_addr, group.master_port = place
        if self.news is not None:
            self.news.begin(self._attempt, self._agreed.hosts)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> Any:
        own = self._attempt + 1, spec.max_restarts - self._remaining_restarts
        name = self._meeting.name
        self._agreed = agree(store, group_rank, group_world_size, own, name, self._presence)
        before = store.timeout
        store.set_timeout(timedelta(seconds=self._presence))
        try:
            return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        finally:
            store.set_timeout(before)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:  # another host waits to join
            if self.news is not None and self.news.catch_up():
                return  # ranks have failed there: handled, and counted, next
            _say("phalanx run: another host has come\n  starting all ranks again")
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._relay.reset()
        self._stop_time = float("inf")
        self._output.attempt = self._attempt
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._output.release()
        for local_rank, pid in pids.items():
            worker = worker_group.workers[local_rank]
            self._launcher_log.start(worker.global_rank, pid, self._attempt, worker.world_size)
            self._started[local_rank] = worker.global_rank, pid
            self._relay.add_process(local_rank, pid)
        return pids

    def _note_end(self, local_rank: int, end: Exit) -> None:
        rank, pid = self._started[local_rank]
        self._launcher_log.end(rank, pid, end.code, stopped=end.time > self._stop_time)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._stop_time = min(self._stop_time, time.monotonic())
        if args and self.news is not None and self._attempt >= 0:
            # A signal: the ranks on other hosts will lose those on this one.
            final = not self._is_spare()
            words = f"stopped by {args[0].name}"
            self.news.tell(words, 128 + args[0], final=final, left=not final)
        super()._shutdown(*args, **options)
        self._note_codes()

    def _note_codes(self) -> None:
        """Record the exit codes of ranks that the agent has reaped before the relay saw them."""
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        for local_rank, handler in handlers.items():
            end, code = self._relay.exits().get(local_rank), handler.proc.returncode
            if code is not None and (end is None or end.code is None):
                rank, pid = self._started[local_rank]
                stopped = end is None or end.time > self._stop_time
                self._launcher_log.end(rank, pid, code, stopped=stopped)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before the agent looks: it would stop the other ranks without finding the first failure.
        self._relay.step(0)
        failures = self._failures_so_far(worker_group)
        if failures or self.heard:
            if not self.heard and self._may_have_a_cause(worker_group, failures):
                return RunResult(state=WorkerState.HEALTHY)
            self._stop(failures)
        before = time.monotonic()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and self.news is not None:
            self.news.leave(self._exit_barrier_timeout)
        failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if not failed and not (self.heard and result.state is WorkerState.SUCCEEDED):
            return result
        self._stop_time = min(self._stop_time, before)
        self.failures = self._all_failures(worker_group, result)
        if self.news is not None and self.failures:
            cause = first_cause(self.failures)
            self.news.tell(cause.headline, cause.exit_code)
        if not (self.failures or self.heard) or not self._starts_again():
            return result
        _say(f"phalanx run: {told(self.failures, self.heard)}\n  starting all ranks again")
        self.failures = []
        return RunResult(state=WorkerState.UNHEALTHY)

    def _starts_again(self) -> bool:
        """Return whether to start all ranks again; adapt the remaining restarts to other hosts."""
        if (heard := self.heard) is not None:
            if heard.final:
                self._remaining_restarts = 0
            elif heard.left:
                self._remaining_restarts += 1  # the agent will count it, but it is no failure
        return self._remaining_restarts > 0

    def _is_spare(self) -> bool:
        """Return whether the other hosts can continue without this one."""
        group: Any = self._worker_group
        enough: bool = group.group_world_size > self._least_hosts
        return enough and not self._meeting.has_store and group.spec.max_restarts > 0

    @property
    def heard(self) -> Heard | None:
        """The failure of the job on another host; None if none is known."""
        return None if self.news is None else self.news.heard

    def _exit_barrier(self) -> None:
        if self.news is None:  # otherwise the ranks of all hosts have already ended
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _may_have_a_cause(self, group: WorkerGroup, failures: Sequence[Failure]) -> bool:
        """Return whether the failures here may have a cause, on any host, that is not known yet."""
        cause = first_cause(failures)
        others = self.news or len(self._relay.exits()) < group.spec.local_world_size
        return bool(cause.distance and others and time.monotonic() < cause.time + GRACE)

    def _failures_so_far(self, worker_group: WorkerGroup) -> list[Failure]:
        return [
            self._failure(worker_group, local_rank, worker_group.workers[local_rank].id, end.code)
            for local_rank, end in self._relay.exits().items()
            if end.code
        ]

    def _all_failures(self, worker_group: WorkerGroup, result: RunResult) -> list[Failure]:
        limit = time.monotonic() + 1
        while len(self._relay.exits()) < len(worker_group.workers) and time.monotonic() < limit:
            self._relay.step(_TICK)
        return [
            self._failure(worker_group, found.local_rank, found.pid, found.exitcode)
            for found in result.failures.values()
        ]

    def _failure(self, worker_group: WorkerGroup, local_rank: int, pid: int, code: int) -> Failure:
        end = self._relay.exits().get(local_rank)
        when = end.time if end else time.monotonic()
        rank = worker_group.workers[local_rank].global_rank
        text = excerpt(self._output.tail(local_rank))
        stopped = when > self._stop_time
        if end is None or end.code is None:  # the agent reaped the rank first and has its code
            self._launcher_log.end(rank, pid, code, stopped=stopped)
        return Failure(rank, pid, code, when, text, stopped=stopped)

    def _stop(self, failures: Sequence[Failure]) -> None:
        self._stop_time = time.monotonic()
        for failure in failures:
            # Kill the children that a dead rank has left behind. The rank has not been reaped, so
            # its pid has not been reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(failure.pid, signal.SIGKILL)
        self._shutdown(**self._limit)


def _spec(job: Job, met: Meeting, key: int) -> WorkerSpec:
    config = job.config
    ours = (str(os.getpid()), str(job.hosts), str(key))
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=("-I", "-S", rank_bootstrap.__file__, *ours, *job.command),
        rdzv_handler=met.handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _supervise(
    job: Job, met: Meeting, relay: Relay, launcher_log: LauncherLogWriter, key: int
) -> Ended:
    """Run the job until it ends and return its outcome."""
    agent = _Agent(job, met, relay, launcher_log, key)
    try:
        result = agent.run()
    except SignalException as caught:
        return Ended(128 + caught.sigval, "", f"stopped by {caught.sigval.name}", STOPPED)
    except UsageError:
        raise
    except (LaunchError, RendezvousError, dist.DistError, RuntimeError) as error:
        heard = None if agent.news is None else agent.news.catch_up()
        if heard is not None and heard.final:
            return _ended([], heard, 1)
        where = job.config.rdzv_endpoint
        raise LaunchError(f"the hosts of the job didn't meet at {where}: {error}") from error
    finally:
        if agent.news is not None:
            agent.news.close()
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    return _ended(agent.failures, agent.heard, int(result is not None and result.is_failed()))


def _ended(failures: Sequence[Failure], heard: Heard | None, code: int) -> Ended:
    if heard is not None and is_elsewhere(failures, heard):
        return Ended(heard.code, "", told(failures, heard), CONSEQUENCE, elsewhere=True)
    if not failures:  # failed without a failed rank: one is stuck in the kernel
        return Ended(code, "")
    cause = first_cause(failures)
    return Ended(cause.exit_code, "", told(failures), cause.distance)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
