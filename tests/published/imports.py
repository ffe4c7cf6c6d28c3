"""The change that an example needs: where it imports RPC from."""

from __future__ import annotations

import re

__all__ = ["changed"]

# Where PyTorch has it, and where Phalanx.
_MODULES = {
    "torch.distributed.autograd": "phalanx.rpc.autograd",
    "torch.distributed.nn.api.remote_module": "phalanx.rpc",
    "torch.distributed.nn": "phalanx.rpc",
    "torch.distributed.optim": "phalanx.rpc",
    "torch.distributed.rpc": "phalanx.rpc",
}
_IMPORT = re.compile(r"(\s*(?:from|import)\s+)(torch\.distributed\.[\w.]+)(\s.*)?$", re.DOTALL)


def changed(text: str) -> tuple[str, int]:
    """A source with its imports changed.

    Args:
        text: That of the example.

    Returns:
        The new one, and how many lines differ.
    """
    lines = text.splitlines(keepends=True)
    new = [_line(line) for line in lines]
    return "".join(new), sum(a != b for a, b in zip(lines, new, strict=True))


def _line(line: str) -> str:
    found = _IMPORT.match(line)
    if found is None or found[2] not in _MODULES:
        return line
    return f"{found[1]}{_MODULES[found[2]]}{found[3] or ''}"
