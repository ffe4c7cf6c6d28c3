"""Checks of the environment variables that Phalanx reads: malformed or misspelt ones."""

from __future__ import annotations

import difflib
import os

from phalanx import env, env_hosts, transports
from phalanx.doctor.finding import Finding, Says
from phalanx.errors import UsageError

__all__ = ["check"]

_says = Says("environment")
_READERS = (
    env.assigned_ranks,
    env.job,
    env.jobs_directory,
    env.jobs_kept,
    env.replaced_backends,
    env_hosts.advertised_address,
    env_hosts.key,
    env_hosts.relay,
)
_KERNELS = ("baseline", "avx2", "avx512")


def check() -> list[Finding]:
    """Return one finding for each wrong variable, or a single finding if all are right."""
    found = [*_malformed(), *_choices(), *_unknown()]
    if found:
        return found
    known = [variable.name for variable in env.VARIABLES]
    used = {
        name: os.environ[name]
        for name in known
        if name.startswith("PHALANX_") and name in os.environ
    }
    words = ", ".join(f"{name}={value}" for name, value in used.items())
    return [_says.ok("variables", words or "no variable of Phalanx's is set", **used)]


def _malformed() -> list[Finding]:
    found = []
    for read in _READERS:
        try:
            read()
        except ValueError as error:
            words, _, advice = str(error).partition(": ")
            found.append(_says.problem(read.__name__, words, f"{advice[:1].upper()}{advice[1:]}."))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        found.append(
            _says.note(
                "autoload",
                "TORCH_DEVICE_BACKEND_AUTOLOAD keeps `import torch` from making Phalanx known",
                "Unset it, or import phalanx in the script.",
            )
        )
    return found


def _choices() -> list[Finding]:
    found = []
    choices = {
        "PHALANX_TRANSPORT": (env_hosts.transport(), transports.NAMES),
        "PHALANX_ISA": (os.environ.get("PHALANX_ISA", ""), _KERNELS),
    }
    for name, (given, expected) in choices.items():
        if given and given not in expected:
            advice = f"Set it to one of {', '.join(expected)}, or unset it."
            found.append(_says.problem(name, f"{name}={given!r}", advice))
    if env_hosts.transport() in transports.NAMES:
        try:
            transports.check_name(env_hosts.transport())
        except UsageError as error:
            words, _, advice = str(error).partition(": ")
            advice = f"{advice[:1].upper()}{advice[1:]}."
            found.append(_says.problem("PHALANX_TRANSPORT", f"PHALANX_TRANSPORT: {words}", advice))
    return found


def _unknown() -> list[Finding]:
    known = [variable.name for variable in env.VARIABLES]
    found = []
    for name in sorted(os.environ):
        near = difflib.get_close_matches(name, known, 1, 0.85)
        if name.startswith("PHALANX_") and name not in known and near:
            found.append(
                _says.note(name, f"{name} is set, which nothing reads", f"Is it {near[0]}?")
            )
    return found
