"""The environment variables that Phalanx reads or sets, and functions that read them.

`VARIABLES` is the documentation. Phalanx's Python code reads a variable that can be malformed only
through the functions below. They raise `ValueError` with a message that names the variable, its
value and the expected value; callers turn it into `phalanx.errors.UsageError`. An argument
`environ` is the environment to read. This module imports neither torch nor any other module of the
package.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "JOB_NAME",
    "NO_JOB",
    "REPLACEABLE",
    "VARIABLES",
    "RankAssignment",
    "advertised_address",
    "assigned_ranks",
    "backend_names",
    "direct_calls",
    "host_id",
    "integer",
    "interface",
    "is_newcomer",
    "job",
    "jobs_directory",
    "jobs_kept",
    "key",
    "launcher",
    "mpi_launcher",
    "preloaded_modules",
    "relay",
    "replaced_backends",
    "tracebacks",
    "transport",
    "tunnel_host",
    "unreplaced_key",
]

JOB_NAME = re.compile(r"[0-9]{8}-[0-9]{4}-[a-z0-9]{6}", re.ASCII)
"""The pattern of a job's name: the date and time of its start, and a random suffix."""

NO_JOB = "none"
"""The value of `PHALANX_JOB` with which flight recorders are kept in memory only."""

REPLACEABLE = ("gloo", "mpi", "tcp")
"""The backends that Phalanx can replace; PyTorch has removed "tcp"."""

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:\[\]/]+))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)

