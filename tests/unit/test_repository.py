"""Invariants of the repository."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from phalanx import _native

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "phalanx"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Absolute paths of a particular machine.
FORBIDDEN = re.compile(r"(?<![\w.])/(?:work|root|home|tmp/w)/")


def tracked_files() -> Iterator[Path]:
    """Yield the files of the repository, including untracked but not ignored files."""
    list_files = ["git", "-c", "safe.directory=*", "ls-files"]
    command = [*list_files, "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            yield ROOT / name


def project_section(name: str) -> str:
    """Return the text of a table of pyproject.toml (Python 3.10 has no TOML reader)."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no [{name}] in pyproject.toml"
    return found[1]


def public_names(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def modules_after(statement: str, autoload: bool) -> set[str]:
    script = f"{statement}; import json, sys; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(result.stdout))


def test_all_versions_are_equal() -> None:
    declared = re.search(r'^version = "(.+)"$', project_section("project"), re.MULTILINE)
    assert declared
    assert phalanx.__version__ == declared[1]
    assert importlib.metadata.version("phalanx") == declared[1]


def test_the_conda_recipe_agrees_with_the_package() -> None:
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    assert f'version: "{phalanx.__version__}"' in recipe
    run_section = recipe.partition("  run:\n    - python\n")[2].partition("\n\n")[0]
    requirements = re.findall(r"- (\S+) (>=\S+)", run_section)
    declared = re.search(r"(?s)dependencies = \[\n(.*?)\n\]", project_section("project"))
    assert declared
    packages = {name.replace("pytorch", "torch"): version for name, version in requirements}
    assert packages == dict(re.findall(r'"(\w+)(>=[^"]+)"', declared[1]))
    # The recipe names CMake and Ninja too: elsewhere, scikit-build-core installs them.
    for name, version in re.findall(r'"([\w-]+)(>=[^"]+)"', project_section("build-system")):
        assert f"- {name} {version}\n" in recipe


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_torch_finds_the_backend() -> None:
    entries = importlib.metadata.entry_points(group="torch.backends", name="phalanx")
    assert {entry.value for entry in entries} == {"phalanx._autoload:register"}


def test_the_command_is_installed() -> None:
    entries = importlib.metadata.entry_points(group="console_scripts", name="phalanx")
    assert [callable(entry.load()) for entry in entries] == [True]


def test_torch_is_not_a_build_requirement() -> None:
    assert "torch" not in project_section("build-system")


def test_the_makefile_installs_the_build_requirements() -> None:
    requires = re.search(r"^requires = \[(.*)\]$", project_section("build-system"), re.MULTILINE)
    assert requires
    makefile = (ROOT / "Makefile").read_text()
    for requirement in requires[1].split(", "):
        assert requirement in makefile


def test_import_torch_imports_only_two_small_modules() -> None:
    added = modules_after("import torch", autoload=True) - modules_after(
        "import torch", autoload=False
    )
    added = {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names}
    assert added == {"phalanx", "phalanx._autoload"}


def test_importing_the_package_loads_no_command_line() -> None:
    loaded = modules_after("import phalanx", autoload=True)
    assert not loaded & {"typer", "rich", "sklearn", "phalanx.cli", "phalanx.testing"}


def test_every_package_has_a_docstring() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert PACKAGE in folders
    for folder in folders:
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder} has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"


def test_the_stub_matches_the_native_module() -> None:
    stub = public_names(ast.parse((PACKAGE / "_native.pyi").read_text()))
    native = {name for name in dir(_native) if not name.startswith("_")}
    assert stub == native


def test_no_paths_of_a_particular_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # a picture
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs_in_the_tests(example: Path) -> None:
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert any(example.name in text for text in tests), f"no test names {example.name}"


def test_there_are_examples() -> None:
    assert EXAMPLES
