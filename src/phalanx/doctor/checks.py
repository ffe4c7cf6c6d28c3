"""All checks of this machine, in display order."""

from __future__ import annotations

from phalanx.doctor import devices, environment, kernel, libraries, machine, network, versions
from phalanx.doctor.finding import Finding

__all__ = ["run_checks"]

_CHECKS = (
    environment.check,
    machine.check,
    kernel.check,
    network.check,
    libraries.check,
    devices.check,
)


def run_checks() -> list[Finding]:
    """Run all checks of this machine in this process; takes some seconds and changes nothing."""
    found = versions.check()
    if any(finding.level == "problem" for finding in found):
        return found  # the other checks need torch.distributed and the core
    return found + [finding for check in _CHECKS for finding in check()]