VARIABLES = {
    "PHALANX_ISA": (
        "Read by the native core when it is loaded: the widest instruction set that the reduction "
        "kernels may use, `baseline`, `avx2` or `avx512`. Unset: the widest that the processor "
        "supports. Results are the same with each. For comparisons and tests."
    ),
    "PHALANX_DIRECT_CALLS": (
        "`0`: small operations do not go from PyTorch's function to the core in one native call, "
        "which reads PyTorch's tensors and options where they lie in memory, but take the general "
        "way, which costs some microseconds more. To find out whether that matters to a fault. "
        "`1` or unset: direct calls, with the versions of PyTorch that Phalanx is tested with; "
        "`phalanx doctor` says whether."
    ),
    "PHALANX_REPLACE": (
        "The backends that Phalanx replaces, separated by commas: `gloo`, `mpi`, `tcp`. Set for "
        "every rank by `phalanx run --replace`, read at `import torch`. A script that names one of "
        "them, or names none and would get Gloo by default, then runs on Phalanx, and still sees "
        "the name that it requested. For `mpi`, the rank and the world size come from `RANK` and "
        "`WORLD_SIZE`, else from `mpirun` or `srun`. If Phalanx replaces `cpu:gloo,cuda:nccl`, it "
        "passes CUDA tensors to NCCL. Requests with options for NCCL, or with other backends "
        "besides, are not replaced. Unset: nothing is replaced."
    ),
    "PHALANX_PRELOAD": (
        "Modules, separated by commas, that `phalanx run` imports once on this host: `torch`, for "
        "example. Each rank is then a copy of one process that has them, in place of a process "
        "that imports them itself, so many ranks start, and start again after a failure, as fast "
        "as one, and share that memory. No module may start threads or use a GPU when it is "
        "imported. `OMP_NUM_THREADS` of a job then reaches PyTorch alone; set it yourself for "
        "other libraries. The command line and `/proc/PID/environ` of a rank are then those of "
        "`phalanx run`. Programs of `--no-python`, ranks bound to NUMA nodes, and hosts that are "
        "started over ssh do without. Unset: each rank starts by itself."
    ),
    "PHALANX_JOB": (
        "The name of the job to which this process belongs, as listed by `phalanx jobs`. Set for "
        "every rank by `phalanx run` and `phalanx.launch`, read when a rank forms its first group. "
        "The rank keeps its flight recorder in the directory of that job. Unset: the ranks agree "
        "on a name. `none`: flight recorders are in memory only, and are lost with their rank."
    ),
    "PHALANX_JOBS_DIR": (
        "The parent of the directories of all jobs, an absolute path. It must belong to you and be "
        "writable by you alone. It is created if it is missing. Set for every rank by `phalanx "
        "run` and `phalanx.launch`, read by ranks and by the commands that inspect jobs. Unset: "
        "`phalanx-UID` in the directory that `TMPDIR` names, else in `/tmp`."
    ),
    "PHALANX_JOBS_KEPT": (
        "The number of ended jobs to keep for `phalanx explain`, 0 or more. When a job starts, the "
        "oldest jobs in excess are removed. Unset: 20."
    ),
    "PHALANX_JOBS_KEPT_MIB": (
        "The total size of ended jobs to keep, in MiB, 0 or more; half a MiB per rank is usual. "
        "The oldest jobs are removed first. Unset: 256."
    ),
    "PHALANX_TRACEBACKS": (
        "`folded`: an uncaught exception of a rank is printed without the frames inside PyTorch "
        "and Phalanx, and in one line if it only reports what happened to another rank. `phalanx "
        "explain --tracebacks` prints the whole tracebacks of a job. `once`: the same, and if "
        "several ranks of a host raise the same exception, only the first prints its traceback. "
        "`all`: whole tracebacks at once. Set for every rank by `phalanx run` and `phalanx.launch` "
        "unless set already: to `all` if log files are written, to `folded` for a rank whose "
        "output is not shown, else to `once`. Unset, as under other launchers: `all`."
    ),
    "PHALANX_HOST_ID": (
        "The host that this process claims to run on, any text. Ranks with different values do not "
        "share memory and communicate through a transport, as if they were on different machines. "
        "Set for every rank by `phalanx run --simulate-hosts`. Ranks with the same value share "
        "memory only if they can. Unset: all ranks that can share memory do."
    ),
    "PHALANX_NEWCOMER": (
        "`1` in a process that takes the place of a lost rank, whose number is in `RANK`: it joins "
        "the group when the other ranks call `phalanx.replace`."
    ),
    "PHALANX_TRANSPORT": (
        "The transport between hosts, unless `phalanx.init(transport=...)` gives it: `gloo`; "
        "`mpi`, for ranks that `mpirun` has started; `relay`, for hosts that cannot reach each "
        "other; `nccl`, which requires that CUDA tensors use NCCL. Set it to the same value on all "
        "ranks. Unset: `gloo`."
    ),
    "PHALANX_INTERFACE": (
        "The network interface, by its name or by one of its addresses, on which this rank listens "
        "for ranks of other hosts, and `phalanx run` for other hosts. Unset: the address from "
        "which this machine reaches the rendezvous."
    ),
    "PHALANX_ADVERTISE_ADDR": (
        "The address at which other hosts reach rank 0 if it differs from the address on which "
        "rank 0 listens, as behind the NAT of a cloud: HOST or HOST:PORT. With a port, rank 0 "
        "listens on that port. For the transport `relay`; `gloo` cannot use it. Not needed in jobs "
        "that `phalanx run` has started on their hosts: the relay is then at `--master-addr`."
    ),
    "PHALANX_TUNNEL_HOST": (
        "The host of the tunnel server, through which the hosts of the job connect; `MASTER_ADDR` "
        "is then an address of the loopback interface. Set by `phalanx run` for the ranks of a job "
        "on several hosts, which listen on the interface that faces that host."
    ),
    "PHALANX_RELAY": (
        "The endpoint of the transport `relay` on this host: `listen:SOCKET` on the host of the "
        "tunnel server, `connect:SOCKET` on others, with the name of a Unix socket. Set by "
        "`phalanx run` for the ranks of a job on several hosts. Unset: rank 0 listens on an "
        "address of its own."
    ),
    "PHALANX_KEY_FD": (
        "An open descriptor of memory with the job's key. `phalanx run` creates it and sets this "
        "for every rank. Processes that a rank starts have it only if they inherit open files."
    ),
    "PHALANX_KEY_FILE": (
        "A file with the job's key, which belongs to you and which nobody else can read (mode "
        "0600); `phalanx key PATH` creates one. Read by `phalanx run --nnodes` unless `--key-file` "
        "or `--key-fd` is given, and by ranks that other launchers have started."
    ),
    "OMPI_COMM_WORLD_SIZE": (
        "Set by the `mpirun` of Open MPI, with `OMPI_COMM_WORLD_LOCAL_RANK` and "
        "`OMPI_COMM_WORLD_LOCAL_SIZE`. If it is set, `phalanx.init` takes the rank and the world "
        "size from MPI, and the local rank and size from the other two variables."
    ),
    "MPI_LOCALNRANKS": (
        "Set by the `mpirun` of MPICH and its derivatives, with `MPI_LOCALRANKID`; read like "
        "`OMPI_COMM_WORLD_SIZE`. So are `PMI_SIZE` and `PMIX_RANK`, which other launchers of MPI "
        "set, in a process that Slurm has not started."
    ),
    "SLURM_STEP_ID": (
        "Set by `srun`, with `SLURM_JOB_ID`, `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, "
        "`SLURM_STEP_NODELIST`, `SLURM_STEP_TASKS_PER_NODE`, `SLURM_NODEID` and `SLURM_LOCALID`. "
        "`phalanx.init` and `slurm://` take the rank and the world size of this process from "
        "them."
    ),
    "RANK": (
        "The rank of this process in the job, from 0 to `WORLD_SIZE` - 1. Set for every process by "
        "`phalanx run`, `phalanx.launch` and torchrun, read by `phalanx.init`."
    ),
    "WORLD_SIZE": (
        "The number of processes of the job, on all hosts. Set and read like `RANK`; one without "
        "the other is an error."
    ),
    "LOCAL_RANK": (
        "The rank of this process among those of the job on this host. Set like `RANK`. "
        "`phalanx.init` chooses the GPU by it. Unset: the value of `RANK`, which is right on one "
        "host."
    ),
    "LOCAL_WORLD_SIZE": (
        "The number of processes of the job on this host. Set like `RANK`. Unset: `phalanx.init` "
        "uses `WORLD_SIZE`, which is right on one host."
    ),
    "MASTER_ADDR": (
        "The address of the store through which the ranks find each other. Set like `RANK`; read "
        "by `torch.distributed`, and checked by `phalanx.init`."
    ),
    "MASTER_PORT": ("The TCP port of that store, 1 to 65535. Set and read like `MASTER_ADDR`."),
    "GROUP_RANK": (
        "The rank of this process's host among the hosts of the job. It is set as by torchrun, "
        "with `GROUP_WORLD_SIZE`, `ROLE_NAME`, `ROLE_RANK` and `ROLE_WORLD_SIZE`, for scripts that "
        "read it. Phalanx does not read it."
    ),
    "TORCHELASTIC_USE_AGENT_STORE": (
        "`True` if the launcher hosts the store, so that rank 0 connects to it like every other "
        "rank. Set by `phalanx run` and `phalanx.launch`, with `TORCHELASTIC_RUN_ID`, "
        "`TORCHELASTIC_RESTART_COUNT` and `TORCHELASTIC_MAX_RESTARTS`, as by torchrun; but "
        "`TORCHELASTIC_RUN_ID` is the same on all hosts, and new at every start."
    ),
    "OMP_NUM_THREADS": (
        "The number of threads per process. Set for every rank to max(1, usable cores // ranks on "
        "this host), unless it is set already. Usable cores are those of the affinity mask, within "
        "the CPU quota of the control group."
    ),
    "PYTHONUNBUFFERED": (
        "Set to 1 for every rank unless set already, so that its output is visible as soon as it "
        "is written."
    ),
    "PYTHONFAULTHANDLER": (
        "Set to 1 for every rank unless set already, so that a crash in native code prints the "
        "Python stack."
    ),
    "MALLOC_MMAP_THRESHOLD_": (
        "With `MALLOC_TRIM_THRESHOLD_`, read by the C library: the size from which each tensor "
        "gets new memory from the kernel, and the amount of freed memory that a process keeps. Set "
        "for every rank to 32 MiB and 128 MiB unless one of them is set already: a training step "
        "then reuses its memory, and the kernel need not clear it page by page. Other C libraries "
        "ignore it."
    ),
    "ACCELERATE_USE_CPU": (
        "Read by Accelerate, and by libraries that use it. Set to `true` for every rank on a host "
        "without an accelerator, unless set already: otherwise each process trains alone, without "
        "an error. Phalanx does not read it."
    ),
    "PET_NPROC_PER_NODE": (
        "The default of `phalanx run --nproc-per-node`; every option of torchrun has such a "
        "variable, `PET_` and its name. Unset: `auto`."
    ),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (
        "The seconds between SIGTERM and SIGKILL for ranks that `phalanx run` stops, if "
        "`--shutdown-timeout` is not given. Unset: 10."
    ),
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": (
        "The prefix of the lines that `phalanx run --tee` shows, with `${rank}`, `${local_rank}` "
        "and `${role_name}`. Set to `[rank ${rank}] ` unless set already."
    ),
    "TORCH_CPP_LOG_LEVEL": (
        "Read by PyTorch. `phalanx run` sets it to `ERROR` while it loads PyTorch for itself, not "
        "for ranks, unless this or `LOGLEVEL` is set."
    ),
    "LOGLEVEL": (
        "The Python log level of PyTorch's elastic agent, for example `INFO`. Unset: `phalanx run` "
        "silences the agent and prints one report when a rank fails."
    ),
}
"""The variables by name, each with a paragraph of documentation."""


