"""`phalanx.init`: find the rank of this process, select its device and form the group."""

import atexit
import contextlib
import importlib
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import default_pg_timeout

import phalanx
from phalanx import env, torch_versions, transports
from phalanx.env import RankAssignment, assigned_ranks
from phalanx.errors import UsageError
from phalanx.launcher.store import report_slow_store
from phalanx.system.suggestions import suggest


@dataclass(frozen=True)
class Session:
    """The rank of this process in its group, and a context manager that leaves the group.

    If its body raises an exception, peers in Phalanx groups get `PeerLost` with the text of the
    exception at once, even if an outer caller handles the exception. A `KeyboardInterrupt` aborts
    the group (`Aborted`). `sys.exit(0)` leaves the group in the same way as the end of the body.

    Attributes:
        rank: The rank of this process in the job, from 0.
        world_size: The number of processes in the job.
        local_rank: The index of this process among the job's processes on this host, from 0.
        local_world_size: The number of the job's processes on this host.
        device: The device for the tensors and the model of this process.
        backend: The name of the group's backend.
        owner: True if this session formed the group, and therefore destroys it.

    Example:
        >>> with phalanx.init() as session:
        ...     print(f"rank {session.rank} of {session.world_size} on {session.backend}")
        rank 0 of 1 on phalanx
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    owner: bool = field(repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which by convention logs and writes files."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group if this session formed it. A second call has no effect.

        Does not wait for the other ranks beyond the wait in the backend's `destroy_process_group`.
        """
        if self.owner and dist.is_initialized():
            _keep_gloo_groups()
            dist.destroy_process_group()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        world: Any = dist.group.WORLD
        is_success = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not is_success and self.owner and world is not None and _is_phalanx_group(world):
            # Tell the peers that wait for this rank, in any group, at once that it failed, and why.
            if isinstance(error, KeyboardInterrupt):
                groups: list[Any] = [*torch_versions.world().pg_map]
                for group in filter(_is_phalanx_group, groups):
                    group.abort("its session ended with KeyboardInterrupt")
            else:
                world.fail(error)
        self.close()


def init(
    backend: str = "phalanx",
    *,
    timeout: float | timedelta | None = None,
    device: str | int | torch.device | None = None,
    transport: str = "",
) -> Session:
    """Form the group of this job, independently of the launcher.

    The rank of this process comes from the environment that `phalanx run`, `phalanx.launch` and
    torchrun set (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; `LOCAL_RANK` and
    `LOCAL_WORLD_SIZE` if given). Without `RANK`, it comes from MPI if `mpirun` has started this
    process, or from Slurm if `srun` has. Without any of them this process is alone: rank 0 of 1,
    with no network. The same script therefore runs alone and on many ranks. Blocks until every
    rank has called it, up to `timeout`.

    If `torch.distributed` is already initialized, the session joins its default group. Then
    `backend` and `timeout` have no effect (the session names the existing backend), and leaving
    the session does not destroy the group.

    Args:
        backend: Any backend of `torch.distributed`: "phalanx", "gloo", "nccl", ...
        timeout: Seconds (or a timedelta) that rendezvous and operations may take; None for the
            backend's default.
        device: The device, "cpu", "cuda" or "cuda:1". None selects the GPU with the index
            `local_rank` modulo the number of GPUs, or the CPU if there is no GPU. A GPU becomes
            the current device.
        transport: The transport between hosts for the backend "phalanx": "gloo", "mpi" or "relay";
            empty for the value of `PHALANX_TRANSPORT`, or "gloo" if it is unset. It must
            be the same on all ranks.

    Returns:
        A Session. Use it as a context manager, or call `close()` at the end.

    Raises:
        UsageError: The environment is incomplete or contradictory; the backend, transport or device
            does not exist; the timeout is not positive; or `MASTER_PORT` is in use, on rank 0.
        torch.distributed.DistError: The group was not formed in time.

    Example:
        >>> with phalanx.init() as session:
        ...     tensor = torch.ones(4, device=session.device)
        ...     torch.distributed.all_reduce(tensor)
    """
    if transport:
        transports.check_name(transport)
    is_joined = dist.is_initialized()
    duration = _parse_timeout(timeout)
    assignment = _existing_assignment() if is_joined else _find_assignment(duration)
    chosen = _select_device(device, assignment.local_rank if assignment else 0)
    if not is_joined:
        _form_group(backend, duration, assignment, transport)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    assignment = assignment or RankAssignment(0, 1, 0, 1)
    return Session(*assignment, chosen, dist.get_backend(), owner=not is_joined)


