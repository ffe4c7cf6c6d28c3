"""The verification matches the core: mutants apply, and models find their accesses."""

import importlib.util
import re
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))  # like a script in in that folder
        spec.loader.exec_module(module)
    return module


def test_every_mutant_applies() -> None:
    command = [sys.executable, str(NATIVE / "mutants" / "run.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_missing_access_is_reported(tmp_path: Path) -> None:
    orders = load(NATIVE / "model" / "orders.py")
    for file, _ in orders.ACCESSES.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((NATIVE / file).read_text().replace("sleepers", "resters"))
    with pytest.raises(orders.MissingAccessError, match=r"SLEEPERS_ADD is found 0 times"):
        orders.orders_in(tmp_path)


def read_rows(result: Path, columns: int) -> list[list[str]]:
    """Return the cells of all tables with `columns` columns in a recorded result."""
    lines = [line for line in result.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if len(row) == columns]


def test_every_mutant_was_found() -> None:
    """Check the recorded run, which takes half an hour, has all mutants and missed none."""
    mutants = load(NATIVE / "mutants" / "mutants.py").MUTANTS
    recorded = read_rows(NATIVE / "mutants" / "RESULT.md", 4)[1:]
    assert [(row[0], row[1]) for row in recorded] == [(m.name, m.caught_by) for m in mutants]
    assert [row[0] for row in recorded if "NOT FOUND" in row[3]] == []
    assert len(recorded) >= 20


def test_the_models_were_checked_with_the_orders_of_the_sources() -> None:
    recorded = read_rows(NATIVE / "model" / "RESULT.md", 2)[1:]
    orders = load(NATIVE / "model" / "orders.py").orders_in(NATIVE)
    assert dict(recorded) == orders


def test_every_case_of_the_models_was_searched() -> None:
    cases = load(NATIVE / "model" / "cases.py").CASES
    recorded = read_rows(NATIVE / "model" / "RESULT.md", 5)[1:]
    assert [(row[4], row[3]) for row in recorded] == [(case.name, case.expected) for case in cases]
