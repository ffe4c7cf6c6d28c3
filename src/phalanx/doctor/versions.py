"""Checks of the installed versions: Python, torch, Phalanx and its core."""

from __future__ import annotations

import platform
from importlib import metadata

import torch.distributed as dist

from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.torch_versions import SUPPORTED, is_tested

__all__ = ["check"]

_finding = FindingFactory("versions")


def check() -> list[Finding]:
    """Check the versions, and that the core can be loaded."""
    python = platform.python_version()
    return [_finding.ok("python", f"Python {python}", version=python), _torch(), _core()]


def _torch() -> Finding:
    version = metadata.version("torch")
    if not dist.is_available():
        return _finding.problem(
            "torch",
            f"torch {version} was built without torch.distributed",
            "Install one of PyTorch's own builds: pip install torch.",
            version=version,
        )
    if not is_tested(version):
        oldest, newest = (".".join(map(str, release)) for release in SUPPORTED)
        return _finding.note(
            "torch",
            f"torch {version}, which this version of Phalanx is not tested with",
            f"If something fails, install a version from {oldest} to {newest}.",
            version=version,
        )
    return _finding.ok("torch", f"torch {version}", version=version)


def _core() -> Finding:
    version = metadata.version("phalanx")
    try:
        from phalanx import _native
    except ImportError as error:
        return _finding.problem(
            "phalanx",
            f"Phalanx {version}, whose core can't be loaded: {error}",
            "Install it again with the Python that you use: pip install --force-reinstall phalanx.",
            version=version,
        )
    kernels = _native.instruction_set()
    return _finding.ok(
        "phalanx",
        f"Phalanx {version}, kernels for {kernels}",
        version=version,
        layout=_native.LAYOUT_VERSION,
        instruction_set=kernels,
    )
