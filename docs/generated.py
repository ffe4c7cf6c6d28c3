"""Directives of the documentation whose content comes from the code, or from README.

- `environment-variables`: the list of all environment variables.
- `commands`, `command`: the table of all commands; usage, arguments and options of one.
- `public-names`: the public names of a module.
- `from-readme`: a part of README.
- links to files of the repository that are not pages of the site.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any, ClassVar

from command_line import describe_command, summarize_commands
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*|\.\./[^)#\s]*)(#[^)]*)?\)")


class GeneratedDirective(SphinxDirective):
    """A directive whose content is Markdown made by `generate`."""

    def run(self) -> list[nodes.Node]:
        """Parse the Markdown in place of the directive."""
        self.env.note_reread()  # the content changes with the code, and not with the page
        container = nodes.container()
        lines = StringList(self.generate().splitlines(), source=self.name)
        page = self.state_machine.node
        before = len(page.children)
        self.state.nested_parse(lines, self.content_offset, container, match_titles=True)
        # The parser has added sections to the page itself, in front of the text above them.
        sections = page.children[before:]
        del page[before:]
        return [*container.children, *sections]

    def generate(self) -> str:
        """Return the content."""
        raise NotImplementedError


class EnvironmentVariables(GeneratedDirective):
    """A list of the environment variables."""

    def generate(self) -> str:
        """Return a list with an entry for each variable."""
        from phalanx import env

        return "\n".join(f"`{name}`\n: {text}\n" for name, text in sorted(env.VARIABLES.items()))


class Command(GeneratedDirective):
    """Usage, arguments and options of a command; of `phalanx` itself without an argument."""

    optional_arguments = 1

    def generate(self) -> str:
        """Return the sections of the command."""
        return describe_command(self.arguments[0] if self.arguments else "")


class Commands(GeneratedDirective):
    """A table of all commands."""

    def generate(self) -> str:
        """Return the table."""
        return summarize_commands()


class PublicNames(GeneratedDirective):
    """A table of the public names of a module, and the documentation of each.

    Names that another page documents, and submodules, are left out.
    """

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"exclude": lambda names: names.split()}

    def generate(self) -> str:
        """Return the table, then the documentation in the order of the table."""
        name = self.arguments[0]
        module = importlib.import_module(name)
        rows, documented = [], [f".. py:module:: {name}\n"]
        for each in sorted(module.__all__, key=str.lower):
            value = getattr(module, each)
            is_error = getattr(value, "__module__", "") == "phalanx.errors"  # on another page
            if is_error or inspect.ismodule(value) or each in self.options.get("exclude", ()):
                continue
            first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
            if not (inspect.isclass(value) or callable(value)):
                first, kind = "A constant.", "data"
            else:
                kind = "class" if inspect.isclass(value) else "function"
            rows.append(f"| {{py:obj}}`~{name}.{each}` | {first} |")
            documented.append(f".. auto{kind}:: {name}.{each}\n")
            if kind == "class":
                documented.append("   :members:\n")
        table = "\n".join(("| name | purpose |", "| --- | --- |", *rows))
        return f"{table}\n\n```{{eval-rst}}\n{''.join(documented)}```\n"


class FromReadme(GeneratedDirective):
    """A section of README, or rows of its table, so that its programs and numbers exist once."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {
        "rows": lambda rows: [row.strip() for row in rows.split(";")],
        "blocks": lambda numbers: [int(number) for number in numbers.split()],
    }

    def generate(self) -> str:
        """Return the blocks with the given numbers, or the table with the given rows."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        found = re.search(rf"(?ms)^## {re.escape(self.arguments[0])}\n(.*?)(?=^## |\Z)", text)
        if found is None:
            raise self.error(f"README.md has no section {self.arguments[0]!r}")
        if "blocks" in self.options:
            blocks = re.findall(r"(?ms)^```.*?^```$", found[1])
            return "\n\n".join(blocks[number] for number in self.options["blocks"])
        table = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in re.findall(r"(?m)^\|.*\|$", found[1])
        ]
        rows = {row[0]: row for row in table[2:]}
        if unknown := set(self.options["rows"]) - set(rows):
            raise self.error(f"the table of README.md has no rows {unknown}")
        shown = [*table[:2], *(rows[name] for name in self.options["rows"])]
        # The column that names the measurement is that of README.
        lines = (f"| {' | '.join([row[0] or 'operation', *row[2:]])} |" for row in shown)
        return "\n".join(lines).replace("](docs/", "](")


def link_to_source(app: Any, name: str, source: list[str]) -> None:
    """Replace links to files that are not pages of the site by links to the repository."""
    folder = (ROOT / "docs" / name).parent

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[2]))
        is_page = target.is_relative_to(ROOT / "docs") and target.suffix != ""
        if is_page or not target.exists():
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        return f"{match[1]}{app.config.source_url}/{path}{match[3] or ''})"

    source[0] = LINK.sub(replace, source[0])


def setup(app: Any) -> dict[str, bool]:
    """Register the directives."""
    app.add_config_value("source_url", "", "env")
    app.add_directive("environment-variables", EnvironmentVariables)
    app.add_directive("command", Command)
    app.add_directive("commands", Commands)
    app.add_directive("public-names", PublicNames)
    app.add_directive("from-readme", FromReadme)
    app.connect("source-read", link_to_source)
    return {"parallel_read_safe": True}
