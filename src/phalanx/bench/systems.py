"""What is compared: how the processes of each system are started, and with which settings.

A system is a set of processes of its own. Open MPI, MPICH and mpi4py are the wheels of the extra
`bench`: both libraries live in one environment, and mpi4py loads the one that its rank is told to.
Both wheels bring a program `mpiexec`, of which the one installed last remains; so each library's
own launcher is started, by its own name.

Each rival runs with the settings that were fastest for it (`docs/design/bench.md`). All of them are
environment variables: one that you set yourself stands.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.bench.machine import single_copy_works
from phalanx.launch.cores import usable_cores
from phalanx.launch.defaults import rank_defaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MPI", "SYSTEMS", "AbsentError", "Program", "programs", "settings"]

SYSTEMS = ("phalanx", "phalanx-shared", "gloo", "openmpi", "mpich")
"""Every system, in the order of the table's columns."""

MPI = ("openmpi", "mpich")

_INSTALL = 'pip install "phalanx[bench]"'

# Memory that a library frees stays in its process. Otherwise each large reduction's scratch buffer
# is mapped and cleared anew by the kernel, which takes longer than reducing.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
# The pages of tensors, which numpy's arrays would not have.
_SMALL_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}


# Open MPI's other way through shared memory. It is meant for networks, so that it must be told to
# take part where there is none; and it never gives its core away, so every rank needs one.
_UCX = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_tls": "any",
    "OMPI_MCA_pml_ucx_devices": "any",
    "UCX_TLS": "self,sm",
}


class AbsentError(Exception):
    """A system isn't there; the message says why, and what brings it."""


@dataclass(frozen=True)
class Program:
    """A process to start: its arguments, and what its environment has besides this process's."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


def programs(name: str, ranks: int, command: Sequence[str]) -> list[Program]:
    """What to start for a system: a process for each rank, or an MPI launcher.

    Args:
        name: the system.
        ranks: how many.
        command: what each rank runs.

    Raises:
        AbsentError: it isn't installed.
    """
    extra = settings(name, ranks)
    if name in MPI:
        library, launcher = _wheel(name)
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
    """The environment variables that a system gets, those that the user has set left out."""
    wanted: dict[str, str] = dict(rank_defaults(ranks, os.environ))
    if name == "gloo":
        wanted |= {"GLOO_SOCKET_IFNAME": "lo"}
    if name in MPI:
        wanted |= _KEEP_MEMORY | _SMALL_PAGES
    if name == "openmpi" and _fits(ranks):
        wanted |= _UCX
    if name == "mpich":
        # Off by default, as it needs a permission that isn't always given.
        wanted |= {"MPIR_CVAR_CH4_CMA_ENABLE": str(int(single_copy_works()))}
    return {key: value for key, value in wanted.items() if key not in os.environ}


def _options(name: str, ranks: int) -> list[str]:
    """A core for each rank where there are enough; the kernel places them where there aren't."""
    fits = _fits(ranks)
    if name == "mpich":
        return ["-bind-to", "core" if fits else "none"]
    options = ["--personality", "ompi", "--bind-to", "core" if fits else "none"]
    options += ["--map-by", "core" if fits else "slot:OVERSUBSCRIBE"]
    return [*options, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def _fits(ranks: int) -> bool:
    return ranks <= usable_cores()


def _wheel(name: str) -> tuple[Path, Path]:
    """The library and the launcher that a wheel has installed."""
    names = {"openmpi": ("libmpi.so.40", "prterun"), "mpich": ("libmpi.so.12", "mpiexec.hydra")}
    if importlib.util.find_spec("mpi4py") is None:
        raise AbsentError(f"mpi4py isn't installed: {_INSTALL}")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise AbsentError(f"the wheel {name} isn't installed: {_INSTALL}") from None
    found = {file.name: Path(str(file.locate())).resolve() for file in files}
    missing = [file for file in names[name] if file not in found or not found[file].is_file()]
    if missing:
        raise AbsentError(
            f"the wheel {name} lacks {', '.join(missing)}: pip install --force-reinstall {name}"
        )
    return found[names[name][0]], found[names[name][1]]
