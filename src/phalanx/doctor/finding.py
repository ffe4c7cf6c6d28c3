"""What a check says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "Level", "Says"]

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: Under which heading it stands.
        name: What was looked at; with the area it stays the same from version to version.
        level: "ok"; "note": Phalanx works, but not all of it or not at its best; "problem".
        words: What was found, a sentence without its full stop.
        advice: What to do next; empty if all is well.
        values: The same as numbers and texts, for programs.
    """

    area: str
    name: str
    level: Level
    words: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Finding:
        """From what `as_json` gave, perhaps on another host."""
        return cls(**found)


@dataclass(frozen=True)
class Says:
    """Makes the findings of one area."""

    area: str

    def ok(self, name: str, words: str, /, **values: Any) -> Finding:
        """All is well."""
        return Finding(self.area, name, "ok", words, "", values)

    def note(self, name: str, words: str, advice: str, /, **values: Any) -> Finding:
        """It works, but there is something to know."""
        return Finding(self.area, name, "note", words, advice, values)

    def problem(self, name: str, words: str, advice: str, /, **values: Any) -> Finding:
        """It doesn't work."""
        return Finding(self.area, name, "problem", words, advice, values)