class RankAssignment(NamedTuple):
    """The ranks and world sizes that a launcher gave to a process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def integer(
    name: str,
    *,
    minimum: int,
    maximum: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int | None:
    """Read an integer variable; None if it is unset or empty.

    Args:
        name: The name of the variable.
        minimum: The smallest value allowed.
        maximum: The largest value allowed; None for no limit.
        environ: The environment to read.

    Raises:
        ValueError: The value is not an integer, or is out of range.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    expected = f"an integer from {minimum}" + (" up" if maximum is None else f" to {maximum}")
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment: expected {expected}") from None
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name}={value} in the environment: expected {expected}")
    return value


def assigned_ranks(environ: Mapping[str, str] = os.environ) -> RankAssignment | None:
    """Read the ranks and world sizes set by a launcher; None if there is no launcher.

    Raises:
        ValueError: Some of the variables are missing, are not integers, or contradict each other.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name, "").strip()]
    if len(missing) == len(needed):
        return None
    if missing:
        present = ", ".join(f"{name}={environ[name]!r}" for name in needed if name not in missing)
        raise ValueError(
            f"the environment has {present} but lacks {', '.join(missing)}: set all four, or start "
            "the script with `phalanx run`, or unset them to run alone"
        )
    integer("MASTER_PORT", minimum=1, maximum=65535, environ=environ)
    world_size = integer("WORLD_SIZE", minimum=1, environ=environ) or 1
    rank = integer("RANK", minimum=0, environ=environ) or 0
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world_size} in the environment: a rank is less than the "
            f"world size, so expected 0 to {world_size - 1}"
        )
    local_size = integer("LOCAL_WORLD_SIZE", minimum=1, maximum=world_size, environ=environ)
    local_size = world_size if local_size is None else local_size
    local_rank = integer("LOCAL_RANK", minimum=0, maximum=local_size - 1, environ=environ)
    return RankAssignment(rank, world_size, rank if local_rank is None else local_rank, local_size)


def launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return "mpi" or "slurm" if that launcher started this process, else "".

    A process that `mpirun` started inside of Slurm has the variables of both, and those of Slurm
    describe `mpirun`'s own processes. A process that `srun` started may have some of MPI's.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ or "MPI_LOCALNRANKS" in environ:
        return "mpi"
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return "slurm"
    return "mpi" if mpi_launcher(environ) else ""


def mpi_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the MPI that started this process: "Open MPI", "MPICH" or "MPI"; empty if none did."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI"
    if "MPI_LOCALNRANKS" in environ:
        return "MPICH"
    return "MPI" if {"PMI_SIZE", "PMIX_RANK"} & environ.keys() else ""


def job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that `PHALANX_JOB` names, or `NO_JOB`; None if it is unset or empty.

    Raises:
        ValueError: The value is not the name of a job.
    """
    text = environ.get("PHALANX_JOB", "")
    if not text or text == NO_JOB or JOB_NAME.fullmatch(text):
        return text or None
    raise ValueError(
        f"PHALANX_JOB={text!r} in the environment: expected a name set by a launcher of Phalanx, "
        f"like 20261121-0901-k3f9x2, or {NO_JOB!r}; or unset it: the ranks then agree on a name"
    )


