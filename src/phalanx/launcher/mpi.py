"""Rendezvous of ranks started by `mpirun`: `init_method="mpi://"`.

MPI provides the rank and the world size, and broadcasts the address of rank 0's store. It need not
transport the group's data: `mpi://` selects the rendezvous, `PHALANX_TRANSPORT=mpi` the transport.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import default_pg_timeout

from phalanx import env, env_hosts, topology
from phalanx.errors import PhalanxError, UsageError
from phalanx.launcher.store import HOST, check_given, host_store, join_store, met
from phalanx.transports import TransportError
from phalanx.transports.mpi import MAX_EAGER_BYTES, MpiProgressThread, get_progress_thread

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
    """Meet the other processes started by `mpirun`; PyTorch calls this function for `mpi://`.

    Blocks until rank 0 has arrived and, the first time, until all others have.

    Args:
        url: The URL from the script, with the rank and world size if the script gave them.
        timeout: The limit of each wait.

    Raises:
        UsageError: This process was not started by `mpirun`; there is no MPI library; the script
            gave another rank or world size; or rank 0 has no address that others can reach.
        PhalanxError: A process did not arrive in time.
    """
    world = _world(timeout)
    check_given(url, world.rank, world.size)
    text = None
    if world.rank == 0:
        try:
            store = _hosted(world.size, timeout)
        except UsageError as error:
            world.broadcast(f"{_REFUSED} {error}".encode()[:MAX_EAGER_BYTES], 0)
            raise
        text = f"{store.host} {store.port}".encode()
    try:
        shared = world.broadcast(text, timeout.total_seconds()).decode(errors="replace")
    except TransportError as error:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] mpi://: {error}") from None
    host, _, port = shared.partition(" ")
    if host == _REFUSED:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] rank 0 can't host the store: {port}")
    if world.rank:
        store = join_store(host, int(port), timeout)
    return met(store, world.rank, world.size)


def place(seconds: float) -> env.RankAssignment:
    """Return the place of this process according to MPI; block as `meet` does.

    Args:
        seconds: The limit of the wait, in seconds.

    Raises:
        UsageError: There is no MPI library, or this process was not started by `mpirun`.
        PhalanxError: A process did not arrive in time.
        ValueError: A variable of `mpirun` is not an integer or is out of range.
    """
    world = _world(timedelta(seconds=seconds))
    return env.RankAssignment(world.rank, world.size, *local_place(world.rank, world.size))


def local_place(
    rank: int, world_size: int, environ: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Return the local rank and the number of ranks on this host.

    Both come from the variables of `mpirun`. If they are missing, all ranks are assumed to be on
    one host.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        environ: The environment to read; by default `os.environ`.

    Raises:
        ValueError: A variable is not an integer or is out of range.
    """
    for of_rank, of_size in _LOCAL:
        size = env.integer(of_size, minimum=1, maximum=world_size, environ=environ)
        if size is not None:
            local = env.integer(of_rank, minimum=0, maximum=size - 1, environ=environ)
            if local is not None:
                return local, size
    return rank, world_size


def _world(timeout: timedelta) -> MpiProgressThread:
    if not env.mpi_launcher():
        raise UsageError(
            "this process was not started by mpirun, so there is no MPI to meet by: start the "
            "script with `mpirun -n 4 python script.py`, or with `phalanx run` and without mpi://"
        )
    try:
        return get_progress_thread(timeout.total_seconds())
    except TransportError as error:
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
    """Return the address at which the other ranks reach this process.

    This is the address of the loopback interface if all ranks are on this host.
    """
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
