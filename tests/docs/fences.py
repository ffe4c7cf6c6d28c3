"""The fenced blocks of a page, and the checks that each of them declares.

A comment before a block says how it is checked:

- `<!-- examples/tutorial/messages.py -->`: the block is part of that file.
- `<!-- digits vary -->`: numbers with a decimal point are not compared.
- `<!-- output of PATH -->`, `<!-- needs ...: PATH -->`: the test in that file checks it.
- `<!-- not executed: REASON -->`: the block is a fragment.

Without a comment, Python is executed, commands after `$ ` in a console are executed and their
output is compared, and text is the output of the Python block before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        line: The number of its first line in the page.
        language: The language after the backticks.
        text: The lines between the backticks.
        comment: The text of the comment before it; empty if there is none.
    """

    line: int
    language: str
    text: str
    comment: str

    @property
    def is_checked_elsewhere(self) -> bool:
        """True if the comment names another test, or a reason."""
        return self.comment.startswith(("output of ", "needs ", "not executed: "))

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands of a console, each with the lines of its output."""
        return [
            (command, output.splitlines())
            for command, _, output in (
                part.partition("\n")
                for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
            )
        ]


def read_fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, those in quotes included."""
    text = re.sub(r"^> ?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Fence(
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["comment"] or "",
        )
        for match in _FENCE.finditer(text)
    ]
