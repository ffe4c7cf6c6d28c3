"""Reports on the store that rank 0 hosts and the other ranks reach by PyTorch's `env://`.

PyTorch's client waits for an answer without a timeout and logs nothing. If another program listens
on the port, rank 0 fails at once, but no other rank would report anything.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

import torch.distributed as dist

from phalanx.errors import UsageError

__all__ = ["report_slow_store"]

_log = logging.getLogger("phalanx")
_SECONDS = 20.0
_CONNECT_SECONDS = 3.0


@contextlib.contextmanager
def report_slow_store(rank: int) -> Iterator[None]:
    """Log the state of the store once if the body, which forms a group, takes long.

    Does nothing if a launcher hosts the store.

    Raises:
        UsageError: This is rank 0, and the port is in use on this machine.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield
        return
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    timer = threading.Timer(_SECONDS, _report, (rank, host, port))
    timer.daemon = True
    if rank > 0:
        timer.start()
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UsageError(
            f"rank {rank} can't listen on port {port}, the port of the rendezvous: it is in use on "
            "this machine. Set MASTER_PORT to a free port, on all ranks"
        ) from None
    finally:
        timer.cancel()


def _report(rank: int, host: str, port: str) -> None:
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        state = "a program listens there; if it is not rank 0, then rank 0 has failed with an error"
    except (OSError, ValueError) as error:
        state = f"that address is not reachable ({error})"
    _log.warning(
        "phalanx: rank %d has waited %g s for the rendezvous of the ranks at %s:%s: %s. Check "
        "that all ranks were started, and the output of rank 0",
        rank,
        _SECONDS,
        host,
        port,
        state,
    )
