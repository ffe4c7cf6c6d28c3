"""What to measure, read from the words of the command line and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from phalanx.bench.elements import STORAGE
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Contender", "Plan", "label_of", "names_of", "ranks_of", "sizes_of"]

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        operations: Names in OPERATIONS.
        dtypes: Names in STORAGE.
        sizes: Bytes, each once.
        systems: Names in SYSTEMS.
        ranks: Processes of each system.
        rounds: How many for each figure; None for as many as fit `seconds`, at least 5.
        seconds: For all rounds of a figure, unless `rounds` is given.
        timeout: Seconds that a system's answer may take.
        algorithms: Names in ALGORITHMS, to measure beside each system's own all_reduce.
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

    def contenders_of(self, system: str) -> Iterator[Contender]:
        """What takes turns on the processes of a system: its own way, and every algorithm."""
        for algorithm in ("", *self.algorithms):
            yield Contender(system, algorithm)


class Contender(NamedTuple):
    """What is timed in a turn.

    Attributes:
        system: Name in SYSTEMS.
        algorithm: Name in ALGORITHMS; "" for the system's own way.
    """

    system: str
    algorithm: str = ""

    @property
    def label(self) -> str:
        """Its name in a figure: "gloo", or "gloo tree_all_reduce"."""
        return f"{self.system} {self.algorithm}".rstrip()


def names_of(text: str, what: str, known: Iterable[str]) -> list[str]:
    """Read "a,b"; "all" is everything known, in its order.

    Raises:
        UsageError: a name that isn't known, or none at all.
    """
    known = list(known)
    given = [part.strip() for part in text.split(",") if part.strip()]
    if given == ["all"]:
        return known
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise UsageError(
            f"{what} {(unknown or [text])[0]!r} given, expected one or several of "
            f"{', '.join(known)}, or all"
        )
    return list(dict.fromkeys(given))


def sizes_of(text: str, dtypes: Sequence[str]) -> list[int]:
    """Read "4,1KiB,64MiB" as bytes, in ascending order.

    Raises:
        UsageError: no size, or one that isn't a multiple of an element's.
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


def ranks_of(text: str, *, several: bool) -> list[int]:
    """Read "4", or "2,3,4" where there may be several; each once, in ascending order.

    Raises:
        UsageError: no numbers from 2 to 64, or several where there is one.
    """
    counts = set()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 2 <= int(part) <= 64:
            raise UsageError(f"ranks {text!r} given, expected a number from 2 to 64")
        counts.add(int(part))
    if len(counts) > 1 and not several:
        raise UsageError(f"ranks {text!r} given, expected one number: several need --algorithms")
    return sorted(counts)


def label_of(size: int) -> str:
    """A size in words: "256 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
