"""Checks of the environment variables that Phalanx reads: malformed or misspelt ones."""

from __future__ import annotations

import difflib
import os

from phalanx import env, transports
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.errors import UsageError

__all__ = ["check"]

_finding = FindingFactory("environment")
_READERS = (
    env.assigned_ranks,
    env.job,
    env.jobs_directory,
    env.jobs_kept,
    env.replaced_backends,
    env.advertised_address,
    env.key,
    env.relay,
)
_KERNELS = ("baseline", "avx2", "avx512")


def check() -> list[Finding]:
    """Return one finding for each wrong variable, or a single finding if all are right."""
    found = [*_malformed(), *_choices(), *_unknown()]
    if found:
        return found
    used = {
        name: os.environ[name]
        for name in env.VARIABLES
        if name.startswith("PHALANX_") and name in os.environ
    }
    message = ", ".join(f"{name}={value}" for name, value in used.items())
    return [_finding.ok("variables", message or "no variable of Phalanx is set", **used)]


def _malformed() -> list[Finding]:
    found = []
    for read in _READERS:
        try:
            read()
        except ValueError as error:
            found.append(_finding.problem_from(read.__name__, error))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        found.append(
            _finding.note(
                "autoload",
                "TORCH_DEVICE_BACKEND_AUTOLOAD keeps `import torch` from registering Phalanx",
                "Unset it, or import phalanx in the script.",
            )
        )
    return found


def _choices() -> list[Finding]:
    found = []
    choices = {
        "PHALANX_TRANSPORT": (env.transport(), transports.NAMES),
        "PHALANX_ISA": (os.environ.get("PHALANX_ISA", ""), _KERNELS),
    }
    for name, (value, expected) in choices.items():
        if value and value not in expected:
            advice = f"Set it to one of {', '.join(expected)}, or unset it."
            found.append(_finding.problem(name, f"{name}={value!r}", advice))
    if env.transport() in transports.NAMES:
        try:
            transports.check_name(env.transport())
        except UsageError as error:
            found.append(_finding.problem_from("PHALANX_TRANSPORT", error, "PHALANX_TRANSPORT: "))
    return found


def _unknown() -> list[Finding]:
    found = []
    for name in sorted(os.environ):
        matches = difflib.get_close_matches(name, env.VARIABLES, 1, 0.85)
        if name.startswith("PHALANX_") and name not in env.VARIABLES and matches:
            found.append(
                _finding.note(name, f"{name} is set, but unknown", f"Did you mean {matches[0]}?")
            )
    return found
