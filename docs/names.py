"""Names of code in docstrings and signatures, as links to their documentation.

Names of other projects are in `PAGES`, so that the site needs no network to be built.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

CODE = re.compile(r"(?<![`:])`([^`]+)`(?!`)(\w?)")
# A lone word in lower case is mostly a parameter.
_NAME = re.compile(r"(?=[A-Z]|\w*[._]\w|\w*\(\)$)[A-Za-z_][\w.]*\w(?=(?:\(\))?$)")

PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
PAGES = {
    PYTHON + "functions.html": "property",
    PYTHON + "stdtypes.html": "bytes dict frozenset int float list memoryview set str tuple",
}
"""The pages of other projects, and the names that each documents; `generated/` has one for each."""

URLS = {name: f"{page}#{name}" for page, names in PAGES.items() for name in names.split()}


def mark_code(_app: Any, *details: Any) -> None:
    """Turn `code` of a docstring into a literal, and into a link if it is a known name."""

    def mark(match: re.Match[str]) -> str:
        name = _NAME.match(match[1])
        marked = f":py:obj:`{match[1]} <{name[0]}>`" if name else f"``{match[1]}``"
        # An escaped space separates the code from letters right after it, as in `RRef`s.
        return marked + (f"\\ {match[2]}" if match[2] else "")

    lines: list[str] = details[-1]
    lines[:] = CODE.sub(mark, "\n".join(lines)).splitlines()


def link_other_projects(_app: Any, env: Any, node: Any, content: Any) -> nodes.Node | None:
    """Link a name that is not documented on this site."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in URLS:
        return nodes.reference("", "", content, internal=False, refuri=URLS[target])
    if target[:1].isupper():  # a class of another module of Phalanx
        domain = env.get_domain("py")
        found = [name for name in domain.objects if name.endswith(f".{target}")]
        if len(found) == 1:
            entry = domain.objects[found[0]]
            builder = env.app.builder
            uri = builder.get_relative_uri(node["refdoc"], entry.docname)
            return nodes.reference(
                "", "", content, internal=True, refuri=f"{uri}#{entry.node_id}", reftitle=found[0]
            )
    return None


def skip_members_of_torch(_app: Any, *details: Any) -> bool | None:
    """Leave out methods whose documentation is PyTorch's."""
    member = details[2]
    return True if getattr(member, "__module__", "").startswith("torch.") else None


def shorten_defaults(*event: Any) -> tuple[str, str | None] | None:
    """Replace the representation of an enumeration's member in a signature by its name."""
    signature, returned = event[-2:]
    if not signature:
        return None
    return re.sub(r"<RedOpType\.(\w+): \d+>", r"ReduceOp.\1", signature), returned


def setup(app: Any) -> dict[str, bool]:
    """Register the changes of docstrings and signatures."""
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", skip_members_of_torch)
    app.connect("missing-reference", link_other_projects)
    return {"parallel_read_safe": True}
