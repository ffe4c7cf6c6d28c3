"""Ranks that are started by a real `mpirun`, from the wheel of Open MPI or of MPICH.

Both wheels are in one environment, and both install a program `mpirun`, so that one overwrites the
other. So each library's launcher is started by its own name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import psutil
import pytest

__all__ = ["LIBRARIES", "MpiRanks", "mpirun"]

LIBRARIES = ("openmpi", "mpich")
LIMIT = 100
ROOT = Path(__file__).parents[1]


def mpirun(
    library: str, ranks: int, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts `ranks` ranks, and its environment."""
    folder = Path(sys.executable).parent
    arguments = ["mpiexec.hydra"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if library == "openmpi":
        arguments = ["prterun", "--personality", "ompi", "--bind-to", "none"]
        arguments += ["--map-by", "slot:OVERSUBSCRIBE"]
        arguments += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        prefixes = ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
        variables |= dict.fromkeys(prefixes, str(folder.parent))
    arguments[0] = str(folder / arguments[0])
    if not Path(arguments[0]).exists():
        # CI has it and must not skip the test.
        fail_or_skip = pytest.fail if os.environ.get("PHALANX_CI") else pytest.skip
        fail_or_skip(f"needs {arguments[0]}: pip install {library}")
    env = {**os.environ, **variables, **(environment or {})}
    return [*arguments, "-n", str(ranks), *command], env


def run(
    library: str,
    ranks: int,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command on ranks and wait for it; fail the test if it hangs.

    `options` are for the launcher.
    """
    arguments, env = mpirun(library, ranks, command, environment)
    arguments[1:1] = options
    with subprocess.Popen(
        arguments, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            pytest.fail(f"still running after {LIMIT:g} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a launcher and all processes that it has started."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    for each in (psutil.Process(process.pid), *started):
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


class MpiRanks:
    """Ranks under one `mpirun` that run functions of tests, one after another.

    MPI and torch take seconds to start, so they are started once for many tests.
    """

    def __init__(self, library: str, size: int, folders: pytest.TempPathFactory) -> None:
        self._library, self._size, self._folders = library, size, folders
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: dict[int, Connection] = {}

    def __enter__(self) -> MpiRanks:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections.values():
            connection.close()  # ends the rank
        if self._process is not None:
            try:
                self._process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                end(self._process)

    def run(
        self, size: int, function: Callable[..., object], *arguments: object, hosts: str = ""
    ) -> list[Any]:
        """Run a function on the first `size` ranks, and return its results by rank.

        `RANK`, `WORLD_SIZE` and `FOLDER`, a fresh shared folder, are in the ranks' environment.
        With `hosts`, a letter for the host of each rank, their groups run over the MPI transport.
        """
        if self._process is None:
            pytest.fail("an earlier test has lost the ranks")
        call = cloudpickle.dumps((function, arguments))
        folder = str(self._folders.mktemp("ranks"))
        for rank in range(size):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "FOLDER": folder}
            if hosts:
                environment |= {"PHALANX_HOST_ID": hosts[rank], "PHALANX_TRANSPORT": "mpi"}
            self._connections[rank].send((call, environment))
        values = []
        for rank in range(size):
            connection = self._connections[rank]
            if not connection.poll(LIMIT):
                self._discard_ranks()
                pytest.fail(f"rank {rank} has not ended after {LIMIT:g} s")
            value, error = connection.recv()
            if error:
                self._discard_ranks()
                pytest.fail(f"rank {rank}: {error}")
            values.append(value)
        return values

    def _start(self) -> None:
        address = str(self._folders.mktemp("mpi") / "socket")
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(LIMIT)  # type: ignore[attr-defined]
            command = [sys.executable, "-m", "tests.mpi", address]
            arguments, env = mpirun(self._library, self._size, command)
            self._process = subprocess.Popen(arguments, env=env, cwd=ROOT)
            for _ in range(self._size):
                connection = listener.accept()
                self._connections[connection.recv()] = connection

    def _discard_ranks(self) -> None:
        """Kill the ranks: their state is unknown, so no other test can use them."""
        if self._process is not None:
            end(self._process)
        self._process, self._connections = None, {}


def serve(address: str) -> None:
    """Run functions on a rank, until the test closes the connection."""
    from phalanx.transports.mpi import get_progress_thread

    rank = get_progress_thread(LIMIT).rank
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    while True:
        try:
            call, environment = connection.recv()
        except EOFError:
            return
        os.environ |= environment
        function, arguments = cloudpickle.loads(call)
        try:
            reply = function(*arguments), ""
        except BaseException:
            reply = None, traceback.format_exc()
        for name in environment:
            del os.environ[name]
        connection.send(reply)


if __name__ == "__main__":
    serve(sys.argv[1])
