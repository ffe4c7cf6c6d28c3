"""The plan of a job over many hosts, made from the options of `phalanx run --hosts`."""

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
from phalanx.launcher.ssh.host_list import HostSpec, parse_hosts

__all__ = ["HOST_OPTIONS", "Plan", "make_plan"]

HOST_OPTIONS = ("hosts", "export", "ssh", "remote_python")
"""The names of the options that only a job over many hosts has."""

_REPLACED_OPTIONS = ("master_addr", "master_port", "key_file", "key_fd")
_STOP_TIMEOUT = 10.0
# These variables are specific to one machine or one process.
_NOT_FORWARDED = {
    "PHALANX_ADVERTISE_ADDR",
    "PHALANX_HOST_ID",
    "PHALANX_JOB",
    "PHALANX_KEY_FD",
    "PHALANX_KEY_FILE",
}


@dataclass(frozen=True)
class Plan:
    """The parameters of a job over many hosts.

    Attributes:
        hosts: The hosts, in the order in which their ranks are numbered.
        options: The options of `phalanx run` for every host.
        command: The other options of torchrun, the script and its arguments.
        environment: The environment variables that the ranks on every host get.
        ssh: The ssh program and its options.
        python: The path of the Python interpreter on the hosts.
        master_addr: The rendezvous address; empty for the address of the first host.
        master_port: The rendezvous port; empty for a free port.
        stop_timeout: Seconds that ranks may take to exit when they are stopped.
        key: The job's key.
    """

    hosts: Sequence[HostSpec]
    options: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str]
    ssh: Sequence[str]
    python: str
    master_addr: str
    master_port: str
    stop_timeout: float
    key: bytes = field(repr=False)


def make_plan(
    hosts: str,
    all_options: Mapping[str, str | None],
    options: Sequence[str],
    command: Sequence[str],
    *,
    export: Sequence[str] = (),
    ssh: str | None = None,
    python: str | None = None,
) -> Plan:
    """Parse the options of a job over many hosts.

    Args:
        hosts: The value of `--hosts`.
        all_options: All options of `phalanx run` by name; None for an option that is not given.
        options: The given options that are not in `HOST_OPTIONS`, as a command line.
        command: The rest of the command line.
        export: Variables for the ranks, each as `NAME` or `NAME=VALUE`.
        ssh: The ssh program and its options, in shell syntax; None for `ssh`.
        python: The path of the interpreter on the hosts; None for the path of this one.

    Raises:
        UsageError: An option is invalid, or this machine has no ssh.
    """
    for name in ("nnodes", "node_rank", "rdzv_endpoint"):
        if all_options.get(name) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--hosts determines the hosts of the job: omit --{option}")
    return Plan(
        parse_hosts(hosts),
        _remove_replaced(options),
        command,
        _environment(export, os.environ),
        parse_ssh_command(ssh or "ssh"),
        python or sys.executable,
        all_options.get("master_addr") or "",
        all_options.get("master_port") or "",
        _parse_seconds(all_options.get("shutdown_timeout")),
        _read_key(all_options),
    )


def _remove_replaced(options: Sequence[str]) -> list[str]:
    """Return the options without those that the launcher sets for each host, and their values."""
    replaced = {f"--{name.replace('_', '-')}" for name in _REPLACED_OPTIONS}
    return [
        word
        for number, word in enumerate(options)
        if word not in replaced and (number == 0 or options[number - 1] not in replaced)
    ]


def _environment(export: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the Phalanx variables that apply to every host, and those that the user exports."""
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith("PHALANX_") and name not in _NOT_FORWARDED
    }
    if _is_address(variables.get("PHALANX_INTERFACE", "")):  # an address of this machine only
        del variables["PHALANX_INTERFACE"]
    for text in export:
        name, separator, value = text.partition("=")
        if not name or any(letter.isspace() for letter in name):
            raise UsageError(f"--export is {text!r}: expected NAME or NAME=VALUE")
        if not separator and name not in environ:
            raise UsageError(
                f"--export is {text!r}, which is not set here: set it, or give NAME=VALUE"
            )
        variables[name] = value if separator else environ[name]
    return variables


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip())
    except ValueError:
        return False
    return True


def parse_ssh_command(text: str, option: str = "--hosts") -> list[str]:
    """Split the value of `--ssh` into words.

    Args:
        text: The command in shell syntax.
        option: The name of the option that needs ssh, for the error message.

    Raises:
        UsageError: The value cannot be parsed, or there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--ssh is {text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise UsageError(
            f"there is no program {program!r}: {option} needs OpenSSH's client (the package "
            "openssh-client or openssh-clients); install it, or name another program with --ssh"
        )
    return words


def _read_key(all_options: Mapping[str, str | None]) -> bytes:
    if all_options.get("key_fd") is not None:
        raise UsageError("--hosts sends the job's key to the hosts by itself: omit --key-fd")
    path = all_options.get("key_file")
    return secrets.token_bytes(keys.SIZE) if path is None else keys.from_file(path)


def _parse_seconds(text: str | None) -> float:
    try:
        return _STOP_TIMEOUT if text is None else float(text)
    except ValueError:
        raise UsageError(f"--shutdown-timeout is {text!r}: expected seconds") from None
