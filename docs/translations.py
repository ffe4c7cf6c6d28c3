"""Translations of pages: a check that they are current, and links to them and back."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

FOLLOWS = re.compile(r"<!-- follows (\S+) ([0-9a-f]{12}) -->")
LANGUAGES = {"en": "English", "ko": "한국어"}
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_TITLE = re.compile(r"^# .*$", re.MULTILINE)


def check_translations(_app: Any) -> None:
    """Fail if an English page has changed since its translation was last compared with it."""
    for line in stale_translations():
        raise ExtensionError(line)


def stale_translations() -> list[str]:
    """Return a line for each translation of another version of its English page.

    The first line of a translation names its English page and the version that it follows.
    """
    stale = []
    for page in sorted((ROOT / "docs" / "ko").rglob("*.md")):
        name = page.relative_to(ROOT)
        first = page.read_text(encoding="utf-8").partition("\n")[0]
        match = FOLLOWS.fullmatch(first)
        if match is None:
            stale.append(f"{name}: the first line must be <!-- follows PATH VERSION -->")
        elif (version := page_version(ROOT / match[1])) != match[2]:
            stale.append(f"{name} follows {match[2]} of {match[1]}, which is {version} now")
    return stale


def page_version(page: Path) -> str:
    """Return the version of a page: the first digits of its SHA-256."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:12]


@functools.cache
def pair_pages() -> dict[str, str]:
    """Return the English page of each translation, both as names of documents of the site."""
    pairs = {}
    for page in sorted((DOCS / "ko").rglob("*.md")):
        match = FOLLOWS.match(page.read_text(encoding="utf-8"))
        if match is not None:
            english = "index" if match[1] == "README.md" else match[1].removeprefix("docs/")
            name = page.relative_to(DOCS).with_suffix("").as_posix()
            pairs[name] = english.removesuffix(".md")
    return pairs


def find_translation(name: str) -> tuple[str, str] | None:
    """Return the page in the other language and that language; None if there is none."""
    pairs = pair_pages()
    if name in pairs:
        return pairs[name], "en"
    return next(((ko, "ko") for ko, english in pairs.items() if english == name), None)


def link_translation(_app: Any, name: str, source: list[str]) -> None:
    """Add a link to the other language below the title of a page that has one."""
    if found := find_translation(name):
        target = os.path.relpath(f"{found[0]}.md", os.path.dirname(name))
        link = f"```{{container}} translation\n[{LANGUAGES[found[1]]}]({target})\n```"
        source[0] = _TITLE.sub(lambda title: f"{title[0]}\n\n{link}", source[0], count=1)


def describe_language(
    app: Any, name: str, _template: str, context: dict[str, Any], _document: Any
) -> None:
    """Name the language of a page, and its translation, in its head."""
    context["language"] = "ko" if name.startswith("ko/") else "en"
    if found := find_translation(name):
        target = app.builder.get_relative_uri(name, found[0])
        context["metatags"] = context.get("metatags", "") + (
            f'<link rel="alternate" hreflang="{found[1]}" href="{target}">\n'
        )


def setup(app: Any) -> dict[str, bool]:
    """Register the check and the links."""
    app.connect("builder-inited", check_translations)
    app.connect("source-read", link_translation)
    app.connect("html-page-context", describe_language)
    return {"parallel_read_safe": True}
