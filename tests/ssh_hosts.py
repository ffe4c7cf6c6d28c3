"""Hosts that can be reached by ssh: a real sshd in each of several network namespaces.

Needs root, iproute2, and OpenSSH's server and client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.networks import Network

__all__ = ["MISSING", "SshHosts"]

MISSING = [
    program
    for program in ("ip", "unshare", "ssh", "ssh-keygen", "sshd")
    if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
_PORT = 2222
_LIMIT = 30

_SERVER = """\
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {keys}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication yes
PrintMotd no
"""
_CLIENT = """\
Host node-*
    Port {port}
    User root
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    LogLevel ERROR
Host node-* !node-locked
    IdentityFile {folder}/user
"""


class SshHosts:
    """The ssh servers on the hosts of a network; a context manager that stops them on exit.

    The file `config`, for `ssh -F`, names the hosts `node-0`, `node-1`, ... and some unusable ones:
    `node-locked` requires a password, `node-stranger` has an unknown host key, `node-closed` has no
    sshd, and `node-gone` does not exist.

    Args:
        network: The network.
        folder: A folder for keys and configurations.
        count: The number of hosts that have an sshd.
        hidden: A directory that is empty on the last of these hosts.
    """

    def __init__(self, network: Network, folder: Path, count: int, hidden: Path) -> None:
        self.network, self.folder, self.count = network, folder, count
        self.config = folder / "config"
        self._hidden = hidden
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> SshHosts:
        try:
            self._write()
            for host in range(self.count):
                self._serve(host)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def ssh(self) -> str:
        """The value for `phalanx run --ssh`."""
        return f"ssh -F {self.config}"

    def processes(self, words: str) -> list[psutil.Process]:
        """Return the processes on the hosts whose command lines contain `words`."""
        namespaces = set()
        for child in (child for server in self._servers for child in _children(server)):
            with contextlib.suppress(OSError):  # it has just ended
                namespaces.add(_pid_namespace(child.pid))
        found = []
        for process in psutil.process_iter():
            try:
                if _pid_namespace(process.pid) in namespaces and words in " ".join(
                    process.cmdline()
                ):
                    found.append(process)
            except (psutil.Error, OSError):  # it has just ended
                continue
        return found

    def _write(self) -> None:
        for name in ("host", "user", "other"):
            path = self.folder / name
            command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))
            subprocess.run(command, check=True, timeout=_LIMIT)
        addresses = self.network.addresses
        lines = [_CLIENT.format(port=_PORT, folder=self.folder)]
        nodes = {f"node-{number}": address for number, address in enumerate(addresses)}
        nodes |= dict.fromkeys(("node-locked", "node-stranger", "node-closed"), addresses[0])
        nodes["node-gone"] = "10.93.0.99"
        lines += [f"Host {name}\n    HostName {address}\n" for name, address in nodes.items()]
        # The first value of an option applies, so the exceptions come first.
        lines.insert(0, f"Host node-stranger\n    UserKnownHostsFile {self.folder}/nobody\n")
        lines.insert(0, f"Host node-locked\n    IdentityFile {self.folder}/other\n")
        lines.insert(0, f"Host node-closed\n    Port {_PORT + 1}\n")
        self.config.write_text("".join(lines))
        key = (self.folder / "host.pub").read_text()
        known = [f"[{address}]:{port} {key}" for address in addresses for port in (_PORT, 22)]
        (self.folder / "known").write_text("".join(known))
        server = _SERVER.format(port=_PORT, folder=self.folder, keys=self.folder / "user.pub")
        (self.folder / "server").write_text(server)
        Path("/run/sshd").mkdir(exist_ok=True)

    def _serve(self, host: int) -> None:
        sshd: Sequence[str] = ("/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "server"))
        if host == self.count - 1:
            hide = f'mount -t tmpfs none {self._hidden} && exec "$@"'
            sshd = ("sh", "-c", hide, "sh", *sshd)
        with (self.folder / f"sshd-{host}").open("w") as log:
            self._servers.append(self.network.start(host, sshd, output=log))
        end = time.monotonic() + _LIMIT
        while not self._listens(host):
            assert time.monotonic() < end, (self.folder / f"sshd-{host}").read_text()
            time.sleep(0.02)

    def _listens(self, host: int) -> bool:
        command = (
            "ip",
            "netns",
            "exec",
            self.network.names[host],
            "ss",
            "-Hltn",
            f"sport = {_PORT}",
        )
        result = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True)
        return str(_PORT) in result.stdout

    def _end(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()


def _children(server: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


def _pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")
