"""The commands as their help shows them, and the options of `phalanx` itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable

_Parameter = TypeVar("_Parameter")


class Command(TyperCommand):
    """A command whose help ends with the address of the documentation.

    The help shows flags without a type: `--version`, not `--version <bool>`.
    """

    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters, with that of `--help`."""
        return _hide_types_of_flags(super().get_params(context))

    def format_help(self, context: Any, formatter: Any) -> None:
        """Write the help."""
        documentation = _describe_documentation()
        if documentation not in (self.epilog or ""):
            self.epilog = _join(self.epilog, documentation)
        super().format_help(context, formatter)


class Group(TyperGroup):
    """A command with subcommands; its help is like that of a command, with the exit codes."""

    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters, with that of `--help`."""
        return _hide_types_of_flags(super().get_params(context))

    def format_help(self, context: Any, formatter: Any) -> None:
        """Write the help."""
        self.epilog = _join(_describe_exit_codes(), _describe_documentation())
        super().format_help(context, formatter)


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _show_version() if wanted else None,
            is_eager=True,
            help="Show the versions.",
        ),
    ] = False,
) -> None:
    """Declare the options of the command itself."""


def _show_version() -> None:
    from importlib import metadata  # slow to import

    print(f"phalanx {metadata.version('phalanx')}, torch {metadata.version('torch')}")
    raise typer.Exit


def _hide_types_of_flags(parameters: Iterable[_Parameter]) -> list[_Parameter]:
    found = list(parameters)
    for parameter in found:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""  # type: ignore[attr-defined]
    return found


def _join(*paragraphs: str | None) -> str:
    return "\n\n".join(filter(None, paragraphs))


def _describe_documentation() -> str:
    """Return where the documentation is; empty until `project.urls` of pyproject.toml names it."""
    from importlib import metadata  # slow to import

    for entry in metadata.metadata("phalanx").get_all("Project-URL", []):
        label, _, address = entry.partition(", ")
        if label == "Documentation":
            return f"Documentation: {address}"
    return ""


def _describe_exit_codes() -> str:
    """Return the table of exit codes, one paragraph for rich's markup."""
    lines = (f"{code:>7}  {meaning}" for code, meaning in ExitCode.MEANINGS.items())
    return "\n".join(["Exit codes:", *lines])
