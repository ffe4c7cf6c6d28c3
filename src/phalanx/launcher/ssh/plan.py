"""The plan of a job over many hosts, made from `--hosts` and the other options of `phalanx run`."""

import ipaddress
import os
import re
import secrets
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx import key as keys
from phalanx.system.ssh import parse_ssh_command
from phalanx.torch_sources import shutdown_timeout
from phalanx.usage_errors import UsageError

HOST_OPTIONS = ("hosts", "export", "ssh", "remote_python")
"""The names of the options that only a job over many hosts has."""

STOP_TIMEOUT = 10
"""The default seconds between SIGTERM and SIGKILL; --shutdown-timeout overrides it."""

REPLACED_OPTIONS = ("master_addr", "master_port", "key_file", "key_fd")
"""The names of the options that the launcher sets for each host."""

# These variables are specific to one machine or one process.
_NOT_FORWARDED = {
    "PHALANX_ADVERTISE_ADDR",
    "PHALANX_HOST_ID",
    "PHALANX_JOB",
    "PHALANX_KEY_FD",
    "PHALANX_KEY_FILE",
}
_HOST = re.compile(
    r"(?P<user>[^\s@:,\[\]-][^\s@:,\[\]]*@)?"
    r"(\[(?P<address>[0-9A-Fa-f:.]+(%\w+)?)\]|(?P<name>[^\s@:,\[\]-][^\s@:,\[\]]*))"
    r"(:(?P<nprocs>[^:]*))?"
)
_EXPECTED = "expected HOST or HOST:RANKS, separated by commas, like node-a:2,me@node-b:2,[fd00::1]"


@dataclass(frozen=True)
class HostSpec:
    """A host of the job.

    Attributes:
        target: The destination for ssh, for example `user@node-a`.
        nprocs: The number of ranks on the host; None for the value of `--nproc-per-node`.
    """

    target: str
    nprocs: int | None

    @property
    def name(self) -> str:
        """The host name or address, without the user."""
        return self.target.rpartition("@")[2]


@dataclass(frozen=True)
class Plan:
    """The parameters of a job over many hosts.

    Attributes:
        hosts: The hosts, in the order in which their ranks are numbered.
        options: The options of `phalanx run` for every host.
        command: The script and its arguments.
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


def make_plan(args: Namespace, options: Sequence[str]) -> Plan:
    """Check the arguments of a job over many hosts, and make its plan.

    Args:
        args: The arguments of `phalanx run`, with `hosts`.
        options: The options for every host, as returned by `options.as_words`.

    Raises:
        UsageError: An option is invalid, or this machine has no ssh.
    """
    hosts = parse_hosts(args.hosts)
    for name in ("nnodes", "node-rank", "rdzv-endpoint"):
        if any(word.startswith(f"--{name}=") for word in options):
            raise UsageError(f"--hosts determines the hosts of the job: omit --{name}")
    timeout = shutdown_timeout(args, STOP_TIMEOUT)
    return Plan(
        hosts,
        options,
        [args.training_script, *args.training_script_args],
        _environment(args.export or (), os.environ),
        parse_ssh_command(args.ssh or "ssh"),
        args.remote_python or sys.executable,
        args.master_addr or "",
        str(args.master_port or ""),
        STOP_TIMEOUT if timeout is None else timeout,
        _read_key(args),
    )


def parse_hosts(text: str) -> list[HostSpec]:
    """Parse the value of `--hosts`: hosts separated by commas, or `@FILE` with one host per line.

    In a file, `#` begins a comment, and `slots=2` means `:2`, as in an MPI hostfile.

    Raises:
        UsageError: There is no host, a host is invalid or given twice, or the file cannot be read.
    """
    parts = _read_lines(text[1:]) if text.startswith("@") else text.split(",")
    hosts = [_parse_host(part.strip(), text) for part in parts]
    seen: set[str] = set()
    for host in hosts:
        if host.target in seen:
            raise UsageError(
                f"--hosts is {text!r}: {host.target} is given twice; give it once, with all ranks"
            )
        seen.add(host.target)
    return hosts


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--hosts is '@{path}': can't read the file: {reason}") from None
    if not any(lines):
        raise UsageError(f"--hosts is '@{path}': the file lists no host")
    return [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]


def _parse_host(part: str, text: str) -> HostSpec:
    match = _HOST.fullmatch(part)
    if match is None:
        raise UsageError(f"--hosts is {text!r}: {part!r} is not a host; {_EXPECTED}")
    nprocs = match["nprocs"]
    if nprocs is not None and not (nprocs.isascii() and nprocs.isdigit() and int(nprocs) > 0):
        raise UsageError(
            f"--hosts is {text!r}: {part!r} has {nprocs!r} as its number of ranks; expected an "
            "integer, at least 1"
        )
    target = (match["user"] or "") + (match["address"] or match["name"])
    return HostSpec(target, None if nprocs is None else int(nprocs))


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


def _read_key(args: Namespace) -> bytes:
    if args.key_fd is not None:
        raise UsageError("--hosts sends the job's key to the hosts by itself: omit --key-fd")
    path = args.key_file
    return secrets.token_bytes(keys.SIZE) if path is None else keys.from_file(path)
