"""A mutant: a mistake seeded into the core."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    caught_by: str
    # Pairs of old and new text.
    changes: tuple[tuple[str, str], ...]
