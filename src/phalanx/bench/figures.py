"""The results: medians and quartiles, the limit, and how they are stored."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.bench.systems import MPI
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Figure", "Report", "Timing", "document_of", "read", "report_of", "write"]

_FORMAT = "phalanx bench 2"


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation.

    Attributes:
        median: Over the rounds.
        low: Lower quartile.
        high: Upper quartile.
        rounds: How many there were.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the rounds, at least two."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True)
class Figure:
    """All systems' timings of an operation with one dtype and size.

    Attributes:
        operation: Its name.
        dtype: Of the elements.
        size: Bytes asked for; 0 for a barrier.
        bytes: Bytes of the largest buffer: `size`, made whole elements for every rank.
        traffic: Bytes that memory has to move for it, read and written, over all ranks.
        cached: The buffers fit the caches together, so the memory's speed is no limit.
        limit: Seconds that memory needs for the traffic; None for a barrier.
        timings: By system; those that lack the operation are left out.
    """

    operation: str
    dtype: str
    size: int
    bytes: int
    traffic: int
    cached: bool
    limit: float | None
    timings: dict[str, Timing]

    def ratio(self, system: str, rivals: Sequence[str]) -> float | None:
        """How many times faster a system is than the fastest of the rivals; None if not known."""
        times = [self.timings[rival].median for rival in rivals if rival in self.timings]
        if system not in self.timings or not times:
            return None
        return min(times) / self.timings[system].median

    def over_mpi(self, system: str) -> float | None:
        """How many times faster a system is than the better MPI."""
        return self.ratio(system, MPI)

    def reached(self, system: str) -> float | None:
        """The part of the memory's speed that a system reaches; None where that says nothing."""
        if self.limit is None or self.cached or system not in self.timings:
            return None
        return self.limit / self.timings[system].median


@dataclass
class Report:
    """Everything about one run.

    Attributes:
        command: The command line.
        date: When it began, UTC.
        machine: Processor, caches, memory.
        versions: Of every package and library.
        settings: Of the run, and of each system.
        bandwidth: Bytes a second that the memory moves, read and written, by method.
        figures: In the order of measuring.
        notes: What is missing, and why.
        wrong: Results that were not the expected ones.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    bandwidth: dict[str, float] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """The memory's bytes a second: what the best method reached."""
        return max(self.bandwidth.values())


def write(report: Report, path: Path) -> None:
    """Store a report as JSON; times are in seconds, sizes in bytes."""
    document = {"format": _FORMAT, "unit": "seconds", **asdict(report)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> Report:
    """Load what `write` stored.

    Raises:
        UsageError: the file can't be read, or holds something else.
    """
    return report_of(document_of(path, _FORMAT, "phalanx bench --json"))


def document_of(path: Path, wanted: str, command: str) -> dict[str, Any]:
    """What a file holds besides the name of its format.

    Args:
        path: of the file.
        wanted: the format that it must have.
        command: what writes such files.

    Raises:
        UsageError: the file can't be read, or has another format.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read {path}: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != wanted:
        raise UsageError(
            f"{path} has the format {found!r}, expected {wanted!r}: record it again with {command}"
        )
    del document["format"], document["unit"]
    return dict(document)


def report_of(document: dict[str, Any]) -> Report:
    """A report from its JSON."""
    figures = [_figure(entry) for entry in document.pop("figures")]
    return Report(**document, figures=figures)


def _figure(entry: dict[str, Any]) -> Figure:
    timings = {name: Timing(**timing) for name, timing in entry.pop("timings").items()}
    return Figure(**entry, timings=timings)
