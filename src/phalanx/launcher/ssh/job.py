"""A job over many hosts: start it, gather its output, stop it and report the first failure."""

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import phalanx
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.failures import (
    STOPPED,
    HostFailure,
    find_root_cause,
    format_consequences,
    may_have_unknown_cause,
)
from phalanx.launcher.output_forwarder import Sink
from phalanx.launcher.ssh import HEARTBEAT_SECONDS
from phalanx.launcher.ssh.connection import Connection
from phalanx.launcher.ssh.plan import HostSpec, Plan
from phalanx.system.processes import signal_exit_code, signal_name
from phalanx.system.ssh import resolve_address

_POLL_SECONDS = 0.1
_START_TIMEOUT = 60.0
"""Seconds that a host may take from the start of ssh to its `hello` message."""
_RENDEZVOUS_SECONDS = 120
"""Seconds that a host may wait for the first host, once all have been reached."""
_STOP_MARGIN = 15.0
"""Seconds beyond `Plan.stop_limit` after which the connection to a host is closed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of a job.

    Attributes:
        code: The exit code.
        report: The cause of a failure, for people; empty if there is none.
        explanation: The explanation by the host at fault; empty if it has sent none.
    """

    code: int
    report: str = ""
    explanation: str = ""


def run_on_hosts(plan: Plan) -> JobOutcome:
    """Run a script on many hosts over ssh and block until all have ended.

    Must be called in the main thread, because it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. The
    first signal stops the ranks on all hosts. A second one closes the connections without waiting;
    the hosts then stop their ranks by themselves.

    Raises:
        UsageError: The hosts cannot form a job, or this machine has no ssh.
        LaunchError: A host cannot be reached, asks for a password, lacks Phalanx, or has another
            version of Phalanx or of torch.
    """
    master_addr = plan.master_addr or _rendezvous_address(plan)
    job = _Job(plan)
    try:
        with _handle_signals(job):
            if job.wait_for_hellos():
                job.start(master_addr)
            return job.wait_for_end()
    finally:
        job.close()


def _rendezvous_address(plan: Plan) -> str:
    if len(plan.hosts) == 1:
        return ""
    address = resolve_address(plan.hosts[0].target, plan.ssh)
    if address == "localhost" or address.startswith("127.") or address == "::1":
        raise UsageError(
            f"the first host of --hosts, {plan.hosts[0].name}, is the address of the rendezvous, "
            f"but {address} is a different machine on each host: give an address that all hosts "
            "can reach, there or with --master-addr"
        )
    return address


