"""The fenced blocks of a page, and the checks that each of them declares.

A comment before a block says how it is checked:

- `<!-- file hello.py -->`: sessions of the page find the block under this name.
- `<!-- digits vary -->`: numbers with a decimal point are not compared.
- `<!-- numbers vary -->`: no number is compared, nor the name of the machine.
- `<!-- output varies -->`: the first words of lines without indentation are compared.
- `<!-- exit code 1 -->`: the command ends with this code instead of 0.
- `<!-- output of PATH -->`, `<!-- needs ...: PATH -->`: the test in that file checks it;
  `PATH::NAME` names the test.
- `<!-- not executed: REASON -->`: the block is a fragment, or needs what a test machine lacks.

A line ``[`messages.py`](../../examples/tutorial/messages.py)`` before a block is its caption: the
blocks of a page with the same caption are, one after another, that file.

Without a comment or a caption, Python is executed, commands after `$ ` in a console are executed
and their output is compared if the page shows any. Text in the tutorial is the output of the Python
block before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)(?:(?:<!-- (?P<comment>[^\n]*?) -->|\[`[^`\n]+`\]\((?P<program>[^)\n]+)\))\n"
    r"(?P=indent))?```(?P<language>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SESSION = re.compile(r"(?:(?:digits vary|numbers vary|output varies|exit code \d+)(?:, |$))+")


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        line: The number of its first line in the page.
        language: The language after the backticks.
        text: The lines between the backticks.
        comment: The text of the comment before it; empty if there is none.
        program: The target of the link in its caption; empty if it has none.
    """

    line: int
    language: str
    text: str
    comment: str
    program: str = ""

    @property
    def is_checked_elsewhere(self) -> bool:
        """True if the comment names another test, or a reason."""
        return self.comment.startswith(("output of ", "needs ", "not executed: "))

    @property
    def is_session(self) -> bool:
        """True if its commands are executed and their output is compared."""
        return self.language == "console" and not self.is_checked_elsewhere

    @property
    def file_name(self) -> str:
        """The name under which sessions of the page find it; empty if there is none."""
        return self.comment.removeprefix("file ") if self.comment.startswith("file ") else ""

    @property
    def exit_code(self) -> int:
        """The exit code of its commands."""
        match = re.search(r"exit code (\d+)", self.comment)
        return int(match[1]) if match else 0

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

    def find_defect(self, page: Path, root: Path) -> str:
        """Return the reason for which no test checks it, empty if one does.

        Args:
            page: The page that contains it.
            root: The directory of the repository.
        """
        if not re.fullmatch(r"\w+", self.language):
            return "it has no language"
        if self.comment.startswith("not executed: "):
            return "" if len(self.comment.split()) > 3 else "the reason is missing"
        if self.is_checked_elsewhere:
            path, _, name = self.comment.split()[-1].partition("::")
            if not (root / path).is_file():
                return f"there is no {path}"
            found = not name or f"def {name}(" in (root / path).read_text()
            return "" if found else f"{path} has no {name}"
        if self.program and not (page.parent / self.program).is_file():
            return f"there is no {self.program}"
        if self.comment and not (self.file_name or _SESSION.fullmatch(self.comment)):
            return f"the comment {self.comment!r} is unknown"
        if self.language == "text" and "tutorial" not in page.parts:
            return "" if self.comment else "text needs a comment"
        if self.language == "console":
            return "" if self.text.startswith("$ ") else "a session begins with `$ `"
        return "" if self.language in ("python", "text") else "nothing executes this language"


def read_fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, those in quotes included."""
    text = re.sub(r"^> ?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Fence(
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["text"],
            match["comment"] or "",
            match["program"] or "",
        )
        for match in _FENCE.finditer(text)
    ]


def join_listings(listings: Sequence[str]) -> str:
    """Return the file that a reader types from its listings: two empty lines are between them."""
    return "\n\n\n".join(text.strip("\n") for text in listings) + "\n"


def type_programs(page: Path) -> dict[str, str]:
    """Return the files that a reader types from a page, by name."""
    listings: dict[str, list[str]] = {}
    for fence in read_fences(page):
        if fence.program:
            listings.setdefault(Path(fence.program).name, []).append(fence.text)
    return {name: join_listings(texts) for name, texts in listings.items()}
