"""Which engine a group uses."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

    from phalanx.engines.interface import Engine

__all__ = ["DEFAULT", "NAMES", "check_name", "open_engine"]

DEFAULT = "gloo"
NAMES = ("gloo", "mpi", "relay", "nccl")
"""With "nccl", CUDA tensors must go to NCCL (`phalanx.backend.cuda`); others go as with "gloo"."""
_MPI_SECONDS = 60.0
"""How long the processes that mpirun has started wait for each other, before the first group."""


def check_name(name: object, where: str = "") -> None:
    """Raise `UsageError` if there is no such engine, or none here.

    Args:
        name: What was given.
        where: Text before the message, such as where it was given.
    """
    if name not in NAMES:
        raise UsageError(f"{where}engine is {name!r}: expected one of {', '.join(NAMES)}")
    if name == "nccl" and not dist.is_nccl_available():
        raise UsageError(
            f"{where}engine is 'nccl', but this torch ({torch.__version__}) has no NCCL: install a "
            "build of torch for CUDA, or choose 'gloo'"
        )
    if name == "relay" and importlib.util.find_spec("zmq") is None:
        raise UsageError(
            f"{where}engine is 'relay', but pyzmq isn't installed: pip install 'phalanx[relay]', "
            "or choose 'gloo'"
        )


def open_engine(name: str, store: Store, rank: int, size: int, address: str) -> Engine:
    """Make this rank's end of an engine; connections come into being when they are first used.

    Args:
        name: One of `NAMES`.
        store: Where the ranks find each other; its keys are this engine's own.
        rank: This rank in the group.
        size: World size of the group.
        address: Where this rank listens: an address of an interface that the others reach.

    Raises:
        UsageError: There is no such engine, or it isn't installed.
        EngineError: It can't be had here.
    """
    check_name(name)
    if name == "mpi":
        from phalanx.engines.mpi import MpiEngine, the_world

        return MpiEngine(the_world(_MPI_SECONDS), store, rank, size)
    if name == "relay":
        from phalanx.engines.relay import RelayEngine

        return RelayEngine(store, rank, size, address)
    from phalanx.engines.gloo import GlooEngine

    return GlooEngine(store, rank, size, address)
