"""The recorded outcomes: benchmarks/conformance_rpc.json, and the table generated from it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.conformance.rpc_suite.runner import COLUMNS
from tests.conformance.rpc_suite.scope import DIFFERENCES, OUT_OF_SCOPE, difference_reason
from tests.conformance.torch_suite import results_file
from tests.conformance.torch_suite.record import facts
from tests.conformance.torch_suite.results_file import Results, cause
from tests.conformance.torch_suite.runner import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.torch_suite.runner import Outcome

__all__ = [
    "DATA",
    "TABLE",
    "TITLES",
    "Results",
    "cause",
    "find_regressions",
    "load",
    "store",
    "table",
]

DATA = ROOT / "benchmarks" / "conformance_rpc.json"
TABLE = ROOT / "benchmarks" / "conformance_rpc.md"
TITLES = {"torch": "PyTorch's RPC", "phalanx": "phalanx.rpc"}
KINDS = ("pass", "fail", "timeout", "skip", "out of scope")

_HEADER = """\
# PyTorch's own RPC suite

`make conformance-rpc` writes this file. It runs every test of RPC, distributed autograd,
distributed optimizers and remote modules that PyTorch's wheel ships, on CPU: on PyTorch's own RPC
(TensorPipe), and on `phalanx.rpc` in its place. The suite is described in
docs/design/rpc_conformance.md. Last run with {facts}.
"""


def load() -> Results:
    """Return the recorded outcomes."""
    return results_file.load(DATA, COLUMNS)


def store(results: Results) -> None:
    """Write the data, a line for each test, and the table."""
    DATA.write_text(results_file.dumps(results, facts()))
    TABLE.write_text(table(results))


def find_regressions(results: Results) -> Iterator[tuple[str, Outcome]]:
    """Yield tests that PyTorch's RPC passes and `phalanx.rpc` fails without a documented reason."""
    for test, outcome in sorted(results["phalanx"].items()):
        torch_outcome = results["torch"].get(test)
        if torch_outcome is None or torch_outcome.outcome != "pass" or difference_reason(test):
            continue
        if outcome.outcome not in {"pass", "out of scope"}:
            yield test, outcome


def table(results: Results) -> str:
    """Return the text of benchmarks/conformance_rpc.md."""
    versions = ", ".join(f"{name} {value}" for name, value in facts().items())
    lines = [_HEADER.format(facts=versions), *_summary(results)]
    regressions = list(find_regressions(results))
    lines += [
        "## Failures without a documented reason",
        "",
        *([] if regressions else ["None.", ""]),
    ]
    lines += [
        f"- {test}: {outcome.outcome}: {cause(outcome.reason)}" for test, outcome in regressions
    ]
    lines += ["", "## Deliberate differences", "", *_list_reasons(DIFFERENCES)]
    lines += ["## Tests listed as out of scope", "", *_list_reasons(OUT_OF_SCOPE)]
    lines += ["## Test by test", "", "| test | PyTorch's RPC | phalanx.rpc | reason |"]
    lines += ["|---|---|---|---|"]
    for test in sorted({test for outcomes in results.values() for test in outcomes}):
        outcomes = [results[column].get(test) for column in COLUMNS]
        cells = [outcome.outcome if outcome else "" for outcome in outcomes]
        reasons = [cause(each.reason) for each in outcomes if each and each.outcome != "pass"]
        lines.append(f"| {test} | {' | '.join(cells)} | {'; '.join(dict.fromkeys(reasons))} |")
    return "\n".join(lines) + "\n"


def _summary(results: Results) -> Iterator[str]:
    yield f"| | {' | '.join(KINDS)} |"
    yield f"|---{'|---' * len(KINDS)}|"
    for column, tests in results.items():
        count = Counter(outcome.outcome for outcome in tests.values())
        yield f"| {TITLES[column]} | {' | '.join(str(count[kind]) for kind in KINDS)} |"
    yield ""


def _list_reasons(reasons: dict[str, str]) -> Iterator[str]:
    yield from (f"- `{pattern}`: {reason}." for pattern, reason in reasons.items())
    yield "" if reasons else "None.\n"
