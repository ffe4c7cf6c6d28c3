"""The store in which ranks find each other: hosted by whoever starts them, or by rank 0."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from phalanx.errors import UsageError

__all__ = ["HOST", "AttemptStores", "check_given", "host_store", "join_store", "met"]

HOST = "127.0.0.1"


def host_store(
    port: int = 0, *, host: str = HOST, bind: str | None = None, timeout: timedelta | None = None
) -> Any:
    """Host a `TCPStore`, by default on the loopback interface; it lives as long as the object.

    A free port is bound before its number is told to anyone, so nobody can take it in between.

    Args:
        port: which one; 0 for a free one.
        host: the address at which others reach it, if not on this machine alone.
        bind: the address to listen on, if not `host`; "" for all.
        timeout: how long its operations wait; None for PyTorch's default.

    Raises:
        OSError: the port can't be had.
    """
    address = host if bind is None else bind
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=512)
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store takes it over
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.TCPStore(  # type: ignore[attr-defined] # exported at run time
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, **options
    )


class AttemptStores:
    """The stores of a job's ranks, one after another, on this host's loopback interface.

    A new one for each start of all ranks: in the last one's, ranks that are started again would
    find what the dead have left, and try to connect to them. May be used by several threads.

    Args:
        port: Where; 0 for any.
    """

    def __init__(self, port: int = 0) -> None:
        self._wanted = port
        self._lock = threading.Lock()
        self._attempt = -1
        self._store: Any = None

    def port(self, attempt: int) -> int:
        """Where the store of an attempt is; the first who asks for it ends the one before.

        Args:
            attempt: Its number, from 0.

        Raises:
            OSError: The port can't be had.
            LookupError: A later one has begun.
        """
        with self._lock:
            if attempt < self._attempt:
                raise LookupError(f"attempt {attempt} is over: {self._attempt} has begun")
            if attempt > self._attempt or self._store is None:
                self._store = None  # its port is free then
                self._store = host_store(self._wanted)
                self._attempt = attempt
            return int(self._store.port)


def join_store(host: str, port: int, timeout: timedelta) -> Any:
    """Connect to the store that rank 0 hosts.

    Raises:
        torch.distributed.DistError: it isn't there within `timeout`.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def check_given(url: str, rank: int, size: int) -> None:
    """Raise `UsageError` if a script gave another rank or world size than it has.

    Args:
        url: the way to meet, with what the script gave behind it, as PyTorch puts it there.
        rank: of this process.
        size: the world size.
    """
    given = parse_qs(urlparse(url).query)
    for name, value in (("rank", rank), ("world_size", size)):
        if given.get(name, [str(value)]) != [str(value)]:
            scheme = urlparse(url).scheme
            raise UsageError(
                f"{name} is {given[name][0]}, but {value} by {scheme}://, which knows it: leave it "
                "out of init_process_group"
            )


def met(store: Any, rank: int, size: int) -> Iterator[tuple[Any, int, int]]:
    """What PyTorch asks of a way to meet."""
    yield store, rank, size
    raise RuntimeError("ranks that have met can't do so again: destroy the process group first")
