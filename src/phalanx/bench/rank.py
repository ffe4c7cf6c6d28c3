"""The program of a process of a system: it waits for the parent's commands and answers them.

An idle process blocks in a read, so systems that wait for their turn use no CPU time. A process
ends immediately when its parent dies, even during an operation.
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
from typing import TYPE_CHECKING

import numpy as np

from phalanx.bench.messages import Command, Hello, PrepareCommand, Reply, StopCommand, StreamCommand
from phalanx.bench.timed_operation import System, TimedOperation, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOCKET = "parent"
"""Name of the parent's Unix socket, in a private folder that the parent has created."""

# Seconds after which a process ends that has lost its connection with the parent.
_EXIT_DELAY = 5.0

COPY_METHODS = ("copy", "blocks")
"""The methods of measuring the memory bandwidth."""
_BLOCK_ELEMENTS = 2**16


def main() -> None:
    """Run one rank: `rank.py SYSTEM FOLDER PARENT TIMEOUT`."""
    name, folder, parent, timeout = sys.argv[1:]
    _exit_with_parent(int(parent), folder)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.connect(os.path.join(folder, SOCKET))
        connection = Connection(endpoint.detach())
    rank = int(os.environ.get("RANK", "-1"))
    try:
        system = _create_system(name, folder, float(timeout))
    except Exception as error:  # noqa: BLE001 - reported to the parent
        connection.send(Hello(rank, os.getpid(), error=_describe_error(error)))
        return
    rank, version = (system.rank, system.version) if system else (rank, "")
    connection.send(Hello(rank, os.getpid(), version))
    try:
        _CommandHandler(system).serve(connection)
    except (EOFError, OSError):
        # Either the parent has died and watch() ends this process, or the parent has given up on
        # this system and kills it. In neither case can the process leave the system's group.
        time.sleep(_EXIT_DELAY)
        os._exit(1)
    if system:
        system.close()


class _CommandHandler:
    """The handler of the parent's commands."""

    def __init__(self, system: System | None) -> None:
        self._system = system
        self._operation: TimedOperation | None = None
        self._arrays: list[NDArray[np.int64]] = []

    def serve(self, connection: Connection) -> None:
        """Answer commands until a `StopCommand`.

        Raises:
            EOFError: The parent has closed the connection.
            OSError: The connection is lost.
        """
        while not isinstance(command := connection.recv(), StopCommand):
            connection.send(self._answer(command))
        self._release()

    def _answer(self, command: Command) -> Reply:
        try:
            if isinstance(command, PrepareCommand):
                return self._prepare(command)
            if isinstance(command, StreamCommand):
                return Reply(self._measure_bandwidth(command))
            assert self._operation is not None
            assert not isinstance(command, StopCommand)
            return Reply(self._operation.time(command))
        except UnsupportedError as error:
            return Reply(missing=str(error))
        except Exception as error:  # noqa: BLE001 - reported to the parent
            return Reply(error=_describe_error(error))

    def _prepare(self, command: PrepareCommand) -> Reply:
        assert self._system is not None
        self._release()
        self._operation = TimedOperation(self._system, command)
        return Reply(wrong="" if command.seed is None else self._operation.check(command.seed))

    def _measure_bandwidth(self, command: StreamCommand) -> float:
        """Copy memory and return the bandwidth of this rank in bytes per second.

        Every operation is compared with it. All ranks copy arrays far larger than the caches at the
        same time, by two methods. Bytes read and bytes written both count. The faster method is the
        limit. `copy` copies the whole array by one call of the C library, which may write past the
        caches; `blocks` copies half a MiB at a time, through the caches.

        The size of the arrays is fixed by the first call. The pass that runs at the end of the
        duration is completed.
        """
        if not self._arrays:
            self._arrays = [np.ones(command.size // 8, np.int64) for _ in range(2)]
        source, target = self._arrays
        blocks = [slice(i, i + _BLOCK_ELEMENTS) for i in range(0, source.size, _BLOCK_ELEMENTS)]
        while time.monotonic() < command.start:
            pass
        moved, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < command.seconds or moved == 0:
            if command.method == "copy":
                np.copyto(target, source)
            else:
                for block in blocks:
                    target[block] = source[block]
            moved += source.nbytes + target.nbytes
        return moved / taken

    def _release(self) -> None:
        self._operation = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _create_system(name: str, folder: str, timeout: float) -> System | None:
    if name == "memory":  # these ranks only copy memory
        return None
    if name in ("openmpi", "mpich"):
        from phalanx.bench.mpi_rank import MpiSystem

        return MpiSystem()
    from phalanx.bench.torch_rank import TorchSystem

    backend, _, kind = name.partition("-")
    return TorchSystem(backend, f"{folder}/{name}.store", timeout, kind)


def _exit_with_parent(parent: int, folder: str) -> None:
    """Watch the parent; when it dies, remove its folder and end this process.

    `parent` need not be the direct parent: an MPI launcher may be in between.
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


def _describe_error(error: Exception) -> str:
    """Return a description of an error in one line."""
    if isinstance(error, UnsupportedError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
