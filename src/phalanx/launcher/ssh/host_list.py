"""Parsing of `--hosts`: the hosts of a job and the number of ranks on each."""

import re
from dataclasses import dataclass

from phalanx.errors import UsageError

__all__ = ["HostPlace", "parse_hosts"]

_HOST = re.compile(
    r"(?P<user>[^\s@:,\[\]-][^\s@:,\[\]]*@)?"
    r"(\[(?P<address>[0-9A-Fa-f:.]+(%\w+)?)\]|(?P<name>[^\s@:,\[\]-][^\s@:,\[\]]*))"
    r"(:(?P<ranks>[^:]*))?"
)
_EXPECTED = "expected HOST or HOST:RANKS, separated by commas, like node-a:2,me@node-b:2,[fd00::1]"


@dataclass(frozen=True)
class HostPlace:
    """A host of the job.

    Attributes:
        target: The destination for ssh, for example `user@node-a`.
        ranks: The number of ranks on the host; None for the value of `--nproc-per-node`.
    """

    target: str
    ranks: int | None

    @property
    def name(self) -> str:
        """The host name or address, without the user."""
        return self.target.rpartition("@")[2]


def parse_hosts(text: str) -> list[HostPlace]:
    """Parse the value of `--hosts`: hosts separated by commas, or `@FILE` with one host per line.

    In a file, `#` begins a comment, and `slots=2` means `:2`, as in an MPI hostfile.

    Raises:
        UsageError: There is no host, a host is invalid or given twice, or the file cannot be read.
    """
    parts = _lines(text[1:]) if text.startswith("@") else text.split(",")
    places = [_parse(part.strip(), text) for part in parts]
    seen: set[str] = set()
    for place in places:
        if place.target in seen:
            raise UsageError(
                f"--hosts is {text!r}: {place.target} comes twice; give it once, with all its ranks"
            )
        seen.add(place.target)
    return places


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise UsageError(f"--hosts is '@{path}': can't read that file: {reason}") from None
    if not any(lines):
        raise UsageError(f"--hosts is '@{path}': there is no host in that file")
    return [re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line]


def _parse(part: str, text: str) -> HostPlace:
    found = _HOST.fullmatch(part)
    if found is None:
        raise UsageError(f"--hosts is {text!r}: {part!r} is no host; {_EXPECTED}")
    ranks = found["ranks"]
    if ranks is not None and not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise UsageError(
            f"--hosts is {text!r}: {part!r} has {ranks!r} for its ranks; expected an integer, at "
            "least 1"
        )
    target = (found["user"] or "") + (found["address"] or found["name"])
    return HostPlace(target, None if ranks is None else int(ranks))
