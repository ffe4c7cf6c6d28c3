"""Storage of the reports of several world sizes in one file, and the fastest algorithm."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Variant
from phalanx.bench.results import parse_report, read_document

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phalanx.bench.results import Report, Result

__all__ = ["FORMAT", "as_json", "fastest_algorithm", "read", "write"]

FORMAT = "phalanx bench algorithms 2"


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the reports, one for each world size, as a JSON object; times are in seconds."""
    entries = [asdict(report) for report in reports]
    return {"format": FORMAT, "unit": "seconds", "reports": entries}


def write(reports: Sequence[Report], path: Path) -> None:
    """Store the reports as JSON."""
    path.write_text(json.dumps(as_json(reports), indent=1) + "\n")


def read(path: Path) -> list[Report]:
    """Load what `write` stored.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    document = read_document(path, FORMAT, "phalanx bench --algorithms --output")
    return [parse_report(entry) for entry in document["reports"]]


def fastest_algorithm(result: Result, system: str) -> str | None:
    """Return the algorithm with the lowest median on a system; None if there is no timing."""
    labels = {Variant(system, name).label: name for name in ALGORITHMS}
    medians = {
        name: result.timings[label].median
        for label, name in labels.items()
        if label in result.timings
    }
    return min(medians, key=medians.__getitem__) if medians else None
