"""Texts that ranks wrote, made fit for a terminal.

A call site, a note, an exception's words and a job's command line are whatever somebody's program
wanted them to be. Printed as they are, they could move the cursor, change the title, forge a line
of the report, or turn the direction of the writing.
"""

from __future__ import annotations

import re

__all__ = ["encodable", "escape", "shorten"]

# Characters that can be printed by Unicode's categories, and show nothing: fillers, variation
# selectors, the joiner of graphemes. `str.isprintable` doesn't know them.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_CODES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, limit: int = 200) -> str:
    r"""Make one line of printable characters of any text.

    What is not printable becomes what Python would write for it (`\x1b`, `\u202e`): control bytes
    of both blocks, bidirectional and zero-width marks, line and paragraph separators, characters
    that show nothing, lone surrogates, every space but the common one.

    Args:
        text: Anything.
        limit: The most characters to return; the middle of a longer text is left out.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    # What is left out need not be looked at: a character becomes one or more.
    text = shorten(text, max(limit, 1) * 2)
    shown = "".join(_escaped(character) for character in text)
    return shorten(shown, limit)


def encodable(text: str) -> str:
    r"""The same text with lone surrogates, as in names that aren't UTF-8, written as `\udc80`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int) -> str:
    """Leave out the middle of a text that has more than `limit` characters."""
    if len(text) <= limit:
        return text
    if limit < 5:
        return text[: max(limit, 0)]
    head = (limit - 3) // 2
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def _escaped(character: str) -> str:
    if character.isprintable() and not _BLANK.match(character):
        return character
    code = ord(character)
    if character in _CODES:
        return _CODES[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
