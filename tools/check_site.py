"""Check the documentation site as it was built, in a reader's place: `make docs` does it.

- Each page has a title, each picture a text for readers who do not see it, and each link to the
  site leads to a page and, if it has an anchor, to a place in it.
- A reader who types the listings of a page of the tutorial, in English or in Korean, gets the
  program in `examples/tutorial`, byte for byte.
- Its console sessions are those that `tests/docs/test_tutorial.py` executes.

python -m tools.check_site build/site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.fences import join_listings, read_fences

ROOT = Path(__file__).parents[1]
PROGRAMS = Path("examples/tutorial")
_VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}


@dataclass
class Page:
    """The parts of a page that are checked.

    Attributes:
        title: The text of its title.
        links: The targets of its links.
        anchors: The names of places in it.
        pictures: The address and the alternative text of each picture.
        listings: The text of the listings under each caption, by the address of the caption.
        sessions: The text of its console sessions.
    """

    title: str = ""
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    listings: dict[str, list[str]] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    """Fills a page from its HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._open: list[tuple[str, str]] = []
        self._text: list[str] = []
        self._caption = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.page.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "img":
            self.page.pictures.append((found.get("src", ""), found.get("alt", "").strip()))
        elif tag == "a" and "href" in found:
            self.page.links.append(found["href"])
            if self._is_inside("caption-text"):
                self._caption = found["href"]
        if tag in ("title", "pre"):
            self._text.clear()
        if tag not in _VOID:
            self._open.append((tag, found.get("class", "")))

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title" and not self._is_inside("svg"):
            self.page.title = "".join(self._text).strip()
        elif tag == "pre":
            text = "".join(self._text)
            if self._is_inside("literal-block-wrapper"):
                self.page.listings.setdefault(self._caption, []).append(text)
            if self._is_inside("highlight-console"):
                self.page.sessions.append(text)
        while self._open and self._open.pop()[0] != tag:
            pass  # HTML lets the end of some elements be left out

    def _is_inside(self, name: str) -> bool:
        """Return whether an element that is open is of this kind or class."""
        return any(name == tag or name in classes.split() for tag, classes in self._open)


def read_page(html: str) -> Page:
    """Return the parts of a page."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.page


def find_defects(site: Path, root: Path) -> list[str]:
    """Return a line for each defect of a site.

    Args:
        site: The directory of its pages.
        root: The directory of the repository from which it was built.
    """
    pages = {
        path.relative_to(site).as_posix(): read_page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    if not pages:
        return [f"{site} has no pages: build the site first, with `make docs`"]
    lines = [
        f"{name}: {defect}"
        for name, page in pages.items()
        for defect in _find_defects_of_page(name, page, pages, site)
    ]
    for source in sorted((root / "docs" / "tutorial").glob("*.md")):
        for folder in ("tutorial", "ko/tutorial"):
            name = f"{folder}/{source.stem}.html"
            if name in pages:
                lines += [f"{name}: {defect}" for defect in _compare(pages[name], source, root)]
    return lines + [
        f"{folder}: no page has the listing of {program.relative_to(root)}"
        for folder in ("tutorial", "ko/tutorial")
        for program in sorted((root / PROGRAMS).glob("*.py"))
        if not any(
            name.startswith(f"{folder}/") and _find_listing(page, program)
            for name, page in pages.items()
        )
    ]


def _find_defects_of_page(
    name: str, page: Page, pages: dict[str, Page], site: Path
) -> Iterator[str]:
    if not page.title:
        yield "no title"
    for address, text in page.pictures:
        if not text:
            yield f"the picture {address} has no alternative text"
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (site / name).parent / unquote(parts.path) if parts.path else site / name
        target = target.resolve()
        if not target.is_file():
            yield f"the link {link} leads nowhere"
            continue
        found = pages.get(target.relative_to(site.resolve()).as_posix())
        # An anchor without a name is the top of the page.
        if found and parts.fragment and unquote(parts.fragment) not in found.anchors:
            yield f"the link {link} leads to no place of that page"


def _find_listing(page: Page, program: Path) -> str:
    """Return the text of the listings under the name of a program; empty if there are none."""
    address = "/" + (PROGRAMS / program.name).as_posix()
    found = [text for each, text in page.listings.items() if each.endswith(address)]
    return join_listings(found[0]) if found else ""


def _compare(page: Page, source: Path, root: Path) -> Iterator[str]:
    """Compare a page of the tutorial with the programs, and with its English source."""
    for address in page.listings:
        program = root / PROGRAMS / Path(urlsplit(address).path).name
        if not program.is_file():
            yield f"the caption {address!r} names no program in {PROGRAMS}"
        elif _find_listing(page, program) != program.read_text(encoding="utf-8"):
            yield f"its listings are not {PROGRAMS / program.name}, typed one after another"
    sessions = [fence.text for fence in read_fences(source) if fence.language == "console"]
    if page.sessions != sessions:
        yield f"its console sessions are not those of {source.relative_to(root)}"


if __name__ == "__main__":
    defects = find_defects(Path(sys.argv[1]), ROOT)
    print("\n".join(defects), end="\n" * bool(defects))
    sys.exit(bool(defects))
