"""`phalanx run` on one host: the agent of its ranks, and the report on the job.

`elastic_agent` starts and watches the ranks, `rank_replacement` those of an elastic job. This
module provides what they need, and reads the outcome of the job from them.
"""

import contextlib
import logging
import os
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from phalanx import key as keys
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher import preload
from phalanx.launcher.elastic_agent import Agent, print_message
from phalanx.launcher.failures import (
    CONSEQUENCE,
    STOPPED,
    Failure,
    RemoteFailure,
    find_root_cause,
    format_report,
    is_remote_cause,
)
from phalanx.launcher.host_resources import check_host, rank_defaults
from phalanx.launcher.options import Job, make_job
from phalanx.launcher.output_forwarder import OutputForwarder
from phalanx.launcher.rank_replacement import ReplacingAgent
from phalanx.launcher.rendezvous import open_rendezvous
from phalanx.recorder.launcher_log_writer import LauncherLogWriter
from phalanx.system.processes import signal_exit_code

_POLL_SECONDS = 0.1
# Time for the forwarder to see the exits of ranks that the agent has stopped.
_EXIT_SECONDS = 1.0


class HostOutcome(NamedTuple):
    """The outcome of a job on this host.

    Attributes:
        code: 0, the exit code of the rank that failed first, or 128 + N if that rank or this
            process was ended by signal N.
        job: The name of the job if its flight recorders are kept for `phalanx explain`, after a
            failure or on request, else empty.
        report: A report for people that names the failing rank and the reason; empty if none
            failed.
        distance: The distance of the failure from the cause, as in `Failure.distance`; other hosts
            may know more.
        is_remote: True if the report is about another host, which has explained it there.
        is_cut_off: True if this host has lost the host with the store, or the connection to it.
    """

    code: int
    job: str
    report: str = ""
    distance: int = 0
    is_remote: bool = False
    is_cut_off: bool = False


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
    try:
        with contextlib.ExitStack() as at_end:
            at_end.callback(preload.close)
            at_end.enter_context(_restore_signal_handlers(job.config.signals_to_handle))
            seconds = job.elastic.rejoin if job.elastic else 0
            return _run_again(job, seconds) if seconds else _run(job)
    except SignalException as caught:  # a second signal, or one while the job was ending
        return HostOutcome(
            signal_exit_code(caught.sigval), "", f"stopped by {caught.sigval.name}", STOPPED
        )


def _run_again(job: Job, seconds: float) -> HostOutcome:
    """Run the job; whenever this host is cut off, join it again as a host that comes late."""
    before, limit = dict(os.environ), None
    while True:
        try:
            outcome = _run(job, limit)
        except (LaunchError, dist.DistError) as error:
            if not isinstance(error.__cause__ or error, dist.DistError):
                raise
            report = str(error)
        else:
            if not outcome.is_cut_off:
                return outcome
            report = outcome.report
        print_message(f"{report}\n  trying for {seconds} s to join again")
        limit = seconds
        os.environ.clear()
        os.environ.update(before)


def _run(job: Job, limit: float | None = None) -> HostOutcome:
    check_host(job.config.nproc_per_node)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = job.config.signals_to_handle
    if job.log_files is not None:
        os.environ.setdefault("PHALANX_TRACEBACKS", "all")
    hosts = job.config.max_nodes
    world_size, keep = job.config.nproc_per_node * hosts, job.keeps_record
    with LauncherLogWriter(world_size, hosts=hosts, keep=keep) as launcher_log:
        with (
            _run_forwarder() as forwarder,
            _open_key(job.key) as key,
            open_rendezvous(job, print_message, limit) as rendezvous,
        ):
            os.environ.update(
                {
                    **rank_defaults(job.config.nproc_per_node, os.environ),
                    **launcher_log.environment(),
                    **rendezvous.environment,
                }
            )
            with contextlib.closing(
                ReplacingAgent(job.elastic, job, rendezvous, forwarder, launcher_log, key)
                if job.elastic
                else Agent(job, rendezvous, forwarder, launcher_log, key)
            ) as agent:
                outcome = _run_agent(agent, job.config.rdzv_endpoint)
                has_lost_store = agent.coordinator is not None and agent.coordinator.has_lost_store
            forwarder.wait_for_exits(_EXIT_SECONDS)
        is_kept = launcher_log.finish(outcome.code)
    # Ranks may have seen it before the launcher, which is not told by a signal of the user.
    is_cut_off = has_lost_store and outcome.code != 0 and outcome.distance != STOPPED
    return outcome._replace(job=launcher_log.name if is_kept else "", is_cut_off=is_cut_off)


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


def _run_agent(agent: Agent, endpoint: str) -> HostOutcome:
    """Run the job until it ends and return its outcome."""
    try:
        result = agent.run()
    except SignalException as caught:
        return HostOutcome(
            signal_exit_code(caught.sigval), "", f"stopped by {caught.sigval.name}", STOPPED
        )
    except (UsageError, preload.CopyError):
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
