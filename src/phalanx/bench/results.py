"""The results of a measurement: medians, quartiles, the memory limit, and their storage."""

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

__all__ = [
    "Report",
    "Result",
    "Timing",
    "as_json",
    "parse_report",
    "read",
    "read_document",
    "write",
]

_FORMAT = "phalanx bench 3"


@dataclass(frozen=True)
class Timing:
    """The time of one operation, in seconds.

    Attributes:
        median: Median over the rounds.
        low: Lower quartile.
        high: Upper quartile.
        rounds: Number of rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarize the times of the rounds, at least two."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True)
class Result:
    """The timings of all systems for an operation with one dtype and size.

    Attributes:
        operation: Name of the operation.
        dtype: Name of the dtype.
        size: Requested size in bytes; 0 for a barrier.
        bytes: Bytes of the largest buffer: `size`, rounded up to whole elements and equal parts.
        traffic: Bytes that the memory must read and write, over all ranks.
        cached: Whether all buffers together take less than twice the size of the caches, so that
            memory bandwidth is no limit.
        limit: Seconds that the memory needs for the traffic; None for a barrier.
        timings: Timings by system, without systems that lack the operation.
    """

    operation: str
    dtype: str
    size: int
    bytes: int
    traffic: int
    cached: bool
    limit: float | None
    timings: dict[str, Timing]

    def speedup(self, system: str, baselines: Sequence[str]) -> float | None:
        """Return how many times faster a system is than the fastest baseline; None if unknown."""
        times = [
            self.timings[baseline].median for baseline in baselines if baseline in self.timings
        ]
        if system not in self.timings or not times:
            return None
        return min(times) / self.timings[system].median

    def speedup_over_mpi(self, system: str) -> float | None:
        """Return how many times faster a system is than the faster MPI; None if unknown."""
        return self.speedup(system, MPI)

    def bandwidth_fraction(self, system: str) -> float | None:
        """Return the fraction of the memory bandwidth that a system reaches.

        None if the operation has no limit, the result is `cached`, or there is no timing.
        """
        if self.limit is None or self.cached or system not in self.timings:
            return None
        return self.limit / self.timings[system].median


@dataclass
class Report:
    """The report of a run.

    Attributes:
        command: Command line of the run.
        date: Start of the run, in UTC.
        machine: Properties of the machine: processor, caches, memory.
        versions: Versions of packages and libraries.
        settings: Settings of the run and of each system.
        bandwidth: Memory bandwidth in bytes per second, reads plus writes, by method.
        results: Results in the order of measurement.
        notes: Descriptions of missing results, with reasons.
        wrong: Descriptions of wrong results.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    bandwidth: dict[str, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """The memory bandwidth in bytes per second, of the fastest method."""
        return max(self.bandwidth.values())


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object; times are in seconds, sizes in bytes."""
    return {"format": _FORMAT, "unit": "seconds", **asdict(report)}


def write(report: Report, path: Path) -> None:
    """Store a report as JSON."""
    path.write_text(json.dumps(as_json(report), indent=1) + "\n")


def read(path: Path) -> Report:
    """Load what `write` stored.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    return parse_report(read_document(path, _FORMAT, "phalanx bench --output"))


def read_document(path: Path, wanted: str, command: str) -> dict[str, Any]:
    """Load a JSON document, without the names of its format and unit.

    Args:
        path: Path of the file.
        wanted: Expected format.
        command: Command that writes such files, for the error message.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read {path}: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != wanted:
        raise UsageError(
            f"{path} has the format {found!r}, expected {wanted!r}: measure again with {command}"
        )
    del document["format"], document["unit"]
    return dict(document)


def parse_report(document: dict[str, Any]) -> Report:
    """Create a report from its JSON object."""
    results = [_parse_result(entry) for entry in document.pop("results")]
    return Report(**document, results=results)


def _parse_result(entry: dict[str, Any]) -> Result:
    timings = {name: Timing(**timing) for name, timing in entry.pop("timings").items()}
    return Result(**entry, timings=timings)
