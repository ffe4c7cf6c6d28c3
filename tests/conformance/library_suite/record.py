"""The recorded outcomes: benchmarks/conformance_libraries.json, and the table made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.conformance.library_suite.runner import COLUMNS, IMPORT
from tests.conformance.library_suite.scope import (
    DIFFERENCES,
    LEFT_OUT,
    SUITES,
    difference,
    suite_of,
)
from tests.conformance.torch_suite import results_file
from tests.conformance.torch_suite.record import facts, stem
from tests.conformance.torch_suite.results_file import Results, cause
from tests.conformance.torch_suite.runner import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.torch_suite.runner import Outcome

__all__ = [
    "DATA",
    "TABLE",
    "TITLES",
    "counts",
    "load",
    "merge",
    "release",
    "repeated",
    "store",
    "table",
    "unexplained_failures",
]

DATA = ROOT / "benchmarks" / f"{stem('conformance_libraries')}.json"
TABLE = DATA.with_suffix(".md")
TITLES = {"gloo": "Gloo", "phalanx": "Phalanx in Gloo's place"}

# The prefix of the reason of a test whose first outcome was different.
_FLAKY = "the first time: "

_HEAD = """\
# PyTorch's tests of its distributed libraries

`make conformance-libraries SOURCE=path/to/pytorch` writes this file. It runs PyTorch's test files
for what stands on process groups, on CPU: on Gloo, and with `PHALANX_REPLACE=gloo`. Last run with
test files of PyTorch {release}, {facts}.

The first column counts the tests that form a group of Gloo and pass, the second those of them that
pass on a group of Phalanx. Each process of a test records the backends of the groups that it forms;
a test that forms none of Phalanx in the second column has not passed. The other tests say nothing
about Phalanx: most are skipped without GPUs, and many use a fake process group, threads in the
place of ranks, or no group. A test that fails on Phalanx alone is run again on both, by itself.
Files that the last table does not have were not run.

"""


@dataclass
class Counts:
    """The numbers of tests of a suite or file."""

    on_gloo: int = 0
    on_phalanx: int = 0
    different: int = 0
    without_group: int = 0
    skipped: int = 0
    failed: int = 0

    def add(self, test: str, gloo: Outcome, phalanx: Outcome) -> None:
        if gloo.outcome == "skip":
            self.skipped += 1
        elif gloo.outcome != "pass":
            self.failed += 1
        elif not _uses_gloo(gloo):
            self.without_group += 1
        else:
            self.on_gloo += 1
            self.on_phalanx += _passes(gloo, phalanx)
            self.different += not _passes(gloo, phalanx) and difference(test) is not None

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counts(*(sum(pair) for pair in pairs))


def load() -> Results:
    """Return the recorded outcomes."""
    return results_file.load(DATA, COLUMNS)


def release() -> str:
    """Return the PyTorch release of the recorded test files; empty if unknown."""
    return str(json.loads(DATA.read_text())["facts"]["tests"]) if DATA.exists() else ""


def store(results: Results, release: str) -> None:
    """Write the data, a line for each test, and the table."""
    DATA.write_text(results_file.dumps(results, {"tests": release, **facts()}))
    TABLE.write_text(table(results, release))


def merge(recorded: dict[str, Outcome], outcomes: dict[str, Outcome]) -> None:
    """Merge outcomes into the record; a file that can be imported again is no longer a failure."""
    for file in {test.partition("::")[0] for test in outcomes}:
        recorded.pop(f"{file}::{IMPORT}", None)
    recorded.update(outcomes)


def repeated(first: Outcome, second: Outcome) -> Outcome:
    """Return the outcome of a test that was run again."""
    if first.outcome == second.outcome:
        return second
    return replace(second, reason=f"{_FLAKY}{first.outcome}: {cause(first.reason)}")


def unexplained_failures(results: Results) -> Iterator[tuple[str, Outcome]]:
    """Return tests that pass on Gloo but not on Phalanx, without a documented reason."""
    for test, outcome in sorted(results["phalanx"].items()):
        gloo = results["gloo"].get(test)
        if gloo and gloo.outcome == "pass" and not _passes(gloo, outcome) and not difference(test):
            yield test, outcome


def _passes(gloo: Outcome, phalanx: Outcome) -> bool:
    if _uses_gloo(gloo) and phalanx.outcome == "pass":
        return "phalanx" in phalanx.groups and not _uses_gloo(phalanx)
    return phalanx.outcome == "pass"


def _uses_gloo(outcome: Outcome) -> bool:
    return "gloo" in outcome.groups.split(", ")


def counts(results: Results) -> dict[str, Counts]:
    """Count the tests of each file."""
    found: dict[str, Counts] = {}
    for test, gloo in sorted(results["gloo"].items()):
        if phalanx := results["phalanx"].get(test):
            file = test.partition("::")[0]
            found.setdefault(file, Counts()).add(test, gloo, phalanx)
    return found


def table(results: Results, release: str) -> str:
    """Return the text of benchmarks/conformance_libraries.md."""
    said = ", ".join(f"{name} {value}" for name, value in facts().items())
    files = counts(results)
    lines = [_HEAD.format(release=release, facts=said) + _titles("suite")]
    for suite in SUITES:
        chosen = (each for file, each in files.items() if suite_of(file) == suite)
        lines.append(_row(suite, sum(chosen, Counts())))
    lines += [_row("**all**", sum(files.values(), Counts())), ""]
    found = list(unexplained_failures(results))
    lines += ["## Failures without a documented reason", "", *([] if found else ["None.", ""])]
    lines += [f"- {test}: {outcome.outcome}: {cause(outcome.reason)}" for test, outcome in found]
    lines += ["## Differences", "", *_listed(DIFFERENCES), "## Files left out", ""]
    lines += [*_listed(LEFT_OUT), "## Tests that passed only once", "", *_flaky(results)]
    lines += ["## File by file", "", _titles("file")]
    lines += [_row(file, each) for file, each in files.items()]
    return "\n".join(lines) + "\n"


def _titles(first: str) -> str:
    titles = "Gloo | Phalanx | differences | without Gloo | skipped | fail on Gloo"
    return f"| {first} | {titles} |\n|---|---:|---:|---:|---:|---:|---:|"


def _row(name: str, found: Counts) -> str:
    return f"| {name} | {' | '.join(str(number) for number in vars(found).values())} |"


def _flaky(results: Results) -> Iterator[str]:
    lines = [
        f"- {test} on {TITLES[column]}: {outcome.outcome}, {outcome.reason}"
        for column, tests in results.items()
        for test, outcome in sorted(tests.items())
        if outcome.reason.startswith(_FLAKY)
    ]
    yield from (*(lines or ["None."]), "")


def _listed(reasons: dict[str, str]) -> Iterator[str]:
    yield from (f"- `{pattern}`: {why}." for pattern, why in reasons.items())
    yield "" if reasons else "None.\n"
