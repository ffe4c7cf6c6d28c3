"""The findings, for programs; docs/doctor.md describes the form."""

from __future__ import annotations

import socket
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.doctor.finding import Finding
    from phalanx.doctor.peers.links import Network

__all__ = ["as_json", "fit"]

SCHEMA = 1
"""Of the form; what is added to it doesn't change this number."""


def fit(findings: Sequence[Finding]) -> bool:
    """Whether there is no problem."""
    return all(finding.level != "problem" for finding in findings)


def as_json(findings: Sequence[Finding], network: Network | None) -> dict[str, Any]:
    """All that was found.

    Args:
        findings: On this machine, and between hosts.
        network: What was measured between hosts; None if nothing was.
    """
    return {
        "schema": SCHEMA,
        "phalanx": metadata.version("phalanx"),
        "host": socket.gethostname(),
        "fit": fit(findings),
        "findings": [finding.as_json() for finding in findings],
        "network": network.as_json() if network else None,
    }
