"""A file of outcomes by column and test, and the cause of an outcome that is not a pass."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tests.conformance.torch_suite.runner import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["Results", "cause", "dumps", "load", "short"]

# By column and test.
Results = dict[str, dict[str, Outcome]]

# The line of the suite's parent process before the traceback of a worker.
_WORKER = re.compile(r"(?:RuntimeError: )?Process \d+ exited with error code \d+ and exception:\n")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*: .+", re.MULTILINE)
# A worker raises these because another worker failed.
_CONSEQUENCES = ("PeerLost", "Connection closed by peer", "Connection reset by peer")
# Texts that differ between runs or machines.
_FOLDERS = re.compile(r"(?<![\w./:])/(?:[\w.+-]+/)+")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def load(path: Path, columns: Iterable[str]) -> Results:
    """Return the outcomes of a file; empty if there is none."""
    results: Results = {column: {} for column in columns}
    if path.exists():
        for test, found in json.loads(path.read_text())["tests"].items():
            for column, entry in found.items():
                results[column][test] = Outcome(*entry)
    return results


def dumps(results: Results, facts: Mapping[str, str | int]) -> str:
    """Return the text of a file, with a line for each test."""
    tests: dict[str, dict[str, list[object]]] = {}
    for column, found in results.items():
        for test, outcome in found.items():
            groups = [outcome.groups] if outcome.groups else []
            entry = [outcome.outcome, cause(outcome.reason), outcome.seconds, *groups]
            tests.setdefault(test, {})[column] = entry
    lines = ",\n".join(f"  {json.dumps(test)}: {json.dumps(tests[test])}" for test in sorted(tests))
    return f'{{\n "facts": {json.dumps(facts)},\n "tests": {{\n{lines}\n }}\n}}\n'


def cause(reason: str) -> str:
    """Return the exception of a failed test, shortened for a table cell."""
    blocks = _WORKER.split(reason)
    raised = [found[-1] for each in blocks if (found := _EXCEPTION.findall(each))]
    causes = [each for each in raised if not any(words in each for words in _CONSEQUENCES)]
    line = short(next(iter(causes), reason))
    return _ADDRESS.sub("0x...", _FOLDERS.sub("", line))


def short(reason: str) -> str:
    """Return the most informative line, shortened for a table cell."""
    if not reason:
        return ""
    lines = [line for line in reason.splitlines() if line.strip()] or ["?"]
    wanted = [line for line in lines if line[0].isalpha() and "Error" in line.partition(":")[0]]
    return (wanted or lines)[-1].strip().replace("|", "\\|")[:160]
