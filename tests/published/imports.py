"""Replacement of an example's imports of RPC."""

from __future__ import annotations

import re

__all__ = ["change_imports"]

# Modules of Phalanx by module of PyTorch.
_MODULES = {
    "torch.distributed.autograd": "phalanx.rpc.autograd",
    "torch.distributed.nn.api.remote_module": "phalanx.rpc",
    "torch.distributed.nn": "phalanx.rpc",
    "torch.distributed.optim": "phalanx.rpc",
    "torch.distributed.rpc": "phalanx.rpc",
}
_IMPORT = re.compile(r"(\s*(?:from|import)\s+)(torch\.distributed\.[\w.]+)(\s.*)?$", re.DOTALL)


def change_imports(text: str) -> tuple[str, int]:
    """Replace the imports of RPC in a source.

    Args:
        text: The source of an example.

    Returns:
        The new source, and the number of changed lines.
    """
    lines = text.splitlines(keepends=True)
    new = [_line(line) for line in lines]
    return "".join(new), sum(a != b for a, b in zip(lines, new, strict=True))


def _line(line: str) -> str:
    found = _IMPORT.match(line)
    if found is None or found[2] not in _MODULES:
        return line
    return f"{found[1]}{_MODULES[found[2]]}{found[3] or ''}"
