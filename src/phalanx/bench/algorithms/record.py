"""Storage of the reports of several world sizes in one file, and the fastest algorithm."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.bench.operations import ALGORITHMS
from phalanx.bench.plan import Contender
from phalanx.bench.results import document_of, report_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from phalanx.bench.results import Figure, Report

__all__ = ["FORMAT", "fastest", "read", "write"]

FORMAT = "phalanx bench algorithms 1"


def write(reports: Sequence[Report], path: Path) -> None:
    """Store the reports, one for each world size, as JSON; times are in seconds."""
    entries = [asdict(report) for report in reports]
    document = {"format": FORMAT, "unit": "seconds", "reports": entries}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> list[Report]:
    """Load what `write` stored.

    Raises:
        UsageError: The file can't be read, or has another format.
    """
    document = document_of(path, FORMAT, "phalanx bench --algorithms --json")
    return [report_of(entry) for entry in document["reports"]]


def fastest(figure: Figure, system: str) -> str | None:
    """Return the algorithm with the lowest median on a system; None if there is no timing."""
    labels = {Contender(system, name).label: name for name in ALGORITHMS}
    medians = {
        name: figure.timings[label].median
        for label, name in labels.items()
        if label in figure.timings
    }
    return min(medians, key=medians.__getitem__) if medians else None
