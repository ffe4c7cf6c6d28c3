"""A job over many hosts: start it, gather its output, stop it and report the first failure."""

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import phalanx
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher.output_forwarder import Sink
from phalanx.launcher.root_cause import GRACE, STOPPED
from phalanx.launcher.ssh.connection import Connection, address_of
from phalanx.launcher.ssh.host_list import HostPlace
from phalanx.launcher.ssh.plan import Plan
from phalanx.launcher.ssh.protocol import BEAT

__all__ = ["Outcome", "run_on_hosts"]

_TICK = 0.1
_START_LIMIT = 60.0
"""Seconds that a host may take from the start of ssh to its `hello` message."""
_MEET_SECONDS = 120
"""Seconds that a host may wait for the first host, once all have been reached."""
_STOP_MARGIN = 15.0
"""Seconds beyond `Plan.stop_limit` after which the connection to a host is closed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        code: The exit code.
        report: The cause of a failure, for people; empty if there is none.
        explanation: The explanation by the host at fault; empty if it has sent none.
    """

    code: int
    report: str = ""
    explanation: str = ""


def run_on_hosts(plan: Plan) -> Outcome:
    """Run a script on many hosts over ssh and block until all have ended.

    Must be called in the main thread, because it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. The
    first signal stops the ranks on all hosts. A second one closes the connections without waiting;
    the hosts then stop their ranks by themselves.

    Raises:
        UsageError: The hosts cannot form a job, or this machine has no ssh.
        LaunchError: A host cannot be reached, asks for a password, lacks Phalanx, or has another
            version of Phalanx or of torch.
    """
    where = plan.master_addr or _first_address(plan)
    job = _Job(plan)
    try:
        with _signals(job):
            if job.greet():
                job.start(where)
            return job.gather()
    finally:
        job.close()


def _first_address(plan: Plan) -> str:
    if len(plan.places) == 1:
        return ""
    address = address_of(plan.places[0], plan.ssh)
    if address == "localhost" or address.startswith("127.") or address == "::1":
        raise UsageError(
            f"--hosts begins with {plan.places[0].name}, where the ranks of all hosts meet, and "
            f"{address} is another machine for each of them: give the address that they reach, "
            "there or with --master-addr"
        )
    return address


