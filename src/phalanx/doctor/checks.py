"""All checks of this machine, in display order."""

from __future__ import annotations

from phalanx.doctor import environment, kernel, machine, network, software
from phalanx.doctor.finding import Finding

__all__ = ["run_checks"]

_CHECKS = (
    environment.check,
    machine.check_resources,
    kernel.check,
    network.check,
    software.check_libraries,
    machine.check_gpus,
)


def run_checks() -> list[Finding]:
    """Run all checks of this machine in this process; takes some seconds and changes nothing."""
    found = software.check_versions()
    if any(finding.level == "problem" for finding in found):
        return found  # the other checks need torch.distributed and the core
    return found + [finding for check in _CHECKS for finding in check()]
