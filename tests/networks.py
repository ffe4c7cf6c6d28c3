"""Hosts of one machine: network and pid namespaces joined by a switch, with links of a given speed.

What runs in one of them shares no memory with the others that it could prove, and reaches them by
its link alone. Needs root, and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["Network", "run"]

_LIMIT = 30
_networks = itertools.count()


class Network:
    """Some hosts behind a switch; a context manager that takes them down again.

    Args:
        hosts: How many.
        rate: Of each link in each direction, as `tc` has it ("1gbit"); None for no limit.
    """

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        name = f"phx{os.getpid()}-{next(_networks)}"
        self.names = [f"{name}-{number}" for number in range(hosts)]
        self.addresses = [f"10.93.0.{number + 1}" for number in range(hosts)]
        self._switch = f"{name}-switch"
        self._rate = rate

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
        """Start a command on a host, in pid, IPC, mount and host name namespaces of its own.

        When it ends, or is killed, all that it started is killed with it.
        """
        inside = f'hostname {self.names[host]} && exec "$@"'
        apart = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--uts"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *apart, "sh", "-c", inside, "sh", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
        )

    def cut(self, host: int) -> None:
        """Take a host's link down, at the switch: nobody is told."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Take a host's link up again."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def shape(self, host: int, rate: str, burst: str = "128kb") -> None:
        """Give a host's link another rate, in both directions; larger packets than `burst` drop."""
        self._shape(self.names[host], "eth0", rate, burst)
        self._shape(self._switch, f"port{host}", rate, burst)

    def block(self, host: int, other: int) -> None:
        """Have a host drop what it sends to another one; who waits for it is told nothing."""
        run("ip", "-n", self.names[host], "route", "add", "blackhole", self.addresses[other])

    def _build(self) -> None:
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
            for where, device in ((name, "eth0"), (self._switch, port)):
                if self._rate is not None:
                    self._shape(where, device, self._rate)

    def _shape(self, namespace: str, device: str, rate: str, burst: str = "128kb") -> None:
        # A burst is what may pass at once: one packet of the kernel's own size, or two.
        run(
            *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
            *("rate", rate, "burst", burst, "latency", "20ms"),
        )

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            if Path("/run/netns", name).exists():
                with contextlib.suppress(subprocess.SubprocessError):
                    run("ip", "netns", "delete", name)


def run(*command: str) -> None:
    """Run a command to its end; an `OSError` with its words if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    if ended.returncode != 0:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip()}")


def enter(name: str) -> None:
    """Have this thread, and what it starts from now on, be on a host, as the network sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", encoding="ascii") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:  # `os.setns` came with Python 3.12
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")