@contextlib.contextmanager
def _handle_signals(job: "_Job") -> Iterator[None]:
    # Ignored signals stay ignored, as under nohup or for background jobs of a script.
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, job.record_signal) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Job:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sinks = {"stdout": Sink("stdout"), "stderr": Sink("stderr")}
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._signals: list[int] = []
        self._next_heartbeat = 0.0
        self._deadline = float("inf")
        self._errors: dict[Connection, LaunchError] = {}
        try:
            for host in plan.hosts:
                self._connect(host)
        except BaseException:
            self.close()
            raise

    def _connect(self, host: HostSpec) -> None:
        connection = Connection(host, self._plan.ssh, self._plan.python)
        self._connections.append(connection)
        for descriptor in connection.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ, connection)

    def record_signal(self, number: int, _: FrameType | None) -> None:
        """Record a signal; `wait_for_end` acts on it between two reads."""
        self._signals.append(number)

    def wait_for_hellos(self) -> bool:
        """Wait for the `hello` message of every host and check that their versions match.

        Returns:
            True if all hosts match; False if a signal arrived first.

        Raises:
            LaunchError: A host did not answer within `_START_TIMEOUT` seconds, its connection was
                lost, or its versions differ.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while missing := [
            connection for connection in self._connections if connection.hello is None
        ]:
            self._step(show=False)
            for error in self._errors.values():
                raise error
            if self._signals:
                return False
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{missing[0].host.name} did not answer within {_START_TIMEOUT:g} s of "
                    f"starting ssh: check how long `ssh {missing[0].host.target} true` takes"
                )
        first = self._connections[0]
        for connection in self._connections:
            _check_versions(connection, first)
        return True

    def start(self, master_addr: str) -> None:
        """Tell every host to start its ranks."""
        first: Any = self._connections[0].hello
        token = secrets.token_hex(8)
        for number, connection in enumerate(self._connections):
            # All hosts start together, so a short timeout is enough. The user's options come later
            # and override it.
            options = ["--rdzv-conf", f"timeout={_RENDEZVOUS_SECONDS}", "--rdzv-id", token]
            options += self._plan.options
            if connection.host.nprocs is not None:
                options += ["--nproc-per-node", str(connection.host.nprocs)]
            if master_addr:
                port = self._plan.master_port or str(first["port"])
                options += ["--nnodes", str(len(self._connections)), "--node-rank", str(number)]
                options += ["--master-addr", master_addr, "--master-port", port]
            connection.start(
                arguments=[*options, *self._plan.command],
                key=self._plan.key.hex(),
                directory=os.getcwd(),
                environment=dict(self._plan.environment),
                name=connection.host.name,
                stop_timeout=self._plan.stop_timeout + _STOP_MARGIN,
            )

    def wait_for_end(self) -> JobOutcome:
        """Forward the output of the hosts until all have ended; return the outcome."""
        while any(
            connection.started and not connection.end_time for connection in self._connections
        ):
            self._step(show=True)
            if len(self._signals) > 1 or time.monotonic() > self._deadline:
                break
            if self._signals or self._must_stop():
                self._stop()
        return self._outcome()

    def close(self) -> None:
        """Close all connections; hosts that still have ranks stop them now."""
        for connection in self._connections:
            connection.close(1.0 if connection.end_time else 0.0)
        self._selector.close()

    def _step(self, *, show: bool) -> None:
        if time.monotonic() > self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            for connection in self._connections:
                connection.send()
        events = self._selector.select(_POLL_SECONDS)
        for key, _ in events:
            messages = key.data.read(key.fd)
            if messages is None:
                self._selector.unregister(key.fd)
                continue
            for message in messages:
                if show:
                    self._show(key.data, message)
        ready = {key.fd for key, _ in events}
        for connection in self._connections:
            # stderr may stay open: ssh can leave a process behind that shares its connection.
            is_idle = not ready.intersection(connection.descriptors)
            if is_idle and not connection.end_time and connection.process.poll() is not None:
                self._errors[connection] = connection.connection_error()
                connection.end_time = time.monotonic()

    def _show(self, connection: Connection, message: dict[str, Any]) -> None:
        try:
            if message["kind"] == "output":
                text = message["text"].encode(errors="surrogateescape")
                self._sinks[message["stream"]].write(connection, b"", text)
            elif message["kind"] == "text":
                line = f"[{connection.host.name}] {message['line']}\n"
                self._sinks["stderr"].write(connection, b"", line.encode())
        except OSError:  # the reader is gone, as in `phalanx run ... | head`
            if signal.SIGPIPE not in self._signals:  # so that it counts only once
                self._signals.append(signal.SIGPIPE)

    def _failures(self) -> list[HostFailure]:
        """Return the failures of hosts, those that have not ended yet included."""
        return [
            _describe_failure(number, connection)
            for number, connection in enumerate(self._connections)
            if connection.end is None or connection.end["code"]
        ]

    def _must_stop(self) -> bool:
        """Return whether the job must stop because a host has failed."""
        failures = [failure for failure in self._failures() if failure.time]
        return bool(failures) and not may_have_unknown_cause(failures)

    def _stop(self) -> None:
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._plan.stop_timeout + _STOP_MARGIN
            # SIGPIPE is only recorded by `_show`; a launcher would not end because of it.
            number = next((each for each in self._signals if each in _SIGNALS), signal.SIGTERM)
            for connection in self._connections:
                if not connection.end_time:
                    connection.stop(int(number))

    def _outcome(self) -> JobOutcome:
        """Return the outcome for the user, once all hosts have ended or been given up."""
        if self._signals:
            name = signal_name(self._signals[0])
            return JobOutcome(signal_exit_code(self._signals[0]), f"stopped by {name}")
        failures = self._failures()
        if not failures:
            return JobOutcome(0)
        cause = find_root_cause(failures)
        consequences = format_consequences(cause, failures)
        connection = self._connections[cause.rank]
        end = connection.end
        if end is None:
            message = self._errors.get(connection) or f"{cause.name} did not end its ranks in time"
            return JobOutcome(1, "\n".join((str(message), *consequences)))
        report = "\n".join((f"on {cause.name}: {end['report']}", *consequences))
        return JobOutcome(end["code"], report, end["explanation"])


def _describe_failure(number: int, connection: Connection) -> HostFailure:
    name, time, end = connection.host.name, connection.end_time, connection.end
    if end is None:
        distance, report = STOPPED if connection.stopped else 0, "the connection was lost"
    else:
        distance, report = int(end["distance"]), str(end["report"])
    stopped = bool(time) and distance >= STOPPED
    summary = f"on {name}: {report.partition(chr(10))[0]}"
    return HostFailure(number, name, time, distance, stopped, summary)


def _check_versions(connection: Connection, first: Connection) -> None:
    hello: Any = connection.hello
    expected: Any = first.hello
    name = connection.host.name
    if hello["phalanx"] != phalanx.__version__:
        raise LaunchError(
            f"{name} has Phalanx {hello['phalanx']}, but this machine has {phalanx.__version__}: "
            "install the same version everywhere, or name another Python with --remote-python"
        )
    if hello["torch"] is None:
        raise LaunchError(f"{hello['python']} on {name} has no torch: install it there")
    if hello["torch"] != expected["torch"]:
        raise LaunchError(
            f"{name} has torch {hello['torch']}, but {first.host.name} has {expected['torch']}: "
            "install the same version everywhere"
        )