_kept_groups: list[dist.ProcessGroup] = []
"""Groups on Gloo that sessions have left."""
atexit.register(_kept_groups.clear)


def _keep_gloo_groups() -> None:
    """Keep the groups on Gloo until this process exits: a DDP model may outlive its session.

    The destructor of a group joins Gloo's threads. Python releases a group without the GIL, but
    the destructor of DDP's reducer holds it. A thread of Gloo that needs the GIL at that moment,
    to release the tensors of its last operation, would never end.
    """
    for group, config in torch_versions.world().pg_backend_config.items():
        if "gloo" in config and not _is_phalanx_group(group):
            _kept_groups.append(group)


def _is_phalanx_group(group: dist.ProcessGroup) -> bool:
    # Check the type: a group that replaces another backend has that backend's name.
    return type(group).__module__.startswith("phalanx.")


def _find_assignment(timeout: timedelta | None) -> RankAssignment | None:
    try:
        launcher = _launcher()
        if launcher == "mpi":
            from phalanx.launcher import mpi

            return mpi.assigned_ranks((timeout or default_pg_timeout).total_seconds())
        if launcher == "slurm":
            from phalanx.launcher.slurm import SlurmStep

            assignment = SlurmStep.from_environment().assignment
            # One task, such as a shell, needs no network.
            return assignment if assignment.world_size > 1 else None
        return assigned_ranks()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _launcher() -> str:
    """Return the launcher, "mpi" or "slurm"; empty if PyTorch's variables are set or none is."""
    return "" if os.environ.get("RANK", "").strip() else env.launcher()


def _existing_assignment() -> RankAssignment:
    """Return the ranks in the existing group, with local ranks from the environment if valid."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Do not initialize MPI for this, because the group may have been formed without it.
    assignment = _find_assignment(None) if "RANK" in os.environ or _launcher() == "slurm" else None
    if assignment is not None and (assignment.rank, assignment.world_size) == (rank, world_size):
        return assignment
    if _launcher() == "mpi":
        from phalanx.launcher import mpi

        return RankAssignment(rank, world_size, *mpi.local_rank_and_size(rank, world_size))
    return RankAssignment(rank, world_size, rank, world_size)


def _form_group(
    backend: str, timeout: timedelta | None, assignment: RankAssignment | None, transport: str
) -> None:
    names = [part.rpartition(":")[2] for part in str(backend).split(",")]
    for name in names:
        if not dist.is_backend_available(name):
            known = [each for each in dist.Backend.backend_list if each != "undefined"]
            available = [each for each in known if dist.is_backend_available(each)]
            reason = "is not part of this build of PyTorch" if name in known else "does not exist"
            raise UsageError(
                f"backend is {backend!r}: {name!r} {reason}; expected one of "
                f"{', '.join(available)}{suggest(name, available)}"
            )
    # Default arguments in this module capture the group that exists when it is first imported (for
    # example by the first optimizer). They would keep the group and its threads alive after
    # destroy_process_group().
    importlib.import_module("torch.distributed.nn.functional")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if transport:
        options["pg_options"] = phalanx.Options(transport)
    if assignment is None:
        store = dist.HashStore()  # type: ignore[attr-defined] # exported at run time
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
        return
    launcher = _launcher()
    with contextlib.nullcontext() if launcher else report_slow_store(assignment.rank):
        dist.init_process_group(backend, init_method=f"{launcher or 'env'}://", **options)


def _parse_timeout(timeout: object) -> timedelta | None:
    if timeout is None:
        return None
    duration = timeout
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < 1e9:
        duration = timedelta(seconds=timeout)
    if isinstance(duration, timedelta) and duration > timedelta(0):
        return duration
    raise UsageError(f"timeout is {timeout!r}: expected seconds, or a timedelta, greater than 0")


def _select_device(device: str | int | torch.device | None, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device is {device!r}: expected 'cpu', 'cuda' or 'cuda:N'") from None
    if chosen.type != "cuda":
        return chosen
    if not count:
        raise UsageError(f"device is {str(chosen)!r}, but CUDA isn't available here: use 'cpu'")
    if str(chosen) == "cuda":
        return torch.device("cuda", local_rank % count)
    if chosen.index >= count:
        raise UsageError(f"device is {str(chosen)!r}: expected cuda:0 to cuda:{count - 1}")
    return chosen
