"""`phalanx.init`: find this process's place, pick its device, form the group."""

import importlib
import os
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import default_pg_timeout

import phalanx
from phalanx import engines, env
from phalanx.env import Place, place
from phalanx.errors import UsageError

__all__ = ["Session", "init"]


@dataclass(frozen=True)
class Session:
    """This process's place in its group; a context manager that leaves the group.

    When its body raises, peers in groups of Phalanx get `PeerLost` at once, with the exception's
    words, whether or not somebody catches it further out. A `KeyboardInterrupt` aborts the group
    (`Aborted`), and `sys.exit(0)` leaves it as the end of the body does.

    Attributes:
        rank: this process's number among all of the job, from 0.
        world_size: how many processes the job has.
        local_rank: its number among those of this host.
        local_world_size: how many processes of the job this host has.
        device: where its tensors and its model belong.
        backend: the name of the group's backend.
        owner: whether this session formed the group, and so destroys it.
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
        """Whether this is rank 0: the one that logs and writes files."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group, if this session formed it. A second call does nothing.

        Doesn't wait for the other ranks beyond what the backend's `destroy_process_group` does.
        """
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        world: Any = dist.group.WORLD
        well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if not well and self.owner and world is not None and _is_ours(world):
            # Peers that wait for this rank hear at once that it won't come, and why.
            if isinstance(error, KeyboardInterrupt):
                world.abort("its session ended with KeyboardInterrupt")
            else:
                world.fail(error)
        self.close()


def init(
    backend: str = "phalanx",
    *,
    timeout: float | timedelta | None = None,
    device: str | int | torch.device | None = None,
    engine: str = "",
) -> Session:
    """Form the group of this job, whoever started this process.

    The place is taken from the environment that `phalanx run`, `phalanx.launch` and torchrun set
    (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; `LOCAL_RANK` and `LOCAL_WORLD_SIZE` if
    given); without `RANK`, from MPI where `mpirun` has started this process, from Slurm where
    `srun` has. With none of them it is alone: rank 0 of 1, no network. So the same script runs by
    itself and on many ranks. Blocks until every rank has called it, up to `timeout`.

    If `torch.distributed` is initialised already, its default group is joined: `backend` and
    `timeout` are not applied (the session names the backend that it found), and leaving the
    session does not destroy the group.

    Args:
        backend: any backend of `torch.distributed`: "phalanx", "gloo", "nccl", ...
        timeout: seconds (or a timedelta) that rendezvous and operations may take; None is the
            backend's default.
        device: where to work, "cpu", "cuda" or "cuda:1"; None is the GPU numbered `local_rank`
            modulo the GPUs there are, or the CPU if there is none. A GPU is made the current one.
        engine: what carries bytes between hosts, for the backend "phalanx": "gloo", "mpi" or
            "relay"; empty for what `PHALANX_ENGINE` says, else "gloo". The same on all ranks.

    Returns:
        A Session. Use it as a context manager, or call `close()` at the end.

    Raises:
        UsageError: the environment is there in part or contradicts itself; no such backend, engine
            or device; a timeout that isn't positive.
        torch.distributed.DistError: the group wasn't formed in time.

    Example:
        >>> with phalanx.init() as session:
        ...     tensor = torch.ones(4, device=session.device)
        ...     torch.distributed.all_reduce(tensor)
    """
    if engine:
        engines.check_name(engine)
    joined = dist.is_initialized()
    span = _timeout(timeout)
    where = _existing_place() if joined else _place(span)
    chosen = _device(device, where.local_rank if where else 0)
    if not joined:
        _form(backend, span, where, engine)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    where = where or Place(0, 1, 0, 1)
    return Session(
        where.rank,
        where.world_size,
        where.local_rank,
        where.local_world_size,
        chosen,
        dist.get_backend(),
        owner=not joined,
    )


def _is_ours(group: dist.ProcessGroup) -> bool:
    # By its type: a group in the place of another backend's has that one's name.
    return type(group).__module__.startswith("phalanx.")


def _place(timeout: timedelta | None) -> Place | None:
    try:
        launcher = _launcher()
        if launcher == "mpi":
            from phalanx.launch import mpi

            return mpi.place((timeout or default_pg_timeout).total_seconds())
        if launcher == "slurm":
            from phalanx.launch.slurm import Step

            here = Step.of().place
            return here if here.world_size > 1 else None  # a shell's, say: it needs no network
        return place()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _launcher() -> str:
    """Who has started this process, if none of PyTorch's kind."""
    return "" if os.environ.get("RANK", "").strip() else env.launcher()


def _existing_place() -> Place:
    """The place in the group that exists; what is local comes from the environment, if it fits."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # MPI isn't begun for this: the group may have been formed without it.
    given = _place(None) if "RANK" in os.environ or _launcher() == "slurm" else None
    if given is not None and (given.rank, given.world_size) == (rank, world_size):
        return given
    if _launcher() == "mpi":
        from phalanx.launch import mpi

        return Place(rank, world_size, *mpi.local_place(rank, world_size))
    return Place(rank, world_size, rank, world_size)


def _form(backend: str, timeout: timedelta | None, where: Place | None, engine: str) -> None:
    names = [part.rpartition(":")[2] for part in str(backend).split(",")]
    for name in names:
        if not dist.is_backend_available(name):
            known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
            raise UsageError(f"backend is {backend!r}: expected one that is available of {known}")
    # Defaults in this module capture the group that exists when it is first imported (by the first
    # optimizer, say), and would keep it, with its threads, beyond destroy_process_group().
    importlib.import_module("torch.distributed.nn.functional")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if engine:
        options["pg_options"] = phalanx.Options(engine)
    if where is None:
        store = dist.HashStore()  # type: ignore[attr-defined] # exported at run time
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    else:
        method = f"{_launcher() or 'env'}://"
        dist.init_process_group(backend, init_method=method, **options)


def _timeout(timeout: object) -> timedelta | None:
    if timeout is None:
        return None
    span = timeout
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < 1e9:
        span = timedelta(seconds=timeout)
    if isinstance(span, timedelta) and span > timedelta(0):
        return span
    raise UsageError(f"timeout is {timeout!r}: expected seconds, or a timedelta, greater than 0")


def _device(device: str | int | torch.device | None, local_rank: int) -> torch.device:
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
