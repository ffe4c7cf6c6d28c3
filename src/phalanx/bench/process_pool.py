"""The processes of one system, as managed by the parent.

Every wait is bounded. If a process dies, hangs or fails, the whole pool is lost: its processes are
killed, and the parent continues with the other systems.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from phalanx.bench.messages import Command, Hello, Reply, StopCommand
from phalanx.bench.rank import SOCKET
from phalanx.bench.systems import programs
from phalanx.errors import UsageError
from phalanx.system.polling import wait_until
from phalanx.system.processes import ChildProcess, RankPidfds, describe_exit, signal_group

if TYPE_CHECKING:
    from collections.abc import Iterable

_START_LIMIT = 120.0
_STOP_LIMIT = 10.0
# Seconds that the other ranks have to answer after one has answered with an error.
_GRACE = 5.0
_TICK = 0.2

_BOOTSTRAP = """import sys
sys.path[:] = {path!r}
from phalanx.bench.rank import main
main()
"""


class SystemLostError(Exception):
    """A system can no longer be measured; the message names the rank and the reason."""


class ProcessPool:
    """The processes of a system; a context manager that leaves none behind."""

    def __init__(self, name: str, ranks: int, timeout: float) -> None:
        """Start the processes without waiting until they are ready.

        Args:
            name: Name of the system.
            ranks: Number of ranks.
            timeout: Seconds that an answer may take.

        Raises:
            UnavailableError: The system is not installed.
            UsageError: No socket can be created in the folder for temporary files.
        """
        self.name = name
        self.version = ""
        self._ranks, self._timeout = ranks, timeout
        self._folder = TemporaryDirectory(prefix="phalanx-bench-")
        self._connections: dict[int, Connection] = {}
        self._pidfds = RankPidfds()
        self._pids: dict[int, int] = {}
        self._processes: list[ChildProcess] = []
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._start(Path(self._folder.name))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready.

        Raises:
            SystemLostError: A rank ended, failed, or was not ready in time.
        """
        deadline = time.monotonic() + _START_LIMIT
        while len(self._connections) < self._ranks:
            ready, _, _ = select.select([self._socket], [], [], _TICK)
            if ready:
                self._accept(deadline)
            elif ended := self._describe_exit():
                raise SystemLostError(f"it ended before it was ready: {ended}{self._output_tail()}")
            elif time.monotonic() > deadline:
                raise self._make_late_error()

    def execute(self, command: Command, activity: str) -> list[Reply]:
        """Send a command to all ranks, wait for their answers and return them in rank order.

        An answer with an error is returned too, unless it keeps other ranks from answering.

        Args:
            command: The command.
            activity: Name of the command in an error message.

        Raises:
            SystemLostError: A rank died or did not answer in time.
        """
        for rank, connection in self._connections.items():
            try:
                connection.send(command)
            except OSError:
                raise self._make_death_error(rank, activity) from None
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + self._timeout
        while missing := self._connections.keys() - replies.keys():
            ready = wait(
                [self._connections[rank] for rank in missing], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise SystemLostError(self._describe_timeout(sorted(missing), replies, activity))
            for rank in sorted(missing):
                if self._connections[rank] in ready:
                    try:
                        replies[rank] = self._connections[rank].recv()
                    except (EOFError, OSError):
                        raise self._make_death_error(rank, activity) from None
                    if replies[rank].error:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        return [replies[rank] for rank in range(self._ranks)]

    def close(self) -> None:
        """End the processes: first by a `StopCommand`, then by signals."""
        self._socket.close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(StopCommand())
        self._wait_for_exits(_STOP_LIMIT if len(self._connections) == self._ranks else 0.0)
        self._kill()
        for connection in self._connections.values():
            connection.close()
        self._pidfds.close()
        self._connections, self._processes = {}, []
        self._folder.cleanup()

    def kill(self) -> None:
        """End the processes of a lost pool immediately."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        self.close()

    def _start(self, folder: Path) -> None:
        # Only this user can enter a TemporaryDirectory, so the socket needs no authentication.
        try:
            self._socket.bind(str(folder / SOCKET))
        except OSError as error:
            raise UsageError(
                f"can't create a socket in {folder} ({error}): set TMPDIR to a folder with a short "
                "path"
            ) from None
        self._socket.listen(self._ranks)
        script = folder / "rank.py"
        script.write_text(_BOOTSTRAP.format(path=sys.path))
        command = [sys.executable, str(script), self.name, str(folder)]
        command += [str(os.getpid()), str(self._timeout)]
        with (folder / "output").open("wb") as output:
            for program in programs(self.name, self._ranks, command):
                environment = {**os.environ, **program.environment}
                self._processes.append(
                    ChildProcess(program.arguments, env=environment, stdout=output, stderr=output)
                )

    def _accept(self, deadline: float) -> None:
        endpoint, _ = self._socket.accept()
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(Connection(endpoint.detach()))
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise self._make_late_error()
                hello: Hello = connection.recv()
            except (EOFError, OSError):
                text = f"a rank died before it was ready{self._output_tail()}"
                raise SystemLostError(text) from None
            if hello.error:
                raise SystemLostError(hello.error)
            stack.pop_all()
        self.version = hello.version
        self._connections[hello.rank] = connection
        self._pids[hello.rank] = hello.pid
        self._pidfds.add(hello.rank, hello.pid)

    def _make_late_error(self) -> SystemLostError:
        return SystemLostError(f"it was not ready within {_START_LIMIT:g} s{self._output_tail()}")

    def _make_death_error(self, rank: int, activity: str) -> SystemLostError:
        """Return an error that names every dead rank.

        There may be several: if one rank dies, an MPI launcher kills the others.
        """
        wait_until(self._describe_exit, _GRACE, longest=_TICK / 10)
        dead = self._pids.keys() - self._pidfds.wait(0)
        text = f"{self._format_ranks(dead or {rank})} died during {activity}"
        ended = self._describe_exit()
        return SystemLostError(f"{text}: {ended}" if ended else text)

    def _format_ranks(self, ranks: Iterable[int]) -> str:
        return "rank " + ", ".join(f"{rank} (pid {self._pids[rank]})" for rank in sorted(ranks))

    def _describe_timeout(
        self, missing: list[int], replies: dict[int, Reply], activity: str
    ) -> str:
        for rank, reply in sorted(replies.items()):
            if reply.error:
                return f"rank {rank} failed in {activity}: {reply.error}"
        return (
            f"no answer within {self._timeout:g} s to {activity} from {self._format_ranks(missing)}"
        )

    def _describe_exit(self) -> str:
        """Describe the end of the first started process that has ended; empty if all run."""
        for process in self._processes:
            code = process.poll()
            if code is not None:
                return f"{Path(process.command[0]).name} {describe_exit(code)}"
        return ""

    def _output_tail(self) -> str:
        """Return the last lines of the processes' output, joined to one line."""
        output = Path(self._folder.name) / "output"
        lines = output.read_text(errors="replace").split("\n") if output.exists() else []
        lines = [line.strip() for line in lines if line.strip(" -\t")]
        return f" ({' / '.join(lines[-3:])})" if lines else ""

    def _wait_for_exits(self, seconds: float) -> bool:
        return wait_until(
            lambda: all(process.poll() is not None for process in self._processes), seconds
        )

    def _kill(self) -> None:
        self._pidfds.signal_all(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    # The whole group, since a launcher may have started further processes.
                    signal_group(process.pid, number)
            if self._wait_for_exits(_GRACE):
                return
