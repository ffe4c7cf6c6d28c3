"""Run the checks and tests many times, beside busy processes, and record which tests are unstable.

    make stability ARGS="--runs 5 --busy 2 test"

Each run is one of tools/gate.py. The record, `benchmarks/stability.json` and
`benchmarks/stability.md`, has a row for each run: where it ran, how many tests passed, and which
failed or were unstable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools import gate

RECORD = gate.ROOT / "benchmarks" / "stability.json"
PAGE = RECORD.with_suffix(".md")

HEAD = """# How often the tests pass

Runs of `make test`, `make test-long` or both (`make stability` and `.ci/run`), each on the commit
that is named. A test is *unstable* if it failed, and passed when it was run again alone. *Busy* is
the number of processes that computed all the time beside the run.

"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have `count` processes compute meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_once(layers: list[str], busy: int) -> dict[str, Any]:
    """Run layers or sections of the gate, and return the row of the record."""
    result = gate.ROOT / gate.RECORDS / "result.json"
    result.unlink(missing_ok=True)
    with busy_processes(busy):
        subprocess.run([sys.executable, "tools/gate.py", *layers], check=False)
    return read_result(result, layers, busy)


def read_result(result: Path, layers: list[str], busy: int) -> dict[str, Any]:
    """Return the row of a run on this machine, from the file that it has written."""
    sections = json.loads(result.read_text())
    failed = [name for section in sections for name in section["failed"]]
    unstable = [name for section in sections for name in section["unstable"]]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": _git("rev-parse", "--short=9", "HEAD") + ("+" if _git("status", "-s") else ""),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "layers": layers,
        "busy": busy,
        "passes": not failed and len(unstable) <= gate.MAX_UNSTABLE,
        "passed": sum(section["passed"] for section in sections),
        "failed": failed,
        "unstable": unstable,
        "minutes": round(sum(section["seconds"] for section in sections) / 60, 1),
    }


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the table of all runs, newest first."""
    lines = ["| date | commit | what | cores | busy | passes | passed | failed | unstable | min |"]
    lines.append("| --- " * 10 + "|")
    for row in reversed(rows):
        names = [
            ", ".join(f"`{name}`" for name in row[key]) or "0" for key in ("failed", "unstable")
        ]
        cells = [
            row["date"],
            f"`{row['commit']}`",
            " ".join(row["layers"]),
            row["cores"],
            row["busy"],
        ]
        cells += ["yes" if row["passes"] else "**no**", row["passed"], *names, row["minutes"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def main() -> int:
    """Run as often as asked; return 1 if the last run failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1, help="the number of runs")
    parser.add_argument(
        "--busy", type=int, default=0, help="the number of busy processes beside them"
    )
    parser.add_argument("--read", type=Path, help="record a run that has ended: its result.json")
    parser.add_argument(
        "layers", nargs="*", default=["test", "test-long"], help="as for tools/gate.py"
    )
    arguments = parser.parse_args()
    os.chdir(gate.ROOT)
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    layers, busy = arguments.layers, arguments.busy
    for number in range(arguments.runs):
        if arguments.read is None:
            print(f"== Run {number + 1} of {arguments.runs}, {busy} busy processes", flush=True)
            rows.append(run_once(layers, busy))
        else:
            rows.append(read_result(arguments.read, layers, busy))
        RECORD.write_text(json.dumps(rows, indent=1) + "\n")
        write_page(rows)
    return int(not rows[-1]["passes"])


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
