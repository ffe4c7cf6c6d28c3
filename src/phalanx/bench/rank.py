"""What a process of a system runs: it waits for the parent's commands, blocked, and answers them.

A process that has nothing to do sleeps in a read, so the systems that don't have their turn cost
nothing. One that loses its parent ends at once, from within whatever it is doing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

from phalanx.bench.memory import Streams
from phalanx.bench.messages import Command, Hello, Prepare, Reply, Stop, Stream
from phalanx.bench.work import System, UnsupportedError, Work

__all__ = ["SOCKET", "main"]

SOCKET = "parent"
"""The parent's Unix socket in the folder that it made, which nobody else can enter."""

# Seconds after which a process ends that nobody wants any more.
_GIVEN_UP = 5.0


def main() -> None:
    """Run one rank: `rank.py SYSTEM FOLDER PARENT TIMEOUT`."""
    name, folder, parent, timeout = sys.argv[1:]
    _end_with(int(parent), folder)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.connect(os.path.join(folder, SOCKET))
        connection = Connection(endpoint.detach())
    rank = int(os.environ.get("RANK", "-1"))
    try:
        system = _make(name, folder, float(timeout))
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
        connection.send(Hello(rank, os.getpid(), error=_words(error)))
        return
    rank, version = (system.rank, system.version) if system else (rank, "")
    connection.send(Hello(rank, os.getpid(), version))
    try:
        _Rank(system).serve(connection)
    except (EOFError, OSError):
        # The parent has died, and the watch ends this process; or it has given this system up, and
        # kills it. There is no leaving the system's group in either case.
        time.sleep(_GIVEN_UP)
        os._exit(1)
    if system:
        system.close()


class _Rank:
    """The answers to the parent's commands."""

    def __init__(self, system: System | None) -> None:
        self._system = system
        self._work: Work | None = None
        self._streams = Streams()

    def serve(self, connection: Connection) -> None:
        """Answer until the parent says to stop; raises EOFError or OSError if it vanishes."""
        while not isinstance(command := connection.recv(), Stop):
            connection.send(self._answer(command))
        self._release()

    def _answer(self, command: Command) -> Reply:
        try:
            if isinstance(command, Prepare):
                return self._prepare(command)
            if isinstance(command, Stream):
                return Reply(
                    self._streams.run(command.method, command.size, command.start, command.seconds)
                )
            assert self._work is not None
            assert not isinstance(command, Stop)
            return Reply(self._work.time(command))
        except UnsupportedError as error:
            return Reply(missing=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
            return Reply(error=_words(error))

    def _prepare(self, command: Prepare) -> Reply:
        assert self._system is not None
        self._release()
        self._work = Work(self._system, command)
        return Reply(wrong="" if command.seed is None else self._work.check(command.seed))

    def _release(self) -> None:
        self._work = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _make(name: str, folder: str, timeout: float) -> System | None:
    if name == "memory":  # no system at all: ranks that only move memory
        return None
    if name in ("openmpi", "mpich"):
        from phalanx.bench.mpi_rank import MpiSystem

        return MpiSystem()
    from phalanx.bench.torch_rank import TorchSystem

    backend, _, kind = name.partition("-")
    return TorchSystem(backend, f"{folder}/{name}.store", timeout, shared=kind == "shared")


def _end_with(parent: int, folder: str) -> None:
    """End this process, and remove the parent's folder, when the parent has died.

    The parent needn't be the process that started this one: an MPI launcher stands in between.
    """
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _words(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, UnsupportedError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
