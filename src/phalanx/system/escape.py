"""Escaping of text written by ranks, for output to a terminal.

A call site, a note, an exception's message and a job's command line are arbitrary text. Printed
unescaped, they could move the cursor, change the title, forge a line of the report, or reverse the
writing direction.
"""

from __future__ import annotations

import re

# Characters that are printable by their Unicode category but invisible: fillers, variation
# selectors, the grapheme joiner. `str.isprintable` returns True for them.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_CODES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, limit: int = 200) -> str:
    r"""Convert any text to one line of printable characters.

    Unprintable characters are replaced by Python's escapes (`\x1b`, `\u202e`): C0 and C1 control
    characters, bidirectional and zero-width marks, line and paragraph separators, invisible
    characters, lone surrogates, and every space but U+0020.

    Args:
        text: Any text.
        limit: Maximum number of characters to return; the middle of a longer text is omitted.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    # Escaping never shortens a text, so the part to be omitted need not be escaped.
    text = shorten(text, max(limit, 1) * 2)
    shown = "".join(_escape_character(character) for character in text)
    return shorten(shown, limit)


def encodable(text: str) -> str:
    r"""Escape lone surrogates, as in names that are not UTF-8, as `\udc80`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int) -> str:
    """Omit the middle of a text that has more than `limit` characters."""
    if len(text) <= limit:
        return text
    if limit < 5:
        return text[: max(limit, 0)]
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def _escape_character(character: str) -> str:
    if character.isprintable() and not _BLANK.match(character):
        return character
    code = ord(character)
    if character in _CODES:
        return _CODES[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
