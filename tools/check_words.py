"""Reject retired words, and sentences that begin or continue with a headless clause.

`make lint` runs it over all tracked files. docs/glossary.md defines the words to use.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

RETIRED = {
    r"black[ _-]?box(?:es)?": "flight recorder",
    r"engines?": "transport (between hosts), or PyTorch's autograd engine",
    r"snapshots?": "checkpoint",
    r"culprits?": "root cause, failing rank",
    r"freight|shipments?": "message",
    r"last[ _]words": "exception, exit reason",
    r"drills?": "fault injection",
    r"striking|strikes?|struck": "fault injection, inject",
    r"crew": "event loop threads",
    r"knock(?:s|ing)?": "authenticate",
    r"mourn\w*|bur(?:y|ies|ied)": "record the exit",
    r"forsak\w+|dozes?|dozing|rouses?": "service, idle, wake, poll",
    r"heard|hears?|hearing": "receive",
    r"commons": "copy-on-write memory",
    r"doors?|reception": "acceptor, server",
    r"seams?": "hook, listener",
    r"bells?": "event",
    r"patience": "spin policy, timeout",
    r"news|story|stories|tellings?": "report, notification",
    r"likeness": "compatibility",
    r"who listens|who connects|who comes|who dies|who waits|who sends|who leaves": "a noun",
}
"""Retired words, as regular expressions that match whole words, and their replacements."""

HEADLESS = {
    r'"""(?:What|Who|Where|Whether|How|Of)\b': "a docstring begins with a verb or a noun phrase",
    r"\b(?:for|of|to|by|from|than|with|and|or) who\b": "name the person or the process",
    r"(?:^|[.;:] )Who \w+s\b(?!.*\?)": "name the person or the process",
    r"\b(?:hasn't|haven't|hadn't) (?:a|an|any|the|its|one)\b": "does not have",
}
"""Patterns of clauses without a noun, and what to write instead."""

EXEMPT = (
    "tools/check_words.py",
    "benchmarks/conformance",  # names of PyTorch's tests
)
SUFFIXES = {".py", ".pyi", ".md", ".cpp", ".h", ".inc", ".pml", ".toml", ".txt", ""}

_WORDS = [
    (re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![a-z])", re.IGNORECASE), f"write: {words}")
    for pattern, words in RETIRED.items()
] + [(re.compile(pattern), advice) for pattern, advice in HEADLESS.items()]

_ALLOWED = re.compile(
    r"_execution_engine|_will_engine_execute_node|autograd_engine"
    r"|(?:[Aa]utograd|PyTorch)(?:'s)?(?: autograd)? engine"
    r"|std::mt19937_64 engine|engine[_(]|clock[_ ]snapshot"
)
"""Names of PyTorch, Perfetto and the C++ standard library that contain a retired word."""


def violations(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the match and the advice of each violation in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        checked = _ALLOWED.sub("", line)
        for pattern, advice in _WORDS:
            for match in pattern.finditer(checked):
                yield number, match[0], advice


def tracked_files() -> Iterator[Path]:
    """Yield the text files of the repository, except those that are exempt."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others"]
    names = subprocess.run(
        [*command, "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in names.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and not name.startswith(EXEMPT) and path.is_file():
            yield path


def main() -> int:
    """Print all violations; return the exit code."""
    found = 0
    for path in tracked_files():
        for number, match, advice in violations(path.read_text(errors="replace")):
            found += 1
            print(f"{path.relative_to(ROOT)}:{number}: {match.strip()!r}: {advice}")
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