@contextlib.contextmanager
def _signals(job: "_Job") -> Iterator[None]:
    # Ignored signals stay ignored, as under nohup or for background jobs of a script.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, job.note_signal) for number in heard}
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
        self._hosts: list[Connection] = []
        self._signals: list[int] = []
        self._beat = 0.0
        self._deadline = float("inf")
        self._lost: dict[Connection, LaunchError] = {}
        try:
            for place in plan.places:
                self._connect(place)
        except BaseException:
            self.close()
            raise

    def _connect(self, place: HostPlace) -> None:
        host = Connection(place, self._plan.ssh, self._plan.python)
        self._hosts.append(host)
        for descriptor in host.descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ, host)

    def note_signal(self, number: int, _: FrameType | None) -> None:
        """Record a signal; `gather` acts on it between two reads."""
        self._signals.append(number)

    def greet(self) -> bool:
        """Wait for the `hello` message of every host and check that their versions match.

        Returns:
            True if all hosts match; False if a signal arrived first.

        Raises:
            LaunchError: A host did not answer within `_START_LIMIT` seconds, its connection was
                lost, or its versions differ.
        """
        deadline = time.monotonic() + _START_LIMIT
        while late := [host for host in self._hosts if host.hello is None]:
            self._step(show=False)
            for error in self._lost.values():
                raise error
            if self._signals:
                return False
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{late[0].place.name} didn't answer within {_START_LIMIT:g} s of starting "
                    f"ssh: see how long `ssh {late[0].place.target} true` takes"
                )
        first = self._hosts[0]
        for host in self._hosts:
            _compare(host, first)
        return True

    def start(self, where: str) -> None:
        """Tell every host to start its ranks."""
        first: Any = self._hosts[0].hello
        token = secrets.token_hex(8)
        for number, host in enumerate(self._hosts):
            options = list(self._plan.options)
            if host.place.ranks is not None:
                options += ["--nproc-per-node", str(host.place.ranks)]
            if where:
                port = self._plan.master_port or str(first["port"])
                options += ["--nnodes", str(len(self._hosts)), "--node-rank", str(number)]
                options += ["--master-addr", where, "--master-port", port, "--rdzv-id", token]
                # All hosts start together, so a short timeout is enough. An option of the user
                # comes later and overrides it.
                options += ["--rdzv-conf", f"timeout={_MEET_SECONDS}"]
            host.start(
                arguments=[*options, *self._plan.command],
                key=self._plan.key.hex(),
                directory=os.getcwd(),
                environment=dict(self._plan.environment),
                name=host.place.name,
                patience=self._plan.stop_limit + _STOP_MARGIN,
            )

    def gather(self) -> Outcome:
        """Forward the output of the hosts until all have ended; return the outcome."""
        while any(host.started and not host.ended for host in self._hosts):
            self._step(show=True)
            if len(self._signals) > 1 or time.monotonic() > self._deadline:
                break
            if self._signals or self._is_time_to_stop():
                self._stop()
        return self._outcome()

    def close(self) -> None:
        """Close all connections; hosts that still have ranks stop them now."""
        for host in self._hosts:
            host.close(1.0 if host.ended else 0.0)
        self._selector.close()

    def _step(self, *, show: bool) -> None:
        if time.monotonic() > self._beat:
            self._beat = time.monotonic() + BEAT
            for host in self._hosts:
                host.send()
        events = self._selector.select(_TICK)
        for key, _ in events:
            messages = key.data.read(key.fd)
            if messages is None:
                self._selector.unregister(key.fd)
                continue
            for message in messages:
                if show:
                    self._show(key.data, message)
        ready = {key.fd for key, _ in events}
        for host in self._hosts:
            # stderr may stay open: ssh can leave a process behind that shares its connection.
            quiet = not ready.intersection(host.descriptors)
            if quiet and not host.ended and host.process.poll() is not None:
                self._lost[host] = host.trouble()
                host.ended = time.monotonic()

    def _show(self, host: Connection, message: dict[str, Any]) -> None:
        try:
            if message["kind"] == "output":
                text = message["text"].encode(errors="surrogateescape")
                self._sinks[message["stream"]].write(host, b"", text)
            elif message["kind"] == "said":
                line = f"[{host.place.name}] {message['line']}\n"
                self._sinks["stderr"].write(host, b"", line.encode())
        except OSError:  # the reader is gone, as in `phalanx run ... | head`
            if signal.SIGPIPE not in self._signals:  # so that it counts only once
                self._signals.append(signal.SIGPIPE)

    def _is_time_to_stop(self) -> bool:
        """Return whether the job must stop because a host has failed.

        If all failures so far are consequences of another one, their cause has `GRACE` seconds
        from the first of them to show.
        """
        bad = [host for host in self._hosts if host.ended and _code(host)]
        if not bad:
            return False
        cause = min(_distance(host) for host in bad)
        return not cause or time.monotonic() > min(host.ended for host in bad) + GRACE

    def _stop(self) -> None:
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._plan.stop_limit + _STOP_MARGIN
            # SIGPIPE is only recorded by `_show`; a launcher would not end because of it.
            number = next((each for each in self._signals if each in _SIGNALS), signal.SIGTERM)
            for host in self._hosts:
                if not host.ended:
                    host.stop(int(number))

    def _outcome(self) -> Outcome:
        """Return the outcome for the user, once all hosts have ended or been given up."""
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            return Outcome(128 + self._signals[0], f"stopped by {name}")
        bad = [host for host in self._hosts if not host.ended or _code(host)]
        if not bad:
            return Outcome(0)
        cause = min(bad, key=lambda host: (_distance(host), host.ended))
        end: Any = cause.end
        if end is None:
            words = self._lost.get(cause) or f"{cause.place.name} didn't end its ranks in time"
            return Outcome(1, "\n".join((str(words), *_others(cause, bad))))
        report = "\n".join((f"on {cause.place.name}: {end['report']}", *_others(cause, bad)))
        return Outcome(end["code"], report, end["explanation"])


def _code(host: Connection) -> int:
    return 1 if host.end is None else int(host.end["code"])


def _distance(host: Connection) -> int:
    if host.end is None:
        return STOPPED if host.stopped else 0
    return int(host.end["distance"])


def _others(cause: Connection, bad: Sequence[Connection]) -> Iterator[str]:
    stopped = [host.place.name for host in bad if host.ended and _distance(host) >= STOPPED]
    for host in bad:
        if host is not cause and host.place.name not in stopped:
            report = host.end["report"] if host.end else "the connection is gone"
            yield f"  after it, on {host.place.name}: {report.partition(chr(10))[0]}"[:200]
    if stopped:
        yield f"  stopped because of it: {', '.join(stopped)}"


def _compare(host: Connection, first: Connection) -> None:
    hello: Any = host.hello
    expected: Any = first.hello
    name = host.place.name
    if hello["phalanx"] != phalanx.__version__:
        raise LaunchError(
            f"{name} has Phalanx {hello['phalanx']}, this machine {phalanx.__version__}: install "
            "the same version everywhere, or name another Python with --remote-python"
        )
    if hello["torch"] is None:
        raise LaunchError(f"{hello['python']} on {name} has no torch: install it there")
    if hello["torch"] != expected["torch"]:
        raise LaunchError(
            f"{name} has torch {hello['torch']}, {first.place.name} {expected['torch']}: install "
            "the same version everywhere"
        )
