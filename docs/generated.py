"""Directives of the documentation whose content comes from the code.

- `environment-variables`: the list of all environment variables.
- `command-line`: the help of each command.
- links to files of the repository that are not pages of the site.
- a check that the translations follow the current English pages.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

CODE = re.compile(r"(?<![`:])`([^`]+)`(?!`)(\w?)")
FOLLOWS = re.compile(r"<!-- follows (\S+) ([0-9a-f]{12}) -->")
ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*|\.\./[^)#\s]*)(#[^)]*)?\)")


class GeneratedDirective(SphinxDirective):
    """A directive whose content is Markdown made by `generate`."""

    def run(self) -> list[nodes.Node]:
        """Parse the Markdown in place of the directive."""
        self.env.note_reread()  # the content changes with the code, and not with the page
        container = nodes.container()
        lines = StringList(self.generate().splitlines(), source=self.name)
        self.state.nested_parse(lines, self.content_offset, container, match_titles=True)
        return container.children

    def generate(self) -> str:
        """Return the content."""
        raise NotImplementedError


class EnvironmentVariables(GeneratedDirective):
    """A list of the environment variables."""

    def generate(self) -> str:
        """Return a list with an entry for each variable."""
        from phalanx import env

        return "\n".join(f"`{name}`\n: {text}\n" for name, text in sorted(env.VARIABLES.items()))


class CommandLine(GeneratedDirective):
    """The help texts of all commands."""

    def generate(self) -> str:
        """Return a section for each command."""
        import typer.testing

        from phalanx import cli

        os.environ["COLUMNS"] = "88"  # the width of a block of code
        runner, parts = typer.testing.CliRunner(), []
        for command in ("", *cli.COMMANDS):
            arguments = [*filter(None, [command]), "--help"]
            ended = runner.invoke(cli.make_app(), arguments, prog_name="phalanx")
            title = f"phalanx {command}".strip()
            parts.append(f"## `{title}`\n\n```text\n{ended.stdout.strip()}\n```\n")
        return "\n".join(parts)


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


def mark_code(_app: Any, *details: Any) -> None:
    """Turn `code` of a docstring into the notation of reStructuredText, ``code``."""
    lines: list[str] = details[-1]
    # An escaped space separates the code from letters right after it, as in `RRef`s.
    text = CODE.sub(
        lambda match: f"``{match[1]}``" + (f"\\ {match[2]}" if match[2] else ""), "\n".join(lines)
    )
    lines[:] = text.splitlines()


def skip_members_of_torch(_app: Any, *details: Any) -> bool | None:
    """Leave out methods whose documentation is PyTorch's."""
    member = details[2]
    return True if getattr(member, "__module__", "").startswith("torch.") else None


def check_translations(_app: Any) -> None:
    """Fail if an English page has changed since its translation was last compared with it."""
    for line in stale_translations():
        raise ExtensionError(line)


def stale_translations() -> list[str]:
    """Return a line for each translation of another version of its English page.

    The first line of a translation names its English page and the version that it follows.
    """
    stale = []
    for page in sorted((ROOT / "docs" / "ko").rglob("*.md")):
        name = page.relative_to(ROOT)
        first = page.read_text(encoding="utf-8").partition("\n")[0]
        match = FOLLOWS.fullmatch(first)
        if match is None:
            stale.append(f"{name}: the first line must be <!-- follows PATH VERSION -->")
        elif (version := page_version(ROOT / match[1])) != match[2]:
            stale.append(f"{name} follows {match[2]} of {match[1]}, which is {version} now")
    return stale


def page_version(page: Path) -> str:
    """Return the version of a page: the first digits of its SHA-256."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:12]


def shorten_defaults(*event: Any) -> tuple[str, str | None] | None:
    """Replace the representation of an enumeration's member in a signature by its name."""
    signature, returned = event[-2:]
    if not signature:
        return None
    return re.sub(r"<RedOpType\.(\w+): \d+>", r"ReduceOp.\1", signature), returned


def setup(app: Any) -> dict[str, bool]:
    """Register the directives."""
    app.add_config_value("source_url", "", "env")
    app.add_directive("environment-variables", EnvironmentVariables)
    app.add_directive("command-line", CommandLine)
    app.connect("builder-inited", check_translations)
    app.connect("source-read", link_to_source)
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", skip_members_of_torch)
    return {"parallel_read_safe": True}
