"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A finding about one subject.

    Attributes:
        area: Heading of the finding.
        name: Subject of the finding. Area and name are stable across versions.
        level: "ok"; "note" if Phalanx works, but not completely or not at its best; or "problem".
        message: Description of the finding, a sentence without its full stop.
        advice: Suggested next step; empty if all is well.
        values: The same information as numbers and strings, for programs.
    """

    area: str
    name: str
    level: Level
    message: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FindingFactory:
    """A factory of the findings of one area."""

    area: str

    def ok(self, name: str, message: str, /, **values: Any) -> Finding:
        """Create a finding that all is well."""
        return Finding(self.area, name, "ok", message, "", values)

    def note(self, name: str, message: str, advice: str, /, **values: Any) -> Finding:
        """Create a finding that the subject works, with a limitation."""
        return Finding(self.area, name, "note", message, advice, values)

    def problem(self, name: str, message: str, advice: str, /, **values: Any) -> Finding:
        """Create a finding that the subject does not work."""
        return Finding(self.area, name, "problem", message, advice, values)

    def problem_from(self, name: str, error: Exception, prefix: str = "") -> Finding:
        """Create a finding from an error whose message is a description, a colon and advice."""
        message, _, advice = str(error).partition(": ")
        return self.problem(name, f"{prefix}{message}", f"{advice[:1].upper()}{advice[1:]}.")
