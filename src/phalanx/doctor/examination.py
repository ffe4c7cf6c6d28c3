"""All checks of this machine, in the order in which they are shown."""

from __future__ import annotations

from phalanx.doctor import devices, environment, kernel, libraries, machine, network, versions
from phalanx.doctor.finding import Finding

__all__ = ["examine"]

_CHECKS = (
    environment.check,
    machine.check,
    kernel.check,
    network.check,
    libraries.check,
    devices.check,
)


def examine() -> list[Finding]:
    """Look at this machine as this process finds it; takes some seconds and changes nothing."""
    found = versions.check()
    if any(finding.level == "problem" for finding in found):
        return found  # nothing else could be tried
    return found + [finding for check in _CHECKS for finding in check()]
