"""The recorded outcomes, a file for each release of PyTorch, and the tables made of them.

benchmarks/conformance.json is for the PyTorch that `make` installs by default,
conformance_2.14.json for PyTorch 2.14.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

import torch

from phalanx.bench.machine import machine, versions
from tests.conformance.torch_suite.results_file import short
from tests.conformance.torch_suite.runner import COLUMNS, ROOT, SIZES, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# By column, world size and test.
Results = dict[str, dict[int, dict[str, Outcome]]]


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def stem(name: str) -> str:
    """Return the stem of a record's file names for the PyTorch in use."""
    default = re.search(r"^DEFAULT_TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert default is not None, "the Makefile sets no DEFAULT_TORCH"
    release = _release(str(torch.__version__))
    return name if release == _release(default[1]) else f"{name}_{release}"


DATA = ROOT / "benchmarks" / f"{stem('conformance')}.json"
TABLE = DATA.with_suffix(".md")
TITLES = {"gloo": "Gloo", "phalanx": "Phalanx", "replace": "Phalanx in Gloo's place"}

# Tests that cannot pass in a column, and the reasons.
EXPLAINED = {
    ("replace", "test_ddp_logging_data_cpu"): (
        "it reads Gloo's number of threads from DDP's log, which PyTorch takes from its own "
        "ProcessGroupGloo: Phalanx has none, so DDP's log says what runs, phalanx; all else that "
        "this test checks is checked under that name"
    )
}

_HEAD = """\
# PyTorch's own suite

`make conformance` writes this file. It runs every test of PyTorch's
`torch.testing._internal.distributed.distributed_test` on CPU: on Gloo, which is the reference; on
Phalanx under its own name (`BACKEND=phalanx`); and on Phalanx in Gloo's place (`BACKEND=gloo` with
`PHALANX_REPLACE=gloo`). At 8 ranks the suite runs tests that it skips below. Most of what it skips
needs several GPUs or names NCCL. Last run with {facts}.
"""


_NAMED = ("python", "torch", "phalanx")


def facts() -> dict[str, str | int]:
    """Return the versions and the machine of the outcomes."""
    known = versions()
    return {"cores": machine()["cores"], **{name: known[name] for name in _NAMED}}


def load() -> Results:
    """Return the recorded outcomes."""
    results: Results = {column: {size: {} for size in SIZES} for column in COLUMNS}
    if DATA.exists():
        for test, columns in json.loads(DATA.read_text())["tests"].items():
            for column, sizes in columns.items():
                for size, entry in sizes.items():
                    results[column][int(size)][test] = Outcome(*entry)
    return results


def store(results: Results) -> None:
    """Write the data, a line for each test, and the table."""
    tests: dict[str, dict[str, dict[str, list[object]]]] = {}
    for column, sizes in results.items():
        for size, found in sizes.items():
            for test, outcome in found.items():
                entry = [outcome.outcome, short(outcome.reason), outcome.seconds]
                tests.setdefault(test, {}).setdefault(column, {})[str(size)] = entry
    lines = ",\n".join(f"  {json.dumps(test)}: {json.dumps(tests[test])}" for test in sorted(tests))
    DATA.write_text(f'{{\n "facts": {json.dumps(facts())},\n "tests": {{\n{lines}\n }}\n}}\n')
    TABLE.write_text(table(results))


def missing(results: Results, column: str) -> Iterator[tuple[str, int, Outcome]]:
    """Yield the tests that pass on Gloo, and do not pass in this column although they could.

    Excluded are tests that the suite skips because it does not know the name, and those that
    `EXPLAINED` excuses.
    """
    for size in SIZES:
        for test, oracle in sorted(results["gloo"][size].items()):
            ours = results[column][size].get(test)
            if oracle.outcome != "pass" or ours is None or ours.outcome == "pass":
                continue
            unknown = column == "phalanx" and ours.outcome == "skip"
            if not unknown and (column, test) not in EXPLAINED:
                yield test, size, ours


def table(results: Results) -> str:
    """Return the text of the table."""
    said = ", ".join(f"{name} {value}" for name, value in facts().items())
    lines = [_HEAD.format(facts=said), *_summary(results), *_unresolved(results)]
    lines += ["## Test by test", "", "Where world sizes differ, the outcome of each is given.", ""]
    lines += ["| test | Gloo | Phalanx | in Gloo's place | why not |", "|---|---|---|---|---|"]
    tests = {test for sizes in results.values() for found in sizes.values() for test in found}
    for test in sorted(tests):
        cells = [_cell(results[column], test) for column in COLUMNS]
        row = " | ".join([test.removeprefix("test_"), *cells, _why(results, test)])
        lines.append(f"| {row} |")
    return "\n".join(lines) + "\n"


def _summary(results: Results) -> Iterator[str]:
    yield "| | ranks | passed | failed | timed out | skipped |"
    yield "|---|---|---|---|---|---|"
    for column, sizes in results.items():
        for size, tests in sizes.items():
            count = Counter(outcome.outcome for outcome in tests.values())
            figures = [count[kind] for kind in ("pass", "fail", "timeout", "skip")]
            yield f"| {TITLES[column]} | {size} | {' | '.join(map(str, figures))} |"
    yield ""


def _unresolved(results: Results) -> Iterator[str]:
    for column, place in (("replace", "in Gloo's place"), ("phalanx", "under its own name")):
        found = list(missing(results, column))
        verdict = "" if found else "none that could."
        yield f"**Passed by Gloo and not by Phalanx {place}:** {verdict}"
        yield ""
        yield from (f"- {test}, {n} ranks: {o.outcome}: {short(o.reason)}" for test, n, o in found)
        if found:
            yield ""
    yield "**What can't pass:**"
    yield ""
    for (column, test), why in EXPLAINED.items():
        yield f"- {test} on {TITLES[column]}: {why}."
    skipped = {
        test
        for size in SIZES
        for test, outcome in results["phalanx"][size].items()
        if outcome.outcome == "skip" and results["gloo"][size].get(test, outcome).outcome == "pass"
    }
    yield (
        f"- {len(skipped)} tests on Phalanx under its own name: the suite runs them for the names "
        "that it knows only. In Gloo's place they run."
    )
    yield ""


def _cell(sizes: Mapping[int, Mapping[str, Outcome]], test: str) -> str:
    found = {size: tests[test].outcome for size, tests in sizes.items() if test in tests}
    if len(set(found.values())) == 1 and len(found) == len(SIZES):
        return next(iter(found.values()))
    return ", ".join(f"{size}: {outcome}" for size, outcome in found.items())


def _why(results: Results, test: str) -> str:
    reasons = [
        short(tests[test].reason)
        for sizes in results.values()
        for tests in sizes.values()
        if test in tests and tests[test].outcome != "pass"
    ]
    return "; ".join(dict.fromkeys(reasons))