def jobs_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the absolute path of the directory of all jobs' directories, which may not exist.

    Raises:
        ValueError: `PHALANX_JOBS_DIR` is not an absolute path.
    """
    configured = environ.get("PHALANX_JOBS_DIR", "")
    if configured and not os.path.isabs(configured):
        raise ValueError(
            f"PHALANX_JOBS_DIR={configured!r} in the environment: expected an absolute path, since "
            "ranks may run in other directories"
        )
    temporary = environ.get("TMPDIR", "")
    temporary = temporary if os.path.isabs(temporary) else "/tmp"
    # A trailing slash would follow a symbolic link.
    return configured.rstrip("/") or os.path.join(temporary, f"phalanx-{os.geteuid()}")


def jobs_kept(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of ended jobs to keep, and the bytes that they may take together.

    Raises:
        ValueError: One of the two variables is not an integer, or is negative.
    """
    count = integer("PHALANX_JOBS_KEPT", minimum=0, environ=environ)
    mebibytes = integer("PHALANX_JOBS_KEPT_MIB", minimum=0, environ=environ)
    return 20 if count is None else count, (256 if mebibytes is None else mebibytes) * 2**20


def backend_names(text: str, source: str) -> tuple[str, ...]:
    """Parse the names of backends to replace, separated by commas, in upper or lower case.

    Args:
        text: The names as the user wrote them.
        source: The option or variable that holds them, for the message.

    Raises:
        ValueError: A name is not in `REPLACEABLE`, or there is no name.
    """
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if wrong := [name for name in names if name not in REPLACEABLE]:
        replaceable = ", ".join(REPLACEABLE)
        raise ValueError(
            f"{source} is {text!r}: {wrong[0]!r} cannot be replaced; expected some of "
            f"{replaceable}, separated by commas"
        )
    return names


