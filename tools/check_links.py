"""Check the links of all Markdown pages of the repository.

A link to a file must lead to a file or directory of the repository, and its anchor to a heading of
that page. A link to another site must be a well-formed URL; it is not opened.

python tools/check_links.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(
    r"^(?P<indent>[> ]*)(`{3,}|~{3,}).*?^(?P=indent)\2[^\n]*$", re.MULTILINE | re.DOTALL
)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"\]\(\s*<?([^)\s>]*)>?[^)]*\)|^\[[^\]]+\]:\s+(\S+)|<(?:img|a)[^>]*?=\"(.*?)\"", re.MULTILINE
)
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def blank(match: re.Match[str]) -> str:
    """Return the line breaks of a match, which keep the numbers of lines."""
    return "\n" * match[0].count("\n")


def find_links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each link of a page, apart from those in code."""
    text = _CODE.sub(blank, _FENCE.sub(blank, text))
    for match in _LINK.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1] or match[2] or match[3] or ""


def find_anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    anchors: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in _HEADING.findall(_FENCE.sub(blank, text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors | set(re.findall(r'(?:id|name)="([^"]+)"', text))


def find_defect(page: Path, target: str, root: Path) -> str:
    """Return the reason for which a link of a page leads nowhere, empty if there is none."""
    try:
        parts = urlsplit(target)
    except ValueError as error:
        return str(error)
    if parts.scheme or parts.netloc:
        if parts.scheme == "mailto":
            return "" if "@" in parts.path else "not an address"
        is_url = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+(:\d+)?", parts.netloc)
        return "" if is_url else "not a URL of http or https"
    if not target:
        return "no target"
    found = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not found.is_relative_to(root):
        return "outside of the repository"
    if not found.exists():
        return "no such file"
    if parts.fragment and found.suffix == ".md":
        is_known = unquote(parts.fragment) in find_anchors(found.read_text(encoding="utf-8"))
        return "" if is_known else "no such heading"
    return "an anchor of what is no page" if parts.fragment else ""


def find_broken_links(pages: list[Path], root: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    return [
        f"{page.relative_to(root)}:{line}: {target}: {defect}"
        for page in pages
        for line, target in find_links(page.read_text(encoding="utf-8"))
        if (defect := find_defect(page, target, root))
    ]


def list_pages(root: Path) -> list[Path]:
    """Return the Markdown files of the repository."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in names.splitlines() if (root / name).is_file()]


if __name__ == "__main__":
    broken = find_broken_links(list_pages(ROOT), ROOT)
    print("\n".join(broken), end="\n" * bool(broken))
    sys.exit(bool(broken))
