"""The store for the rendezvous of ranks, hosted by their launcher or by rank 0.

`rank_variables` are the environment variables from which ranks find it.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from phalanx.errors import UsageError

HOST = "127.0.0.1"

_log = logging.getLogger("phalanx")
_REPORT_SECONDS = 20.0
_CONNECT_SECONDS = 3.0


def host_store(port: int = 0, *, host: str = HOST, timeout: timedelta | None = None) -> Any:
    """Host a `TCPStore`, by default on the loopback interface; it lives as long as the object.

    A free port is bound before its number is published, so no other process can take it.

    Args:
        port: The port; 0 for a free one.
        host: The address to listen on; by default only this machine can reach the store.
        timeout: The timeout of the store's operations; None for PyTorch's default.

    Raises:
        OSError: The port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store takes it over
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.TCPStore(  # type: ignore[attr-defined] # exported at run time
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, **options
    )


def rank_variables(
    rank: int, nprocs: int, store_port: int, run_id: str | None = None
) -> dict[str, str]:
    """Return the variables from which a rank of this host finds its peers, named as torchrun's.

    Args:
        rank: The rank.
        nprocs: The number of ranks, all on this host.
        store_port: The port of the ranks' store, on the loopback interface.
        run_id: The name of the run, for the variables of torchrun's agent; None to omit these.
    """
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if run_id is not None:
        variables |= {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(nprocs),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_ERROR_FILE": "",
        }
    return variables


class AttemptStores:
    """The successive stores of a job's ranks, on this host's loopback interface; thread-safe.

    Each start of all ranks has a new store. In the previous store, restarted ranks would find the
    entries of dead ranks and try to connect to them.

    Args:
        port: The port of the stores; 0 for any free port.
    """

    def __init__(self, port: int = 0) -> None:
        self._requested_port = port
        self._lock = threading.Lock()
        self._attempt = -1
        self._store: Any = None

    def port(self, attempt: int) -> int:
        """Return the port of the store of an attempt.

        The first call for an attempt creates its store and closes the previous one.

        Args:
            attempt: The number of the attempt, from 0.

        Raises:
            OSError: The port cannot be bound.
            LookupError: A later attempt has begun.
        """
        with self._lock:
            if attempt < self._attempt:
                raise LookupError(f"attempt {attempt} is over: {self._attempt} has begun")
            if attempt > self._attempt or self._store is None:
                self._store = None  # frees its port
                self._store = host_store(self._requested_port)
                self._attempt = attempt
            return int(self._store.port)


def join_store(host: str, port: int, timeout: timedelta) -> Any:
    """Connect to the store that rank 0 hosts.

    Raises:
        torch.distributed.DistError: The store is not reachable within `timeout`.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def check_rank_and_size(url: str, rank: int, size: int) -> None:
    """Check that a rank and world size given by the script are those of this process.

    Args:
        url: The URL of the rendezvous; PyTorch puts the script's values into its query.
        rank: The rank of this process.
        size: The world size.

    Raises:
        UsageError: The script gave another rank or world size.
    """
    values = parse_qs(urlparse(url).query)
    for name, value in (("rank", rank), ("world_size", size)):
        if values.get(name, [str(value)]) != [str(value)]:
            scheme = urlparse(url).scheme
            raise UsageError(
                f"{name} is {values[name][0]}, but {scheme}:// sets it to {value}: omit it in "
                "init_process_group"
            )


def rendezvous_result(store: Any, rank: int, size: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the result of a rendezvous once, as PyTorch requires; raise on a second request."""
    yield store, rank, size
    raise RuntimeError("ranks can't repeat their rendezvous: destroy the process group first")


@contextlib.contextmanager
def report_slow_store(rank: int) -> Iterator[None]:
    """Log the state of the store once if the body, which forms a group, takes long.

    This concerns the store that rank 0 hosts and the other ranks reach by PyTorch's `env://`. Their
    client waits for an answer without a timeout and logs nothing. If another program listens on the
    port, rank 0 fails at once, but no other rank would report anything. Does nothing if a launcher
    hosts the store.

    Raises:
        UsageError: This is rank 0, and the port is in use on this machine.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield
        return
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    timer = threading.Timer(_REPORT_SECONDS, _report_state, (rank, host, port))
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


def _report_state(rank: int, host: str, port: str) -> None:
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        state = "a program listens there; if it is not rank 0, then rank 0 has failed with an error"
    except (OSError, ValueError) as error:
        state = f"that address is not reachable ({error})"
    _log.warning(
        "phalanx: rank %d has waited %g s for the rendezvous of the ranks at %s:%s: %s. Check "
        "that all ranks were started, and the output of rank 0",
        rank,
        _REPORT_SECONDS,
        host,
        port,
        state,
    )
