"""A checkout of PyTorch's source: its release and its test files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from tests.conformance.library_suite.scope import LEFT_OUT, SUITES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["missing_patterns", "release", "require_release", "suites"]

_REPOSITORY = "https://github.com/pytorch/pytorch"


def release(version: str) -> str:
    """Return the release of a version: "2.13.0" for "2.13.0a0" and "2.13.0+cpu"."""
    found = re.match(r"\d+\.\d+\.\d+", version.strip())
    return found[0] if found else version.strip()


def require_release(checkout: Path, *, is_other_allowed: bool) -> str:
    """Return the release of a checkout.

    Raises:
        ValueError: There is no checkout, or its release differs from that of PyTorch in use.
    """
    used = release(str(torch.__version__))
    advice = f"get one with: git clone --depth 1 --branch v{used} {_REPOSITORY}"
    version = checkout / "version.txt"
    if not version.is_file() or not (checkout / "test" / "distributed").is_dir():
        raise ValueError(f"{checkout} is not a checkout of PyTorch: {advice}")
    found = release(version.read_text())
    if found != used and not is_other_allowed:
        raise ValueError(f"{checkout} is PyTorch {found}, and {used} is installed: {advice}")
    return found


def suites(checkout: Path) -> dict[str, list[str]]:
    """Return the files of each suite, relative to test/distributed."""
    root = checkout / "test" / "distributed"
    found = {}
    for suite, patterns in SUITES.items():
        paths = {path for pattern in patterns for path in root.glob(pattern)}
        names = sorted(path.relative_to(root).as_posix() for path in paths)
        found[suite] = [name for name in names if name not in LEFT_OUT]
    return found


def missing_patterns(checkout: Path) -> list[str]:
    """Return the patterns of files that a checkout does not have."""
    root = checkout / "test" / "distributed"
    every = (pattern for patterns in SUITES.values() for pattern in patterns)
    return [pattern for pattern in every if not any(root.glob(pattern))]
