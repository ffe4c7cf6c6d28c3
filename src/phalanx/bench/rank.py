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

from phalanx.bench.memory import StreamBenchmark
from phalanx.bench.messages import Command, Hello, PrepareCommand, Reply, StopCommand, StreamCommand
from phalanx.bench.timed_operation import System, TimedOperation, UnsupportedError

__all__ = ["SOCKET", "main"]

SOCKET = "parent"
"""Name of the parent's Unix socket, in a private folder that the parent has created."""

# Seconds after which a process ends that has lost its connection with the parent.
_EXIT_DELAY = 5.0


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
        self._stream = StreamBenchmark()

    def serve(self, connection: Connection) -> None:
        """Answer commands until `Stop`; raise EOFError or OSError if the connection is lost."""
        while not isinstance(command := connection.recv(), StopCommand):
            connection.send(self._answer(command))
        self._release()

    def _answer(self, command: Command) -> Reply:
        try:
            if isinstance(command, PrepareCommand):
                return self._prepare(command)
            if isinstance(command, StreamCommand):
                return Reply(
                    self._stream.run(command.method, command.size, command.start, command.seconds)
                )
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
    return TorchSystem(backend, f"{folder}/{name}.store", timeout, shared=kind == "shared")


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
