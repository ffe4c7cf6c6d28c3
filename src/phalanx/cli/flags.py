"""Commands whose help shows a flag without a type: `--version`, not `--version <bool>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

_Parameter = TypeVar("_Parameter")


class Command(TyperCommand):
    """A command."""

    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters, with that of `--help`."""
        return _hide_types_of_flags(super().get_params(context))


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, context: Any) -> list[Any]:
        """Return the parameters, with that of `--help`."""
        return _hide_types_of_flags(super().get_params(context))


def _hide_types_of_flags(parameters: Iterable[_Parameter]) -> list[_Parameter]:
    found = list(parameters)
    for parameter in found:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""  # type: ignore[attr-defined]
    return found
