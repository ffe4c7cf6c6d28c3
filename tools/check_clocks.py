"""Reject upper bounds on the clock in tests.

`make lint` runs it over `tests/`. A test that fails because a machine was slow says nothing of the
product: the watchdog finds what hangs, and `benchmarks/` has how fast it is. A lower bound ("not
before the deadline"), and a deadline in a loop that polls, are fine.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

CLOCKS = {"monotonic", "perf_counter", "time", "process_time", "monotonic_ns", "perf_counter_ns"}
"""The functions of `time` that return a time."""
TIMES = {"error_time", "time"}
"""The attributes of results of ranks that hold a time."""
ADVICE = (
    "an upper bound on the clock: the type and the text of an error, with a timeout of 60 s, show"
    " that it does not come from a timeout; speed belongs in benchmarks/"
)


def violations(source: str) -> Iterator[int]:
    """Yield the numbers of the lines that bound a duration from above."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            durations = _durations(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Assert) and _bounds(node.test, durations):
                    yield node.lineno


def _durations(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function gives to durations."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_duration(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _bounds(test: ast.expr, durations: set[str]) -> bool:
    """Return whether a condition bounds a duration from above."""
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            is_less = isinstance(operator, ast.Lt | ast.LtE)
            if not is_less and not isinstance(operator, ast.Gt | ast.GtE):
                continue
            if _is_duration(left if is_less else right, durations):
                return True
    return False


def _is_duration(node: ast.expr, durations: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in durations
    if isinstance(node, ast.Call):  # abs, max, round, float
        return any(_is_duration(argument, durations) for argument in node.args)
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and (_is_time(node.left) or _is_time(node.right))
    )


def _is_time(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in TIMES
    if not isinstance(node, ast.Call):
        return False
    name = node.func
    return (isinstance(name, ast.Attribute) and name.attr in CLOCKS) or (
        isinstance(name, ast.Name) and name.id in CLOCKS
    )


def main() -> int:
    """Print all violations; return the exit code."""
    found = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number in violations(path.read_text()):
            found += 1
            print(f"{path.relative_to(ROOT)}:{number}: {ADVICE}")
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
