"""Programs of the ecosystem, run as by a user."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run(*command: str, **environment: str) -> None:
    """Run a command to its end, without the variables that a launcher has set for Accelerate."""
    kept = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**kept, **environment}
    )
    assert ended.returncode == 0, ended.stderr


def alone_on_a_core() -> None:
    """Compile in this process, into a separate directory."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
        Path(os.environ["FOLDER"]) / f"cache-{os.environ['RANK']}"
    )
