"""What a measurement is stored with, and how it is shown."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING

import torch

import phalanx
from phalanx.bench.collectives import Timing, label_of

if TYPE_CHECKING:
    from pathlib import Path

_RIVAL = "gloo"


def machine() -> dict[str, str | int]:
    """Where and with what something was measured: processor, cores, kernel, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "phalanx": phalanx.__version__,
    }


def header(backends: list[str]) -> str:
    """The columns of `row`."""
    columns = [f"{'bytes':>8}", *(f"{name + ' us':>12} {'quartiles':>19}" for name in backends)]
    return "  ".join([*columns, f"{'ratio':>7}"])


def row(size: int, timings: dict[str, Timing]) -> str:
    """A size's line: median and quartiles in microseconds, and how many times faster than Gloo."""
    cells = [f"{label_of(size):>8}"]
    for timing in timings.values():
        quartiles = f"{timing.low * 1e6:.1f} - {timing.high * 1e6:.1f}"
        cells.append(f"{timing.median * 1e6:12.1f} {quartiles:>19}")
    return "  ".join([*cells, f"{ratio(timings):>7}"])


def ratio(timings: dict[str, Timing]) -> str:
    """The rival's median over Phalanx's, where both were measured."""
    if "phalanx" not in timings or _RIVAL not in timings:
        return ""
    return f"{timings[_RIVAL].median / timings['phalanx'].median:.1f}x"


def store(path: Path, command: str, ranks: int, results: dict[int, dict[str, Timing]]) -> None:
    """Write the figures, with machine and command, as JSON."""
    document = {
        "command": command,
        "ranks": ranks,
        "machine": machine(),
        "unit": "seconds",
        "all_reduce": {
            str(size): {name: vars(timing) for name, timing in timings.items()}
            for size, timings in results.items()
        },
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
