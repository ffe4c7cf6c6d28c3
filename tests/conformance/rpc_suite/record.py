"""The recorded outcomes: benchmarks/conformance_rpc.json, and the table that is made of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.conformance.rpc_suite.runner import COLUMNS
from tests.conformance.rpc_suite.scope import DIFFERENCES, OUT_OF_SCOPE, difference
from tests.conformance.torch_suite import results_file
from tests.conformance.torch_suite.record import facts
from tests.conformance.torch_suite.results_file import Results, cause
from tests.conformance.torch_suite.runner import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance.torch_suite.runner import Outcome

__all__ = ["DATA", "TABLE", "TITLES", "Results", "behind", "cause", "load", "store", "table"]

DATA = ROOT / "benchmarks" / "conformance_rpc.json"
TABLE = ROOT / "benchmarks" / "conformance_rpc.md"
TITLES = {"torch": "PyTorch's RPC", "phalanx": "phalanx.rpc"}
KINDS = ("pass", "fail", "timeout", "skip", "out of scope")

_HEAD = """\
# PyTorch's own RPC suite

`make conformance-rpc` writes this file. It runs every test of RPC, distributed autograd,
distributed optimizers and remote modules that PyTorch's wheel ships, on CPU: on PyTorch's own RPC
(TensorPipe), and on `phalanx.rpc` in its place. The suite is described in
docs/design/rpc_conformance.md. Last run with {facts}.
"""


def load() -> Results:
    """Return what is recorded so far."""
    return results_file.load(DATA, COLUMNS)


def store(results: Results) -> None:
    """Write the data, a line for each test, and the table."""
    DATA.write_text(results_file.dumps(results, facts()))
    TABLE.write_text(table(results))


def behind(results: Results) -> Iterator[tuple[str, Outcome]]:
    """Tests that PyTorch's RPC passes, and `phalanx.rpc` does not, without a documented reason."""
    for test, outcome in sorted(results["phalanx"].items()):
        theirs = results["torch"].get(test)
        if theirs is None or theirs.outcome != "pass" or difference(test):
            continue
        if outcome.outcome not in {"pass", "out of scope"}:
            yield test, outcome


def table(results: Results) -> str:
    """Return the text of benchmarks/conformance_rpc.md."""
    said = ", ".join(f"{name} {value}" for name, value in facts().items())
    lines = [_HEAD.format(facts=said), *_summary(results)]
    found = list(behind(results))
    lines += ["## Failures without a documented reason", "", *([] if found else ["None.", ""])]
    lines += [f"- {test}: {outcome.outcome}: {cause(outcome.reason)}" for test, outcome in found]
    lines += ["", "## Deliberate differences", "", *_listed(DIFFERENCES)]
    lines += ["## Tests listed as out of scope", "", *_listed(OUT_OF_SCOPE)]
    lines += ["## Test by test", "", "| test | PyTorch's RPC | phalanx.rpc | reason |"]
    lines += ["|---|---|---|---|"]
    for test in sorted({test for found in results.values() for test in found}):
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


def _listed(reasons: dict[str, str]) -> Iterator[str]:
    yield from (f"- `{pattern}`: {why}." for pattern, why in reasons.items())
    yield "" if reasons else "None.\n"
