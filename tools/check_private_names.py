"""Reject private names of PyTorch outside of `torch_versions.py`.

`make lint` runs it over `src/phalanx`. PyTorch may change or remove a private name in any version,
so all that the package uses is in one file, where a new version is checked first. Found are private
modules that are imported, and private attributes of modules of torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "src" / "phalanx" / "torch_versions.py"


def find_private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each use of a private name of torch."""
    tree = ast.parse(source)
    names = {"": ""}  # what a local name stands for
    for line, local, name in _imports(tree):
        names[local.partition(".")[0]] = name if local != name else "torch"
        if _is_private(name):
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            first, *rest = _parts(node)
            if names.get(first):
                yield node.lineno, ".".join((names[first], *rest))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the local name and the whole name of each import of torch."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, str]] = []
        match node:
            case ast.Import(names=names):
                pairs = [(each.asname or each.name, each.name) for each in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                pairs = [(each.asname or each.name, f"{module}.{each.name}") for each in names]
        for local, name in pairs:
            if name.partition(".")[0] == "torch":
                yield node.lineno, local, name


def _parts(node: ast.expr) -> list[str]:
    """Return the parts of a dotted name; an empty first one if it is something else."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_parts(value), name]
    return [""]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def main() -> int:
    """Print all of them; return 1 if there are any."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} is private: give it a name in torch_versions.py"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path != ALLOWED
        for line, name in sorted({*find_private_names(path.read_text())})
    ]
    print("\n".join(found), end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
