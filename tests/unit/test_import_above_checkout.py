"""`import phalanx` in the directory above a checkout, which Python finds before the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import phalanx

ROOT = Path(__file__).parents[2]


def run_above_checkout(
    folder: Path, code: str, *options: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory that has a checkout named `phalanx`."""
    (folder / "phalanx").mkdir()
    shutil.copy(ROOT / "__init__.py", folder / "phalanx")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_the_package_the_error_says_what_to_do(tmp_path: Path) -> None:
    ended = run_above_checkout(tmp_path, "import phalanx", "-S")  # without its packages
    assert ended.returncode == 1
    checkout = tmp_path / "phalanx"
    assert f"ImportError: {checkout} is the checkout of Phalanx, not the package" in ended.stderr
    assert f"{sys.executable} -m pip install {checkout}" in ended.stderr


def test_an_installed_package_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "site" / "phalanx"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("from phalanx.part import value\n")
    (package / "part" / "__init__.py").write_text("value = 7\n")
    code = (
        "import phalanx, sys, phalanx.part; assert sys.modules['phalanx'] is phalanx; "
        "print(phalanx.value, phalanx.__file__)"
    )
    ended = run_above_checkout(tmp_path, code, "-S", path=str(package.parent))
    assert ended.stdout.split() == ["7", str(package / "__init__.py")], ended.stderr


def test_the_package_of_this_interpreter_is_imported(tmp_path: Path) -> None:
    code = "import phalanx; print(phalanx.init, phalanx.__file__)"
    path = os.environ.get("PYTHONPATH")
    ended = run_above_checkout(tmp_path, code, path=path)
    assert ended.stdout.endswith(f" {phalanx.__file__}\n"), ended.stderr
