"""The reference: a page for each public package and each command, and nothing missing on them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer.testing

from phalanx import cli
from tests.unit.test_docstring_examples import PUBLIC

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PUBLIC_NAMES = re.compile(r"```\{public-names\} (\S+)\n(?::exclude: (.*)\n)?```")


@pytest.fixture(scope="module")
def command_line() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "command_line", REFERENCE.parent / "command_line.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_package_has_one_page() -> None:
    overview = (REFERENCE / "api.md").read_text()
    documented = []
    for page in (REFERENCE / "api").glob("*.md"):
        ((package, _),) = PUBLIC_NAMES.findall(page.read_text())
        documented.append(package)
        assert f"(api/{page.name})" in overview
        assert f"\napi/{page.stem}\n" in overview
    assert sorted(documented) == sorted(PUBLIC)


def test_names_that_a_page_leaves_out_are_on_another() -> None:
    pages = {page: page.read_text() for page in (REFERENCE / "api").glob("*.md")}
    blocks = [PUBLIC_NAMES.findall(text)[0] for text in pages.values()]
    shown = {
        (package, name): getattr(importlib.import_module(package), name)
        for package, excluded in blocks
        for name in importlib.import_module(package).__all__
        if name not in excluded.split()
    }
    for package, excluded in blocks:
        for name in set(excluded.split()) - {"__version__"}:
            value = getattr(importlib.import_module(package), name)
            assert any(value is other for other in shown.values()), f"{package}.{name}"


def test_each_command_has_a_page() -> None:
    overview = (REFERENCE / "cli.md").read_text()
    assert {page.stem for page in (REFERENCE / "cli").glob("*.md")} == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        page = (REFERENCE / "cli" / f"{name}.md").read_text()
        assert f"# `phalanx {name}`\n\n```{{command}} {name}\n```" in page
        assert f"\ncli/{name}\n" in overview


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_page_of_a_command_has_the_options_of_its_help(
    command_line: ModuleType, name: str
) -> None:
    runner = typer.testing.CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    shown = runner.invoke(cli.make_app(), [name, "--help"], prog_name="phalanx").stdout
    options = set(re.findall(r"^│ +(--[a-z-]+)", shown, re.MULTILINE))
    assert "--help" in options
    text = command_line.describe_command(name)
    entries = re.findall(r"^```\{option\} (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
    assert sorted(entries) == sorted(options)


def test_prose_of_a_help_text_becomes_markdown(command_line: ModuleType) -> None:
    assert command_line.mark_prose("With --ssh 'ssh -p 22', see phalanx.train.Elastic [x].") == (
        "With `--ssh` `ssh -p 22`, see `phalanx.train.Elastic` \\[x\\]."
    )
    assert command_line.mark_prose("Open https://ui.perfetto.dev. Set a_b.") == (
        "Open <https://ui.perfetto.dev>. Set `a_b`."
    )
