"""Programs of the ecosystem, run as by a user."""

from __future__ import annotations

import os
import subprocess


def run(*command: str, **environment: str) -> None:
    """Run a command to its end, without the variables that a launcher has set for Accelerate."""
    kept = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**kept, **environment}
    )
    assert ended.returncode == 0, ended.stderr
