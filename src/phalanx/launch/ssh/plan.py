"""What `phalanx run --hosts` is to do, from its options."""

import ipaddress
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launch.ssh.places import HostPlace, parse_hosts

__all__ = ["OPTIONS", "Plan", "make_plan"]

OPTIONS = ("hosts", "export", "ssh", "remote_python")
"""The options that are for this alone."""

_OURS = ("master_addr", "master_port", "key_file", "key_fd")
_STOP_LIMIT = 10.0
# What holds for one machine, or for one process.
_NOT_FORWARDED = {
    "PHALANX_ADVERTISE_ADDR",
    "PHALANX_HOST_ID",
    "PHALANX_JOB",
    "PHALANX_KEY_FD",
    "PHALANX_KEY_FILE",
}


@dataclass(frozen=True)
class Plan:
    """What to run where.

    Attributes:
        places: the hosts; ranks are numbered one host after the other.
        options: of `phalanx run`, for every host.
        command: torchrun's other options, the script and its arguments.
        environment: variables that the ranks get on every host.
        ssh: the program and its options.
        python: the interpreter on the hosts.
        master_addr: where the ranks meet; empty for the first host's address.
        master_port: the port there; empty for a free one.
        stop_limit: seconds that ranks may take to end when they are stopped.
        key: the job's.
    """

    places: Sequence[HostPlace]
    options: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str]
    ssh: Sequence[str]
    python: str
    master_addr: str
    master_port: str
    stop_limit: float
    key: bytes = field(repr=False)


def make_plan(
    hosts: str,
    given: Mapping[str, str | None],
    options: Sequence[str],
    command: Sequence[str],
    *,
    export: Sequence[str] = (),
    ssh: str | None = None,
    python: str | None = None,
) -> Plan:
    """Read the options of a job over many hosts.

    Args:
        hosts: what `--hosts` says.
        given: all options of `phalanx run` by their names; None where one isn't given.
        options: those of them that aren't `OPTIONS`, as a command line.
        command: what follows them.
        export: `NAME`, or `NAME=VALUE`, of variables for the ranks.
        ssh: the program and its options, as a shell would read them; None for `ssh`.
        python: the interpreter on the hosts; None for the path of this one.

    Raises:
        UsageError: one of them makes no sense, or there is no ssh here.
    """
    for name in ("nnodes", "node_rank", "rdzv_endpoint"):
        if given.get(name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--hosts says which hosts there are: leave --{option} out")
    return Plan(
        parse_hosts(hosts),
        _without_ours(options),
        command,
        _environment(export, os.environ),
        ssh_command(ssh or "ssh"),
        python or sys.executable,
        given.get("master_addr") or "",
        given.get("master_port") or "",
        _seconds(given.get("shutdown_timeout")),
        _key(given),
    )


def _without_ours(options: Sequence[str]) -> list[str]:
    """Leave out the options, each followed by its value, that every host gets from us."""
    ours = {f"--{name.replace('_', '-')}" for name in _OURS}
    return [
        word
        for number, word in enumerate(options)
        if word not in ours and (number == 0 or options[number - 1] not in ours)
    ]


def _environment(export: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of Phalanx that hold on every host, and those that the user names."""
    found = {
        name: value
        for name, value in environ.items()
        if name.startswith("PHALANX_") and name not in _NOT_FORWARDED
    }
    if _is_address(found.get("PHALANX_INTERFACE", "")):  # of this machine
        del found["PHALANX_INTERFACE"]
    for text in export:
        name, given, value = text.partition("=")
        if not name or any(letter.isspace() for letter in name):
            raise UsageError(f"--export is {text!r}: expected NAME or NAME=VALUE")
        if not given and name not in environ:
            raise UsageError(
                f"--export is {text!r}, which isn't set here: set it, or give NAME=VALUE"
            )
        found[name] = value if given else environ[name]
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip())
    except ValueError:
        return False
    return True


def ssh_command(text: str, option: str = "--hosts") -> list[str]:
    """The words of `--ssh`.

    Args:
        text: as a shell would read it.
        option: what needs it, for the message.

    Raises:
        UsageError: there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh is {text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise UsageError(
            f"there is no program {program!r}: {option} needs OpenSSH's client (the package "
            "openssh-client or openssh-clients), or name another one with --ssh"
        )
    return words


def _key(given: Mapping[str, str | None]) -> bytes:
    if given.get("key_fd") is not None:
        raise UsageError("--hosts brings the job's key to the hosts by itself: leave --key-fd out")
    path = given.get("key_file")
    return secrets.token_bytes(keys.SIZE) if path is None else keys.from_file(path)


def _seconds(text: str | None) -> float:
    try:
        return _STOP_LIMIT if text is None else float(text)
    except ValueError:
        raise UsageError(f"--shutdown-timeout is {text!r}: expected seconds") from None
