"""What verifies the core follows the core: its mutants apply, its models find their accesses."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_applies() -> None:
    command = [sys.executable, str(NATIVE / "mutants" / "run.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_an_access_that_is_gone_is_told(tmp_path: Path) -> None:
    orders = load(NATIVE / "model" / "orders.py")
    for file, _ in orders.PLACES.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((NATIVE / file).read_text().replace("sleepers", "resters"))
    with pytest.raises(orders.MissingAccessError, match=r"SLEEPERS_ADD is found 0 times"):
        orders.orders_in(tmp_path)