def replaced_backends(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the backends that `PHALANX_REPLACE` names; none if it is unset or empty.

    Raises:
        ValueError: It names a backend that cannot be replaced.
    """
    text = environ.get("PHALANX_REPLACE", "")
    return backend_names(text, "PHALANX_REPLACE in the environment") if text.strip() else ()


def preloaded_modules() -> tuple[str, ...]:
    """Return the modules that `PHALANX_PRELOAD` names; none if it is unset or empty.

    Raises:
        ValueError: A name is not that of a module.
    """
    names = tuple(filter(None, map(str.strip, os.environ.get("PHALANX_PRELOAD", "").split(","))))
    for name in names:
        if not all(map(str.isidentifier, name.split("."))):
            raise ValueError(
                f"PHALANX_PRELOAD in the environment names {name!r}: expected modules, separated "
                "by commas, as in `torch,torchvision`"
            )
    return names


def direct_calls(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `PHALANX_DIRECT_CALLS` allows direct calls, as it does if it is unset.

    Raises:
        ValueError: The value is neither 0 nor 1.
    """
    return integer("PHALANX_DIRECT_CALLS", minimum=0, maximum=1, environ=environ) != 0


def tunnel_host() -> str:
    """Return the host that `PHALANX_TUNNEL_HOST` names; empty if it is unset."""
    return os.environ.get("PHALANX_TUNNEL_HOST", "")


def relay() -> tuple[str, str]:
    """Return "listen" or "connect", and a socket's path, of `PHALANX_RELAY`; empty if it is unset.

    Raises:
        ValueError: The value has another form.
    """
    text = os.environ.get("PHALANX_RELAY", "")
    mode, _, path = text.partition(":")
    if text and (mode not in ("listen", "connect") or not path):
        raise ValueError(
            f"PHALANX_RELAY={text!r} in the environment: expected listen:SOCKET or connect:SOCKET, "
            "as `phalanx run` sets it for its ranks; unset it"
        )
    return mode, path


def advertised_address() -> tuple[str, int]:
    """Return host and port of `PHALANX_ADVERTISE_ADDR`; without them, an empty host and port 0.

    Raises:
        ValueError: The value is neither HOST nor HOST:PORT.
    """
    text = os.environ.get("PHALANX_ADVERTISE_ADDR", "").strip()
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"] or 0) if match else 0
    if text and (not match or port > 65535 or match["port"] == "0"):
        raise ValueError(
            f"PHALANX_ADVERTISE_ADDR={text!r} in the environment: expected HOST or HOST:PORT, with "
            "an IPv6 address in brackets"
        )
    return (match["six"] or match["host"], port) if text and match else ("", 0)


def key() -> tuple[int | None, str]:
    """Return the inherited descriptor of the job's key, or None, and the path of its key file.

    Raises:
        ValueError: `PHALANX_KEY_FD` is not a descriptor.
    """
    descriptor = integer("PHALANX_KEY_FD", minimum=0)
    return descriptor, os.environ.get("PHALANX_KEY_FILE", "")


def tracebacks(environ: Mapping[str, str] = os.environ) -> str:
    """Return how ranks print exceptions, as `PHALANX_TRACEBACKS` says: `all`, `folded` or `once`.

    Raises:
        ValueError: It has another value.
    """
    text = environ.get("PHALANX_TRACEBACKS") or "all"
    if text not in ("all", "folded", "once"):
        raise ValueError(
            f"PHALANX_TRACEBACKS={text!r} in the environment: expected folded, once, or all for "
            "whole tracebacks"
        )
    return text


def host_id() -> str:
    """Return the host that `PHALANX_HOST_ID` names; empty if it is unset."""
    return os.environ.get("PHALANX_HOST_ID", "")


def unreplaced_key(rank: int) -> str:
    """Return the key in the ranks' store by which a launcher says that it replaces no lost rank."""
    return f"phalanx/unreplaced/{rank}"


def is_newcomer() -> bool:
    """Return whether this process takes the place of a lost rank."""
    return os.environ.get("PHALANX_NEWCOMER", "") == "1"


def transport() -> str:
    """Return the transport that `PHALANX_TRANSPORT` names, in lower case; empty if it is unset."""
    return os.environ.get("PHALANX_TRANSPORT", "").strip().lower()


def interface() -> str:
    """Return the interface or address that `PHALANX_INTERFACE` names; empty if it is unset."""
    return os.environ.get("PHALANX_INTERFACE", "").strip()
