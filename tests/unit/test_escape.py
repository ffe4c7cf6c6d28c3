"""Escaping of texts written by ranks."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.system.escape import escape, shorten

ANY = st.text(st.characters(exclude_categories=()), max_size=300)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train.py:40", "train.py:40"),
        ("grün, 漢字, 🙂", "grün, 漢字, 🙂"),
        ("", ""),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\nb\r\tc\x0b\x0c\x85", r"a\nb\r\tc\x0b\x0c\x85"),
        ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
        ("user\u202etxt.exe\u2066\u2069\u200f\u061c", r"user\u202etxt.exe\u2066\u2069\u200f\u061c"),
        ("a\u200bb\u200db\ufeff\u00ad", r"a\u200bb\u200db\ufeff\xad"),
        ("\u3164\u115f\u2800\ufe0f\U000e0101", r"\u3164\u115f\u2800\ufe0f\U000e0101"),
        ("\ud800 \udfff", r"\ud800 \udfff"),
        ("\x7f\x00", r"\x7f\x00"),
        ("a\u00a0b\u3000c", r"a\xa0b\u3000c"),
        ("\U000e0041\ue000", r"\U000e0041\ue000"),
    ],
)
def test_escaped_characters(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(ANY, st.integers(min_value=0, max_value=80))
@example("\x1b" * 300, 40)
@example("\U000e0101" * 300, 5)
def test_any_text_is_one_short_line_of_printable_characters(text: str, limit: int) -> None:
    shown = escape(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()
    assert shown.splitlines() in ([], [shown])
    shown.encode()
    directions = {unicodedata.bidirectional(character) for character in shown}
    assert not directions & {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN"}


@given(ANY)
def test_a_text_that_fits_is_complete(text: str) -> None:
    shown = escape(text, 10_000)
    kept = [c for c in text if c in shown]
    assert all(c.isprintable() for c in kept)
    assert len(shown) >= len(text)


def test_the_middle_is_omitted() -> None:
    assert shorten("0123456789", 10) == "0123456789"
    assert shorten("0123456789abcdef", 9) == "012...def"
    assert shorten("0123456789", 3) == "012"
    assert escape("x" * 10_000_000, 20) == "xxxxxxxx...xxxxxxxxx"
