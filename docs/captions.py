"""Captions of listings: a line before a block that links to the block's file is its caption.

On GitHub it is a line above the block; on the site it becomes a part of it.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class Captions(SphinxTransform):
    """Turns a paragraph that is only a link to a file into the caption of the block after it."""

    default_priority = 200  # before Sphinx numbers what has a caption

    def apply(self, **_: Any) -> None:
        """Wrap each such paragraph and its block, as Sphinx does for the option `:caption:`."""
        for block in list(self.document.findall(nodes.literal_block)):
            parent, place = block.parent, block.parent.index(block)
            if place == 0 or not is_link_to_file(parent[place - 1]):
                continue
            paragraph = parent[place - 1]
            wrapper = nodes.container("", literal_block=True, classes=["literal-block-wrapper"])
            parent[place - 1 : place + 1] = [wrapper]
            wrapper += [nodes.caption(paragraph.rawsource, "", *paragraph.children), block]


def is_link_to_file(node: nodes.Node) -> bool:
    """Return whether a node is a paragraph whose only content is a link named like its target."""
    if not isinstance(node, nodes.paragraph) or len(node) != 1:
        return False
    link = node[0]
    return isinstance(link, nodes.reference) and link.get("refuri", "").endswith(
        f"/{link.astext()}"
    )


def setup(app: Any) -> dict[str, bool]:
    """Register the transformation."""
    app.add_transform(Captions)
    return {"parallel_read_safe": True}
