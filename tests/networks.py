"""Hosts on one machine: network and pid namespaces joined by a switch, with links of a given speed.

A process on one of these hosts cannot share memory with the others, and reaches them through its
link only. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["Network", "run"]

_LIMIT = 30
_networks = itertools.count()


class Network:
    """Hosts behind a switch; a context manager that removes them on exit.

    Args:
        hosts: The number of hosts.
        rate: The rate of each link in each direction, in `tc` syntax ("1gbit"); None for no limit.
        delay: The time of a packet from host to host, in seconds. With one, a process forwards the
            packets (`delayed_links`), the rate is needed, in "mbit", and the methods that change
            links do not work.
    """

    def __init__(self, hosts: int, rate: str | None = None, delay: float = 0.0) -> None:
        name = f"phx{os.getpid()}-{next(_networks)}"
        self.names = [f"{name}-{number}" for number in range(hosts)]
        self.addresses = [f"10.93.0.{number + 1}" for number in range(hosts)]
        self._switch = f"{name}-switch"
        self._rate, self._delay = rate, delay
        self._forwarder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | int | None = None,
        errors: IO[Any] | int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in new pid, IPC, mount and host name namespaces.

        When it ends or is killed, all processes that it has started are killed.
        """
        script = f'hostname {self.names[host]} && exec "$@"'
        unshare = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--uts"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *unshare, "sh", "-c", script, "sh", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
        )

    def disconnect(self, host: int) -> None:
        """Take a host's link down at the switch; the host gets no notification."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def reconnect(self, host: int) -> None:
        """Bring a host's link up again."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def shape(self, host: int, rate: str, burst: str = "128kb") -> None:
        """Limit the rate of a host's link in both directions; packets above `burst` are dropped."""
        self._shape(self.names[host], "eth0", rate, burst)
        self._shape(self._switch, f"port{host}", rate, burst)

    def block(self, host: int, other: int) -> None:
        """Make a host drop its packets to another host; the receiver gets no notification."""
        run("ip", "-n", self.names[host], "route", "add", "blackhole", self.addresses[other])

    def _build(self) -> None:
        if self._delay:
            self._build_delayed()
            return
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{number}"
            run("ip", "netns", "add", name)
            run(
                *("ip", "-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            for namespace, device in ((name, "eth0"), (self._switch, port)):
                if self._rate is not None:
                    self._shape(namespace, device, self._rate)

    def _build_delayed(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        bits = float((self._rate or "").removesuffix("mbit")) * 1e6
        pairs = map("=".join, zip(self.names, self.addresses, strict=True))
        command = [sys.executable, "-m", "tests.delayed_links", str(self._delay), str(bits), *pairs]
        self._forwarder = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )
        assert self._forwarder.stdout is not None
        if self._forwarder.stdout.readline() != "ready\n":
            raise OSError("the process that forwards packets has ended")

    def _shape(self, namespace: str, device: str, rate: str, burst: str = "128kb") -> None:
        # The default burst admits one or two packets of the kernel's largest size.
        run(
            *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
            *("rate", rate, "burst", burst, "latency", "20ms"),
        )

    def _remove(self) -> None:
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder.communicate()
        for name in (*self.names, self._switch):
            if Path("/run/netns", name).exists():
                with contextlib.suppress(subprocess.SubprocessError):
                    run("ip", "netns", "delete", name)


def run(*command: str) -> None:
    """Run a command; raise OSError with its stderr if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


def enter(name: str) -> None:
    """Move this thread, and the processes that it starts from now on, to a host's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", encoding="ascii") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:  # `os.setns` came with Python 3.12
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")
