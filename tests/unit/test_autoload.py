"""`import torch` alone registers the backend, at almost no cost."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_modules_that_the_first_group_imports(tmp_path: Path) -> None:
    """No third-party package, and no module of Phalanx that a group of one host never uses."""
    script = """
import sys
import torch.distributed as dist
before = set(sys.modules)
url = "file://" + sys.argv[1]
dist.init_process_group("phalanx", init_method=url, rank=0, world_size=1)
dist.barrier()
print(" ".join(sorted(set(sys.modules) - before)))
dist.destroy_process_group()
"""
    (modules,) = run(script, str(tmp_path / "store"))
    names = modules.split()
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert packages == {"phalanx"}
    heavy = {"asyncio", "concurrent", "ctypes", "email", "http", "ssl", "urllib"}
    assert not heavy.intersection(names)
    layers = {".".join(name.split(".")[:2]) for name in names if name.startswith("phalanx.")}
    assert layers <= {
        f"phalanx.{name}"
        for name in (
            "_native address backend diagnosis env errors recorder system topology torch_layouts "
            "torch_versions transports usage_errors"
        ).split()
    }
    assert "phalanx.hierarchical" not in names


def test_prepared_operations_do_not_import_the_compiler(tmp_path: Path) -> None:
    script = """
import sys
import torch
import torch.distributed as dist
import phalanx
url = "file://" + sys.argv[1]
dist.init_process_group("phalanx", init_method=url, rank=0, world_size=1)
phalanx.prepare(dist.all_reduce, torch.ones(3))()
print(sorted({"torch._dynamo", "torch._inductor"}.intersection(sys.modules)))
dist.destroy_process_group()
"""
    assert run(script, str(tmp_path / "store")) == ["[]"]


def test_modules_that_the_entry_point_imports() -> None:
    """The two modules import nothing that torch does not import anyway."""
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


GROUPS = ("torch.backends", "torch.distributed.backends")


@pytest.mark.parametrize("group", GROUPS)
def test_the_entry_point_is_installed(group: str) -> None:
    (entry,) = importlib.metadata.entry_points(group=group, name="phalanx")
    assert entry.value == "phalanx._autoload:register"


def test_both_entry_points_register_once() -> None:
    """PyTorch calls the first at `import torch`, and the second for an unknown name."""
    script = f"""
import warnings
warnings.simplefilter("error")
import importlib.metadata
import os
from torch.distributed import Backend
once = Backend._plugins["PHALANX"]
for group in {GROUPS}:
    (entry,) = importlib.metadata.entry_points(group=group, name="phalanx")
    entry.load()()
print(Backend._plugins["PHALANX"] is once, Backend.backend_list.count("phalanx"))
"""
    assert run(script) == ["True 1"]


def test_the_backend_is_found_without_the_first_entry_point(tmp_path: Path) -> None:
    """The user has disabled the autoloading of backends at `import torch`."""
    script = """
import sys
import torch.distributed as dist
assert "PHALANX" not in dist.Backend._plugins
if not hasattr(dist.Backend, "_ensure_backend_registered"):  # before PyTorch 2.14
    from phalanx._autoload import register
    register()
dist.init_process_group("phalanx", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(dist.get_backend())
"""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert run(script, str(tmp_path / "store"), env=env) == ["phalanx"]


def test_importing_phalanx_is_light() -> None:
    script = "import sys, phalanx; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(script) == ["False False"]


@pytest.mark.parametrize("module", ["phalanx.cli.run", "phalanx.cli.remote_launcher"])
def test_launchers_import_torch_after_they_have_set_its_log_level(module: str) -> None:
    assert run(f"import sys, {module}; print('torch' in sys.modules)") == ["False"]
