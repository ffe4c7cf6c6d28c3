"""Processes of ranks: start them through the fork server, then watch, signal and collect them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import weakref
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from phalanx.errors import LaunchError
from phalanx.system.processes import ChildProcess, RankPidfds, describe_exit
from phalanx.testing.fork_server import Outcome, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Seconds that the server has for an answer; before the first one, it imports torch.
_TIMEOUT = 60.0
_CLOSE_SECONDS = 10.0
_SERVER = (
    "import sys; sys.path[:] = sys.argv[3:]; from phalanx.testing.fork_server import main; main()"
)


@dataclass(frozen=True)
class RankResult:
    """The result of a rank: how it ended, its outcome and its output.

    Attributes:
        rank: Number of the rank in the job.
        pid: Process ID of the rank.
        code: Exit code; if negative, the negated number of the signal that killed the rank.
        hung: Whether the rank was killed because it exceeded the time limit.
        outcome: Outcome that the rank delivered; None if it died before.
        stdout: Contents of the rank's stdout.
        stderr: Contents of the rank's stderr; if the rank hung or crashed, with the stack of every
            thread.
        operations: Names of the rank's operations, in order, if they were counted.
        fault_times: Times of the rank's faults in monotonic seconds, by index among all faults.

    Example:
        >>> rank = runner.run(train, 2)[1]
        >>> rank.returned, rank.code
        (True, 0)
        >>> rank.operations[-1]
        'all_reduce'
    """

    rank: int
    pid: int
    code: int
    hung: bool
    outcome: Outcome | None
    stdout: str
    stderr: str
    operations: tuple[str, ...] = ()
    fault_times: Mapping[int, float] = field(default_factory=dict)

    @property
    def value(self) -> Any:
        """The return value of the function; None if it did not return."""
        return None if self.outcome is None else self.outcome.value

    @property
    def error(self) -> BaseException | None:
        """The exception that the function raised; None if it returned or the rank was killed."""
        return None if self.outcome is None else self.outcome.error

    @property
    def returned(self) -> bool:
        """True if the function returned and the process exited with code 0."""
        return self.outcome is not None and self.error is None and self.code == 0

    @property
    def time(self) -> float:
        """The time at which the function returned or raised, in monotonic seconds, or NaN."""
        return float("nan") if self.outcome is None else self.outcome.time

    def __str__(self) -> str:
        """Return a description of the end, with the traceback or the output of the rank."""
        ending = "hung and was killed" if self.hung else describe_exit(self.code)
        traceback = self.outcome.traceback if self.outcome is not None else ""
        outputs = [traceback] if traceback and not self.hung else [self.stdout, self.stderr]
        head = f"rank {self.rank} (pid {self.pid}) {ending}"
        return "\n".join([head, *(text.rstrip() for text in outputs if text)])


class ForkServer:
    """A process that has imported torch and forks ranks.

    Args:
        modules: Further modules to import, so that the ranks need not.
        environment: Environment variables for all ranks.
    """

    def __init__(
        self, modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._connection, server_end = Pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        arguments = [str(server_end.fileno()), ",".join(modules)]
        self._process = ChildProcess(
            [sys.executable, "-c", _SERVER, *arguments, *path],
            pass_fds=[server_end.fileno()],
            env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
        )
        server_end.close()
        self.close = weakref.finalize(self, _close, self._connection, self._process)
        """End the server and all remaining ranks."""

    def start(self, tasks: Sequence[Task]) -> RankProcesses:
        """Fork a process for each task."""
        pids = self._request("start", list(tasks))
        return RankProcesses(self, tasks, pids)

    def preload(self, module: str) -> None:
        """Import a module in the server, so that ranks started later inherit it."""
        self._request("import", module)

    def reap(self, pids: Sequence[int]) -> list[int]:
        """Reap ranks that have ended and return their wait statuses."""
        statuses: list[int] = self._request("reap", list(pids))
        return statuses

    def _request(self, request: str, argument: object) -> Any:
        try:
            self._connection.send((request, argument))
            if not self._connection.poll(_TIMEOUT):
                raise LaunchError(
                    f"the fork server (pid {self._process.pid}) did not answer within "
                    f"{_TIMEOUT:g} s"
                )
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise LaunchError(
                f"the fork server (pid {self._process.pid}) has ended: see its stderr"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


class RankProcesses:
    """Processes of ranks that have been started but not yet collected."""

    def __init__(self, server: ForkServer, tasks: Sequence[Task], pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self._server = server
        self._tasks = list(tasks)
        self._pidfds = RankPidfds()
        for rank, pid in enumerate(pids):
            self._pidfds.add(rank, pid)
        self.signal = self._pidfds.signal
        self.wait = self._pidfds.wait

    @property
    def folder(self) -> Path:
        """The folder of the ranks' files."""
        return self._tasks[0].file("outcome").parent

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks that hang, after they have written their threads' stacks to stderr."""
        # Python's faulthandler handles SIGABRT even if no Python code can run.
        for number, limit in ((signal.SIGABRT, 1.0), (signal.SIGKILL, _TIMEOUT)):
            self._pidfds.signal_all(number, ranks)
            self.wait(limit, ranks)

    def collect(self, hung: Sequence[int] = ()) -> list[RankResult]:
        """Kill the ranks that still run and return how all of them ended."""
        self._pidfds.signal_all(signal.SIGKILL)
        statuses = self._server.reap(self.pids)
        self._pidfds.close()
        return [self._result(rank, status, rank in hung) for rank, status in enumerate(statuses)]

    def fault_times(self, rank: int) -> dict[int, float]:
        """Return the times of the faults that a rank has suffered so far, by their index."""
        return self._read_record(rank)[1]

    def _result(self, rank: int, status: int, hung: bool) -> RankResult:
        task = self._tasks[rank]
        path = task.file("outcome")
        outcome = pickle.loads(path.read_bytes()) if path.exists() else None
        operations, fault_times = self._read_record(rank)
        return RankResult(
            task.rank,
            self.pids[rank],
            os.waitstatus_to_exitcode(status),
            hung,
            outcome,
            _read_text(task.file("stdout")),
            _read_text(task.file("stderr")),
            tuple(operations),
            fault_times,
        )

    def _read_record(self, rank: int) -> tuple[list[str], dict[int, float]]:
        lines = _read_text(self._tasks[rank].file("record")).splitlines()
        fault_times: dict[int, float] = {}
        for line in lines:
            if line.startswith("! "):
                _, number, when = line.split()
                fault_times[int(number)] = float(when)
        return [line for line in lines if not line.startswith("! ")], fault_times


def _read_text(path: Path) -> str:
    """Return the contents of a file; empty if the rank ended before it created the file."""
    return path.read_text(errors="replace") if path.exists() else ""


def _close(connection: Any, process: ChildProcess) -> None:
    connection.close()
    process.end(_CLOSE_SECONDS)
