"""Rendezvous of ranks started by `mpirun`: `init_method="mpi://"`.

MPI provides the rank and the world size, and broadcasts the address of rank 0's store. It need not
transport the group's data: `mpi://` selects the rendezvous, `PHALANX_TRANSPORT=mpi` the transport.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import default_pg_timeout

from phalanx import env
from phalanx.address import interface_address, is_loopback, resolve
from phalanx.errors import PhalanxError, UsageError
from phalanx.launcher.store import (
    HOST,
    check_rank_and_size,
    host_store,
    join_store,
    rendezvous_result,
)
from phalanx.transports import TransportError
from phalanx.transports.mpi import MAX_EAGER_BYTES, MpiProgressThread, get_progress_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAILED = "-"
_LOCAL_VARIABLES = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def rendezvous_handler(
    url: str, timeout: timedelta = default_pg_timeout, **_options: Any
) -> Iterator[tuple[Any, int, int]]:
    """Return the rendezvous of the ranks of `mpirun`; PyTorch calls this function for `mpi://`.

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
    check_rank_and_size(url, world.rank, world.size)
    text = None
    if world.rank == 0:
        try:
            store = _host_store(world.size, timeout)
        except UsageError as error:
            world.broadcast(f"{_FAILED} {error}".encode()[:MAX_EAGER_BYTES], 0)
            raise
        text = f"{store.host} {store.port}".encode()
    try:
        shared = world.broadcast(text, timeout.total_seconds()).decode(errors="replace")
    except TransportError as error:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] mpi://: {error}") from None
    host, _, port = shared.partition(" ")
    if host == _FAILED:
        raise PhalanxError(f"[rank {world.rank}/{world.size}] rank 0 can't host the store: {port}")
    if world.rank:
        store = join_store(host, int(port), timeout)
    return rendezvous_result(store, world.rank, world.size)


def assigned_ranks(seconds: float) -> env.RankAssignment:
    """Return the rank and size of this process according to MPI; block like `rendezvous_handler`.

    Args:
        seconds: The limit of the wait, in seconds.

    Raises:
        UsageError: There is no MPI library, or this process was not started by `mpirun`.
        PhalanxError: A process did not arrive in time.
        ValueError: A variable of `mpirun` is not an integer or is out of range.
    """
    world = _world(timedelta(seconds=seconds))
    return env.RankAssignment(world.rank, world.size, *local_rank_and_size(world.rank, world.size))


def local_rank_and_size(rank: int, world_size: int) -> tuple[int, int]:
    """Return the local rank and the number of ranks on this host.

    Both come from the variables of `mpirun`. If they are missing, all ranks are assumed to be on
    one host.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.

    Raises:
        ValueError: A variable is not an integer or is out of range.
    """
    for rank_variable, size_variable in _LOCAL_VARIABLES:
        size = env.integer(size_variable, minimum=1, maximum=world_size)
        if size is not None:
            local = env.integer(rank_variable, minimum=0, maximum=size - 1)
            if local is not None:
                return local, size
    return rank, world_size


def _world(timeout: timedelta) -> MpiProgressThread:
    if not env.mpi_launcher():
        raise UsageError(
            "this process was not started by mpirun, so MPI can't provide the rendezvous: start "
            "the script with `mpirun -n 4 python script.py`, or with `phalanx run` and without "
            "mpi://"
        )
    try:
        return get_progress_thread(timeout.total_seconds())
    except TransportError as error:
        raise PhalanxError(f"mpi://: {error}") from None


def _host_store(size: int, timeout: timedelta) -> Any:
    address = _rank_0_address(size)
    try:
        return host_store(host=address, timeout=timeout)
    except OSError as error:
        raise UsageError(
            f"rank 0 can't listen on {address} ({os.strerror(error.errno or 0)}): set "
            "PHALANX_INTERFACE to an interface or address of its machine"
        ) from None


def _rank_0_address(size: int) -> str:
    """Return the address at which the other ranks reach this process.

    This is the address of the loopback interface if all ranks are on this host.
    """
    if interface := env.interface():
        return interface_address(interface)
    if local_rank_and_size(0, size)[1] == size and env.mpi_launcher() != "MPI":
        return HOST
    name = socket.gethostname()
    addresses = resolve(name)
    if addresses and not is_loopback(addresses[0]):
        return addresses[0]
    raise UsageError(
        f"the name of this machine, {name}, does not resolve to an address that other machines can "
        "reach: set PHALANX_INTERFACE to one of its interfaces or addresses"
    )
