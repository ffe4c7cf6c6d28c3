"""Reject tensors of the package that depend on the user's default device or dtype.

`make lint` runs it over `src/phalanx`. Under `torch.device("meta")` or `torch.set_default_device`,
`torch.empty(2)` makes a tensor without memory, and under `torch.set_default_dtype` one of another
dtype. What the package makes for itself names its device, and its dtype unless values decide it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

WITHOUT_VALUES = {"empty", "full", "ones", "rand", "randn", "zeros"}
"""The functions of torch whose dtype is the default one if it is not given."""
FACTORIES = WITHOUT_VALUES | {
    *("arange", "as_tensor", "eye", "linspace", "randint", "randperm", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor"),
}
"""The functions of torch whose device is the default one if it is not given."""


def find_defaults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the missing arguments of each call of a factory."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                given = {keyword.arg for keyword in node.keywords}
                needed = ("device", "dtype") if name in WITHOUT_VALUES else ("device",)
                missing = [each for each in needed if each not in given]
                if name in FACTORIES and missing and None not in given:
                    yield node.lineno, " and ".join(missing)


def main() -> int:
    """Print all of them; return 1 if there are any."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: a tensor without {missing}: the user's default counts"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, missing in find_defaults(path.read_text())
    ]
    print("\n".join(found), end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
