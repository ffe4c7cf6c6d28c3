"""Title, description and picture of a page in the preview of a link to it (OpenGraph)."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes

LENGTH = 200
PICTURE = "_static/preview.png"


def describe_page(
    app: Any, name: str, _template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """Add the title and the first paragraph of a page, and its address if the site has one."""
    if document is None:
        return
    tags = {
        "og:site_name": app.config.project,
        "og:type": "website",
        "og:title": app.env.titles[name].astext(),
    }
    for paragraph in document.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            text = " ".join(paragraph.astext().split())
            short = text if len(text) <= LENGTH else text[: text.rindex(" ", 0, LENGTH)] + " ..."
            tags |= {"description": short, "og:description": short}
            break
    if app.config.html_baseurl:
        base = app.config.html_baseurl.rstrip("/")
        tags |= {
            "og:url": f"{base}/{app.builder.get_target_uri(name)}",
            "og:image": f"{base}/{PICTURE}",
            "twitter:card": "summary_large_image",
        }
    lines = (
        f'<meta {"property" if ":" in key else "name"}="{key}" content="{escape(value)}">\n'
        for key, value in tags.items()
    )
    context["metatags"] = context.get("metatags", "") + "".join(lines)


def setup(app: Any) -> dict[str, bool]:
    """Register the tags."""
    app.connect("html-page-context", describe_page)
    return {"parallel_read_safe": True}
