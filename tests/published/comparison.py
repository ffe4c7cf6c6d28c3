"""Comparison of two runs of an example."""

from __future__ import annotations

import re

from tests.published.cases import Case
from tests.published.runner import RunResult

__all__ = ["differences", "failures"]

_LAST = 10
# Times, and text that depends on the order of arrival.
_VARIES = (
    (re.compile(r"\b\d\d:\d\d:\d\d(\.\d+)?\b"), "TIME"),
    (re.compile(r"execution time = [\d.]+"), "execution time = T"),
    (re.compile(r"^(\d+), [\d.]+, [\d.]+$"), r"\1, T, T"),
    (re.compile(r"PS got \d+/"), "PS got N/"),
)
_LOSS = re.compile(r"\d+\.\d+")


def differences(case: Case, theirs: RunResult, ours: RunResult) -> list[str]:
    """Return descriptions of the differences; empty if the runs agree.

    Args:
        case: The example.
        theirs: The run on PyTorch's RPC.
        ours: The run on Phalanx's RPC.
    """
    found = []
    for system, result in (("torch.distributed.rpc", theirs), ("phalanx.rpc", ours)):
        if result.code is None:
            found.append(f"on {system}: killed after {result.seconds:.0f} s")
        elif result.code:
            found.append(f"on {system}: exit code {result.code}")
    found += _compare_losses(case, theirs, ours)
    found += _compare_lines(case, theirs, ours)
    known = set(map(_plain, theirs.stderr_lines))
    found += [f"stderr: {line}" for line in ours.stderr_lines if _plain(line) not in known]
    return found


def failures(ours: RunResult) -> list[str]:
    """Return the failures of a run without a counterpart."""
    found = [] if ours.code == 0 else [f"exit code {ours.code}, after {ours.seconds:.0f} s"]
    if any(line.startswith("Traceback") for line in ours.stderr_lines):
        found += [f"stderr: {line}" for line in ours.stderr_lines]
    return found if ours.losses else [*found, "no loss was computed"]


def _compare_losses(case: Case, theirs: RunResult, ours: RunResult) -> list[str]:
    found = []
    for process in sorted(theirs.losses.keys() | ours.losses.keys()):
        a, b = theirs.losses.get(process, []), ours.losses.get(process, [])
        if len(a) != len(b):
            found.append(f"{process}: {len(a)} losses, then {len(b)}")
        elif case.tolerance:
            before, now = (sum(each[-_LAST:]) / len(each[-_LAST:]) for each in (a, b))
            if abs(now - before) > case.tolerance * before:
                found.append(f"{process}: final loss {before:.4f}, then {now:.4f}")
        elif a != b:
            at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            found.append(f"{process}: loss {at} is {a[at]!r}, then {b[at]!r}")
    return found


def _compare_lines(case: Case, theirs: RunResult, ours: RunResult) -> list[str]:
    def plain(result: RunResult) -> list[str]:
        lines = map(_plain, result.lines)
        # Several processes print in any order.
        return sorted(_LOSS.sub("X", line) if case.tolerance else line for line in lines)

    a, b = plain(theirs), plain(ours)
    if a == b:
        return []
    missing = [f"not printed: {line}" for line in a if line not in b]
    more = [f"printed: {line}" for line in b if line not in a]
    return (missing + more) or [f"{len(a)} lines printed, then {len(b)}"]


def _plain(line: str) -> str:
    for pattern, words in _VARIES:
        line = pattern.sub(words, line)
    return line
