"""Suggestions for words that are mistyped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def find_similar(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is most similar to a word; empty if none is similar."""
    import difflib  # for messages only

    found = difflib.get_close_matches(word, list(candidates), n=1)
    return found[0] if found else ""


def suggest(word: str, candidates: Iterable[str]) -> str:
    """Return the end of a message that asks for the most similar candidate; empty if none is."""
    similar = find_similar(word, candidates)
    return f"; did you mean {similar!r}?" if similar else ""
