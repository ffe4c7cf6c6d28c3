"""torchrun's options, read from the sources of PyTorch without importing it.

`import torch` takes seconds, and wrong arguments are answered before that. So the function that
makes torchrun's parser is compiled from the file that defines it, with the few names that it uses.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ["make_torchrun_parser", "shutdown_timeout"]

_Unexpected = (AttributeError, LookupError, NameError, OSError, SyntaxError, TypeError, ValueError)
"""The errors of sources with another structure than expected."""


def make_torchrun_parser() -> ArgumentParser:
    """Return torchrun's parser of arguments.

    This imports torch only if its sources are not as expected, or if there is no torch.
    """
    module, name = "torch.distributed.run", "get_args_parser"
    parser: ArgumentParser
    if module not in sys.modules:
        try:
            parser = _Sources().load(module, name)()
        except _Unexpected:
            pass
        else:
            return parser
    parser = getattr(importlib.import_module(module), name)()
    return parser


def shutdown_timeout(options: object, default: int | None = None) -> int | None:
    """Return torchrun's --shutdown-timeout from its parsed options or its configuration.

    Args:
        options: The `Namespace` of torchrun's parser, or its `LaunchConfig`.
        default: The value to return if torchrun has no such option, as in 2.11.
    """
    timeout: int | None = getattr(options, "shutdown_timeout", default)
    return timeout


class _Sources:
    """The sources of torch, and the values of the names that have been loaded from them."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch")  # this does not import it
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("torch")
        self._root = Path(spec.submodule_search_locations[0])
        self._definitions: dict[str, dict[str, ast.stmt]] = {}
        self._namespaces: dict[str, dict[str, Any]] = {}

    def load(self, module: str, name: str) -> Any:
        """Return the value of a name of a module, without executing the rest of the module.

        Names of torch that the definition uses are loaded in the same way. Others are imported if
        they are from the standard library.

        Raises:
            LookupError: The name, or a module of a name that it uses, is not known.
        """
        if module not in self._definitions:
            self._definitions[module] = self._read(module)
            self._namespaces[module] = {"__name__": module}
        definitions, namespace = self._definitions[module], self._namespaces[module]
        if name in namespace:
            return namespace[name]
        node = definitions[name]
        if isinstance(node, ast.ImportFrom):
            namespace[name] = self._import(node, name)
        else:
            for used in ast.walk(node):
                if isinstance(used, ast.Name) and used.id != name and used.id in definitions:
                    self.load(module, used.id)
            path = str(self._path(module))
            exec(compile(ast.Module([node], []), path, "exec"), namespace)
        return namespace[name]

    def _import(self, node: ast.ImportFrom, name: str) -> Any:
        module = node.module or ""
        original = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
        top = module.partition(".")[0]
        if top == "torch" and not node.level:
            return self.load(module, original)
        if top in sys.stdlib_module_names:
            return getattr(importlib.import_module(module), original)
        raise LookupError(f"{name} of {module}")

    def _path(self, module: str) -> Path:
        return self._root.joinpath(*module.split(".")[1:]).with_suffix(".py")

    def _read(self, module: str) -> dict[str, ast.stmt]:
        """Return the statements of a module that define names, by name."""
        definitions: dict[str, ast.stmt] = {}
        for node in ast.parse(self._path(module).read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                definitions[node.name] = node
            elif isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    definitions[alias.asname or alias.name] = node
        return definitions
