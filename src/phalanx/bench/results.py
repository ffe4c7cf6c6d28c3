"""The results of a measurement: medians, quartiles, the memory limit, and their storage."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMATS = {False: "phalanx bench 3", True: "phalanx bench algorithms 2"}
"""Formats of files: of one report, and of the reports of `phalanx bench --algorithms`."""


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


def as_json(reports: Sequence[Report], *, algorithms: bool = False) -> dict[str, Any]:
    """Return reports as a JSON object; times are in seconds, sizes in bytes.

    Args:
        reports: The reports: several, one for each world size, with `algorithms`, else one.
        algorithms: Whether the reports are those of `phalanx bench --algorithms`.
    """
    entries = [asdict(report) for report in reports]
    content = {"reports": entries} if algorithms else entries[0]
    return {"format": FORMATS[algorithms], "unit": "seconds", **content}


def read(path: Path, *, algorithms: bool = False) -> list[Report]:
    """Load reports that `phalanx bench --output` has stored.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"can't read {path}, which is not JSON: expected a file of phalanx bench --output"
        ) from None
    found = document.pop("format", None) if isinstance(document, dict) else None
    if found != FORMATS[algorithms]:
        command = f"phalanx bench {'--algorithms ' * algorithms}--output"
        raise UsageError(
            f"{path} has the format {found!r}, expected {FORMATS[algorithms]!r}: measure again "
            f"with {command}"
        )
    del document["unit"]
    return [_parse(entry) for entry in (document["reports"] if algorithms else [document])]


def _parse(report: dict[str, Any]) -> Report:
    for result in report["results"]:
        result["timings"] = {name: Timing(**each) for name, each in result["timings"].items()}
    return Report(**{**report, "results": [Result(**result) for result in report["results"]]})
