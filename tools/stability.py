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
import time
from collections.abc import Iterator
from datetime import datetime, timezone
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
    start = time.monotonic()
    result = gate.ROOT / gate.RECORDS / "result.json"
    result.unlink(missing_ok=True)
    with busy_processes(busy):
        code = subprocess.run([sys.executable, "tools/gate.py", *layers], check=False).returncode
    sections = json.loads(result.read_text())
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": _git("rev-parse", "--short=9", "HEAD") + ("+" if _git("status", "-s") else ""),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "layers": layers,
        "busy": busy,
        "passes": code == 0,
        "passed": sum(section["passed"] for section in sections),
        "failed": [name for section in sections for name in section["failed"]],
        "unstable": [name for section in sections for name in section["unstable"]],
        "minutes": round((time.monotonic() - start) / 60, 1),
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
    """Run as often as asked; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1, help="the number of runs")
    parser.add_argument(
        "--busy", type=int, default=0, help="the number of busy processes beside them"
    )
    parser.add_argument(
        "layers", nargs="*", default=["test", "test-long"], help="as for tools/gate.py"
    )
    arguments = parser.parse_args()
    os.chdir(gate.ROOT)
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    code = 0
    for number in range(arguments.runs):
        print(
            f"== Run {number + 1} of {arguments.runs}, beside {arguments.busy} busy processes",
            flush=True,
        )
        rows.append(run_once(arguments.layers, arguments.busy))
        RECORD.write_text(json.dumps(rows, indent=1) + "\n")
        write_page(rows)
        code |= not rows[-1]["passes"]
    return code


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
