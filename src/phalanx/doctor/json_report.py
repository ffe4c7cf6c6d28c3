"""Findings as JSON, for programs; docs/doctor.md describes the schema."""

from __future__ import annotations

import socket
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.doctor.finding import Finding
    from phalanx.doctor.peers.links import Network

__all__ = ["as_json", "is_fit"]

SCHEMA = 1
"""Version of the schema; additions do not change it."""


def is_fit(findings: Sequence[Finding]) -> bool:
    """Return whether no finding is a problem."""
    return all(finding.level != "problem" for finding in findings)


def as_json(findings: Sequence[Finding], network: Network | None) -> dict[str, Any]:
    """Return all findings and measurements as a JSON object.

    Args:
        findings: Findings about this machine and about other hosts.
        network: Measurements between hosts; None if there are none.
    """
    return {
        "schema": SCHEMA,
        "phalanx": metadata.version("phalanx"),
        "host": socket.gethostname(),
        "fit": is_fit(findings),
        "findings": [finding.as_json() for finding in findings],
        "network": network.as_json() if network else None,
    }
