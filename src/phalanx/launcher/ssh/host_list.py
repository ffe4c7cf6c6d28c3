"""Parsing of `--hosts`: the hosts of a job and the number of ranks on each."""

import re
from dataclasses import dataclass

from phalanx.errors import UsageError

__all__ = ["HostSpec", "parse_hosts"]

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


def parse_hosts(text: str) -> list[HostSpec]:
    """Parse the value of `--hosts`: hosts separated by commas, or `@FILE` with one host per line.

    In a file, `#` begins a comment, and `slots=2` means `:2`, as in an MPI hostfile.

    Raises:
        UsageError: There is no host, a host is invalid or given twice, or the file cannot be read.
    """
    parts = _lines(text[1:]) if text.startswith("@") else text.split(",")
    hosts = [_parse(part.strip(), text) for part in parts]
    seen: set[str] = set()
    for host in hosts:
        if host.target in seen:
            raise UsageError(
                f"--hosts is {text!r}: {host.target} is given twice; give it once, with all ranks"
            )
        seen.add(host.target)
    return hosts


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--hosts is '@{path}': can't read the file: {reason}") from None
    if not any(lines):
        raise UsageError(f"--hosts is '@{path}': the file lists no host")
    return [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]


def _parse(part: str, text: str) -> HostSpec:
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
