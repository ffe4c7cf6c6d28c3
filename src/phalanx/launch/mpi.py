"""Ranks that `mpirun` has started: `init_method="mpi://"`.

MPI says rank and world size, and carries to all where the store of rank 0 is. What the group runs
on is another matter: `mpi://` says how ranks meet, `PHALANX_ENGINE=mpi` what carries their bytes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import default_pg_timeout

from phalanx import env, env_hosts, topology
from phalanx.engines import EngineError
from phalanx.engines.mpi import MOST_TEXT, World, the_world
from phalanx.errors import PhalanxError, UsageError
from phalanx.launch.store import HOST, check_given, host_store, join_store, met

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["local_place", "meet", "place"]

_REFUSED = "-"
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def meet(
    url: str, timeout: timedelta = default_pg_timeout, **_options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Meet the other processes that `mpirun` has started; PyTorch calls it for `mpi://`.

    Blocks until rank 0 has come and, the first time, all others have.

    Args:
        url: as the script gave it, with rank and world size if it gave them.
        timeout: how long each wait may take.

    Raises:
        UsageError: `mpirun` hasn't started this process; there is no MPI library; the script gave
            another rank or world size; rank 0 has no address that others reach.
        PhalanxError: somebody didn't come in time.
    """
    world = _world(timeout)
    check_given(url, world.rank, world.size)
    text = None
    if world.rank == 0:
        try:
            store = _hosted(world.size, timeout)
        except UsageError as error:
            world.share(f"{_REFUSED} {error}".encode()[:MOST_TEXT], 0)
            raise
        text = f"{store.host} {store.port}".encode()
    try:
        shared = world.share(text, timeout.total_seconds()).decode(errors="replace")
    except EngineError as error:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] mpi://: {error}") from None
    host, _, port = shared.partition(" ")
    if host == _REFUSED:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] rank 0 can't host the store: {port}")
    if world.rank:
        store = join_store(host, int(port), timeout)
    return met(store, world.rank, world.size)


def place(seconds: float) -> env.Place:
    """The place of this process, by MPI; blocks as `meet` does.

    Raises:
        UsageError: there is no MPI library.
        PhalanxError: somebody didn't come in time.
        ValueError: a variable of `mpirun` is no integer, or out of range.
    """
    world = _world(timedelta(seconds=seconds))
    return env.Place(world.rank, world.size, *local_place(world.rank, world.size))


def local_place(
    rank: int, world_size: int, environ: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Local rank, and the ranks of this host, as `mpirun` says; else those of one host.

    Args:
        rank: this process's number among all.
        world_size: how many there are.
        environ: where to read; default `os.environ`.

    Raises:
        ValueError: a variable is no integer, or out of range.
    """
    for of_rank, of_size in _LOCAL:
        size = env.integer(of_size, minimum=1, maximum=world_size, environ=environ)
        if size is not None:
            local = env.integer(of_rank, minimum=0, maximum=size - 1, environ=environ)
            if local is not None:
                return local, size
    return rank, world_size


def _world(timeout: timedelta) -> World:
    if not env.mpi_launcher():
        raise UsageError(
            "this process was not started by mpirun, so there is no MPI to meet by: start the "
            "script with `mpirun -n 4 python script.py`, or with `phalanx run` and without mpi://"
        )
    try:
        return the_world(timeout.total_seconds())
    except EngineError as error:
        raise PhalanxError(f"mpi://: {error}") from None


def _hosted(size: int, timeout: timedelta) -> Any:
    address = _address_of_rank_0(size)
    try:
        return host_store(host=address, timeout=timeout)
    except OSError as error:
        raise UsageError(
            f"rank 0 can't listen on {address} ({os.strerror(error.errno or 0)}): set "
            "PHALANX_INTERFACE to an interface or address of its machine"
        ) from None


def _address_of_rank_0(size: int) -> str:
    """Where others reach this process; the loopback interface's if they are all on its host."""
    if given := env_hosts.interface():
        return topology.interface_address(given)
    if local_place(0, size)[1] == size and env.mpi_launcher() != "MPI":
        return HOST
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for _, _, _, _, where in found:
        if not ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback:
            return str(where[0])
    raise UsageError(
        f"the name of this machine, {name}, leads to no address that other machines reach: set "
        "PHALANX_INTERFACE to an interface or address of it"
    )
