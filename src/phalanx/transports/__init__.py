"""Transports that carry bytes between hosts: existing libraries behind one small interface.

`interface` defines a transport: tagged sends and receives between the ranks of a group, matched in
the order in which they are posted. Each transport has its own module; `striped` is several of one
kind, for several connections between two ranks. Transports are independent of collectives, of
shared memory and of each other. This module selects the transport of a group.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    Store,
)

from phalanx.errors import UsageError
from phalanx.system.extras import install_command
from phalanx.transports import (
    shutdown_hooks as shutdown_hooks,  # must register its exit handler early
)
from phalanx.transports.interface import Transfer, Transport, TransportError
from phalanx.transports.striped import StripedTransport

__all__ = [
    "DEFAULT",
    "NAMES",
    "Transfer",
    "Transport",
    "TransportError",
    "check_name",
    "open_transport",
]

DEFAULT = "gloo"
NAMES = ("gloo", "mpi", "relay", "nccl")
"""With "nccl", CUDA tensors must use NCCL (`phalanx.backend.cuda`), and other tensors use Gloo."""
_MPI_TIMEOUT = 60.0
"""Seconds that the processes started by mpirun wait for each other before the first group."""


def check_name(name: object, prefix: str = "") -> None:
    """Check that a transport is known, and installed if it needs NCCL or pyzmq.

    Args:
        name: The name of the transport.
        prefix: Text before the error message, such as the source of the name.

    Raises:
        UsageError: The name is unknown, or NCCL or pyzmq is not installed.
    """
    if name not in NAMES:
        raise UsageError(f"{prefix}transport is {name!r}: expected one of {', '.join(NAMES)}")
    if name == "nccl" and not dist.is_nccl_available():
        raise UsageError(
            f"{prefix}transport is 'nccl', but this torch ({torch.__version__}) has no NCCL: "
            "install a build of torch for CUDA, or choose 'gloo'"
        )
    if name == "relay" and importlib.util.find_spec("zmq") is None:
        raise UsageError(
            f"{prefix}transport is 'relay', but pyzmq is not installed: "
            f"{install_command('relay')}, or choose 'gloo'"
        )


def open_transport(
    name: str, store: Store, rank: int, size: int, address: str, connections: int = 1
) -> Transport:
    """Open this rank's end of a transport; connections to peers are made when first used.

    Args:
        name: One of `NAMES`.
        store: The store through which the ranks exchange addresses, for this transport only.
        rank: This rank in the group.
        size: World size of the group.
        address: The address on which this rank listens, of an interface that its peers can reach.
        connections: The number of connections between two ranks; 1 with "mpi".

    Raises:
        UsageError: The transport is unknown or not installed.
        TransportError: The transport cannot be opened.
    """
    check_name(name)
    if connections == 1:
        return _open(name, store, rank, size, address, 0)
    stores = [PrefixStore(f"connection{number}", store) for number in range(connections)]
    return StripedTransport(
        connections, lambda number: _open(name, stores[number], rank, size, address, number)
    )


def _open(name: str, store: Store, rank: int, size: int, address: str, number: int) -> Transport:
    if name == "mpi":
        from phalanx.transports.mpi import MpiTransport, get_progress_thread

        return MpiTransport(get_progress_thread(_MPI_TIMEOUT), store, rank, size)
    if name == "relay":
        from phalanx.transports.relay import RelayTransport

        return RelayTransport(store, rank, size, address, number)
    from phalanx.transports.gloo import GlooTransport

    return GlooTransport(store, rank, size, address)
