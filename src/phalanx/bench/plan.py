"""The plan of a measurement, and parsers of its command-line options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from phalanx.bench.operations import STORAGE
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Plan:
    """The plan of a measurement.

    Attributes:
        operations: Names in OPERATIONS.
        dtypes: Names in STORAGE.
        sizes: Sizes in bytes, without duplicates.
        systems: Names in SYSTEMS.
        ranks: Number of processes of each system.
        rounds: Number of rounds for each result; None for as many as fit into `seconds`, but at
            least 5.
        seconds: Seconds for all rounds of a result, unless `rounds` is given.
        timeout: Seconds that the answer of a system may take.
        algorithms: Names in ALGORITHMS, to measure besides each system's own all_reduce.
    """

    operations: Sequence[str]
    dtypes: Sequence[str]
    sizes: Sequence[int]
    systems: Sequence[str]
    ranks: int = 2
    rounds: int | None = None
    seconds: float = 1.5
    timeout: float = 60.0
    algorithms: Sequence[str] = ()

    def variants(self, system: str) -> Iterator[Variant]:
        """Yield the variants of a system: its own implementation, then every algorithm."""
        for algorithm in ("", *self.algorithms):
            yield Variant(system, algorithm)


class Variant(NamedTuple):
    """The combination of a system and an algorithm, timed in a turn.

    Attributes:
        system: Name in SYSTEMS.
        algorithm: Name in ALGORITHMS; "" for the system's own implementation.
    """

    system: str
    algorithm: str = ""

    @property
    def label(self) -> str:
        """The name in a result, such as "gloo" or "gloo tree_all_reduce"."""
        return f"{self.system} {self.algorithm}".rstrip()


def parse_names(text: str, kind: str, known: Iterable[str]) -> list[str]:
    """Parse names such as "a,b"; "all" means all known names, in their order.

    Raises:
        UsageError: A name is unknown, or there is none.
    """
    known = list(known)
    names = [part.strip() for part in text.split(",") if part.strip()]
    if names == ["all"]:
        return known
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(
            f"{kind} {(unknown or [text])[0]!r} given, expected one or several of "
            f"{', '.join(known)}, or all"
        )
    return list(dict.fromkeys(names))


def parse_sizes(text: str, dtypes: Sequence[str]) -> list[int]:
    """Parse sizes such as "4,1KiB,64MiB"; return bytes in ascending order.

    Raises:
        UsageError: A size is malformed, or no multiple of the size of the largest element.
    """
    sizes = set()
    itemsize, dtype = max((STORAGE[dtype].itemsize, dtype) for dtype in dtypes)
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", part.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise UsageError(f"size {part!r} given, expected bytes such as 4, 16KiB or 64MiB")
        size = int(match[1]) * _UNITS[match[2]]
        if size < itemsize or size % itemsize:
            raise UsageError(
                f"size {part!r} given, expected a multiple of {itemsize} bytes ({dtype})"
            )
        sizes.add(size)
    return sorted(sizes)


def parse_rank_counts(text: str, *, several: bool) -> list[int]:
    """Parse rank counts: "4", or "2,3,4" if `several`; return each once, in ascending order.

    Raises:
        UsageError: A part is no number from 2 to 64, or there are several without `several`.
    """
    counts = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 2 <= int(part) <= 64:
            raise UsageError(f"--nproc-per-node {text!r} given, expected a number from 2 to 64")
        counts.add(int(part))
    if len(counts) > 1 and not several:
        raise UsageError(
            f"--nproc-per-node {text!r} given, expected one number: several need --algorithms"
        )
    return sorted(counts)


def format_size(size: int) -> str:
    """Return a size with its unit, such as "256 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
