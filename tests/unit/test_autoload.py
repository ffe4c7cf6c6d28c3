"""`import torch` alone makes the backend known, and imports next to nothing for it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch

ours = sorted(name for name in sys.modules if name.partition(".")[0] == "phalanx")
print(" ".join(ours))

import torch.distributed as dist

assert dist.is_backend_available("phalanx")
url = "file://" + sys.argv[1]
dist.init_process_group("phalanx", init_method=url, rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1, 1]
print(dist.get_backend())
"""


def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_a_script_that_never_imports_phalanx(tmp_path: Path) -> None:
    modules, backend = run(SCRIPT, str(tmp_path / "store"))
    assert modules == "phalanx phalanx._autoload"
    assert backend == "phalanx"


def test_what_the_entry_point_imports_by_itself() -> None:
    """The two modules bring nothing along that torch hasn't imported anyway."""
    script = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import sys
import torch
before = set(sys.modules)
from phalanx._autoload import register
register()
register()
print(" ".join(sorted(set(sys.modules) - before)))
"""
    assert run(script) == ["phalanx phalanx._autoload"]


def test_the_entry_point_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="phalanx")
    assert entry.value == "phalanx._autoload:register"


def test_importing_phalanx_is_light() -> None:
    script = "import sys, phalanx; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(script) == ["False False"]
