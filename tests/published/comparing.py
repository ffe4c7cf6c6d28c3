"""Whether a run of an example does what another one does."""

from __future__ import annotations

import re

from tests.published.cases import Case
from tests.published.running import Ran

__all__ = ["differences", "troubles"]

_LAST = 10
# Times, which are never the same, and what depends on who comes first.
_VARIES = (
    (re.compile(r"\b\d\d:\d\d:\d\d(\.\d+)?\b"), "TIME"),
    (re.compile(r"execution time = [\d.]+"), "execution time = T"),
    (re.compile(r"^(\d+), [\d.]+, [\d.]+$"), r"\1, T, T"),
    (re.compile(r"PS got \d+/"), "PS got N/"),
)
_LOSS = re.compile(r"\d+\.\d+")


def differences(case: Case, theirs: Ran, ours: Ran) -> list[str]:
    """What differs, in words; nothing: they agree.

    Args:
        case: The example.
        theirs: Its run on PyTorch's RPC.
        ours: That on Phalanx's.
    """
    found = []
    for who, ran in (("torch.distributed.rpc", theirs), ("phalanx.rpc", ours)):
        if ran.code is None:
            found.append(f"on {who} it was ended after {ran.seconds:.0f} s")
        elif ran.code:
            found.append(f"on {who} it ended with exit code {ran.code}")
    found += _of_losses(case, theirs, ours)
    found += _of_lines(case, theirs, ours)
    known = set(map(_plain, theirs.complaints))
    found += [f"stderr: {line}" for line in ours.complaints if _plain(line) not in known]
    return found


def troubles(ours: Ran) -> list[str]:
    """What went wrong in a run that there is nothing to compare with."""
    found = [] if ours.code == 0 else [f"exit code {ours.code}, after {ours.seconds:.0f} s"]
    if any(line.startswith("Traceback") for line in ours.complaints):
        found += [f"stderr: {line}" for line in ours.complaints]
    return found if ours.losses else [*found, "nothing was trained"]


def _of_losses(case: Case, theirs: Ran, ours: Ran) -> list[str]:
    found = []
    for who in sorted(theirs.losses.keys() | ours.losses.keys()):
        a, b = theirs.losses.get(who, []), ours.losses.get(who, [])
        if len(a) != len(b):
            found.append(f"{who}: {len(a)} losses, and {len(b)}")
        elif case.tolerance:
            before, now = (sum(each[-_LAST:]) / len(each[-_LAST:]) for each in (a, b))
            if abs(now - before) > case.tolerance * before:
                found.append(f"{who}: at the end a loss of {before:.4f}, and {now:.4f}")
        elif a != b:
            at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            found.append(f"{who}: loss {at} is {a[at]!r}, and {b[at]!r}")
    return found


def _of_lines(case: Case, theirs: Ran, ours: Ran) -> list[str]:
    def plain(ran: Ran) -> list[str]:
        lines = map(_plain, ran.lines)
        # What several processes print comes in any order.
        return sorted(_LOSS.sub("X", line) if case.tolerance else line for line in lines)

    a, b = plain(theirs), plain(ours)
    if a == b:
        return []
    missing = [f"not printed: {line}" for line in a if line not in b]
    more = [f"printed: {line}" for line in b if line not in a]
    return (missing + more) or [f"{len(a)} lines printed, and {len(b)}"]


def _plain(line: str) -> str:
    for pattern, words in _VARIES:
        line = pattern.sub(words, line)
    return line
