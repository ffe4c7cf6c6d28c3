"""Processes that `phalanx run --elastic` starts in the place of lost ranks.

Every newcomer begins as a spare (`phalanx.launcher.spare`). As many of them as `--spares` says are
made before they are needed, as copies of a process with the imports of a training
(`phalanx.launcher.spare_template`). Without such a process, a spare is started when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from phalanx.launcher import rank_bootstrap
from phalanx.system.processes import AdoptedHandler, adopt_orphans, describe_exit, reap_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.launcher.options import Script

_COPY_SECONDS = 2.0
"""The longest time to wait for a copy, in seconds; it takes some hundredths."""
_REAP_SECONDS = 1.0
_MOST_LOST_SPARES = 3
"""The number of spares that may end in a row before no more are started."""
_log = logging.getLogger("phalanx")


class Newcomer(NamedTuple):
    """A process in the place of a lost rank.

    Attributes:
        handler: PyTorch's object for the process, or one like it.
        stdout: The read end of the pipe to which its stdout goes.
        stderr: The same of its stderr.
    """

    handler: Any
    stdout: int
    stderr: int


class Spare:
    """A process that waits for a place, until the process that it becomes has ended.

    Args:
        outputs: The descriptors of its stdout and stderr, which this object closes; None for pipes.
    """

    def __init__(self, outputs: tuple[int, int] | None = None) -> None:
        self.wake, self._waker = os.pipe()
        self.place = os.memfd_create("phalanx-place", os.MFD_CLOEXEC)
        if outputs is None:
            (self._stdout, self.out), (self._stderr, self.err) = os.pipe(), os.pipe()
        else:
            (self.out, self.err), self._stdout, self._stderr = outputs, -1, -1
        self.handler: Any = None
        """PyTorch's object for the process, or one like it; None until there is a process."""

    def start(self, key: int) -> None:
        """Start the process, which makes the imports by itself."""
        fds = f"/proc/{os.getpid()}/fd"
        self.begin(
            _start(
                "phalanx.launcher.spare",
                (self.wake, self.place),
                key,
                f"{fds}/{self.out}",
                f"{fds}/{self.err}",
            )
        )

    def begin(self, handler: Any) -> None:
        """Take over the process."""
        self.handler = handler
        self._close("out", "err")

    def assign(self, place: Mapping[str, Any]) -> Newcomer:
        """Give the process the place of a rank."""
        with os.fdopen(self.place, "w", encoding="utf-8", closefd=False) as file:
            json.dump(place, file)
        self._close("_waker")
        return Newcomer(self.handler, self._stdout, self._stderr)

    def describe_end(self) -> str:
        """Return how the process ended, and its last line; empty if it has not."""
        code = None if self.handler is None else self.handler.proc.poll()
        if code is None:
            return ""
        os.set_blocking(self._stderr, False)
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._stderr, 1 << 16).decode(errors="replace").splitlines()
            return f"{describe_exit(code)}: {''.join(lines[-1:])}"
        return describe_exit(code)

    def stop(self) -> None:
        """End the process, which waits for a place, and free all that belongs to it."""
        if self.handler is not None:
            stop(self.handler)
        self.close()
        self._close("out", "err", "_stdout", "_stderr")

    def close(self) -> None:
        """Free what the process needs only until it has its place."""
        self._close("wake", "_waker", "place")

    def _close(self, *names: str) -> None:
        for name in names:
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
                setattr(self, name, -1)


class Template:
    """The process whose copies become spares.

    Args:
        start: Starts it, with its two descriptors in this process (`spare_template.make_copies`).
    """

    def __init__(self, start: Callable[[tuple[int, int]], Any]) -> None:
        adopt_orphans()
        reader, self._requests = os.pipe()
        self._answers, writer = os.pipe()
        os.set_blocking(self._answers, False)
        self._closed_later = [reader, writer]  # the process opens them once it has made its imports
        self._waiting: dict[int, Spare] = {}
        self._count = 0
        self._text = b""
        self.handler = start((reader, writer))
        self.is_ready = False
        """True if the process has made its imports."""

    def copy(self, outputs: tuple[int, int] | None = None) -> Spare:
        """Begin to make a spare (see there), which `poll` returns once it has a process."""
        self._waiting[self._count] = spare = Spare(outputs)
        self._count += 1
        request = json.dumps((spare.wake, spare.place, spare.out, spare.err))
        os.write(self._requests, f"{request}\n".encode())
        return spare

    @property
    def waiting(self) -> int:
        """The number of spares that have no process yet."""
        return len(self._waiting)

    def poll(self, seconds: float = 0.0) -> list[Spare]:
        """Return the spares that have a process now; wait for one for up to some seconds."""
        ready = []
        answers = select.poll()
        answers.register(self._answers, select.POLLIN)
        if answers.poll(1000 * seconds):
            *lines, self._text = (self._text + os.read(self._answers, 1 << 16)).split(b"\n")
            for line in lines:
                number, pid = map(int, line.split())
                spare = self._waiting.pop(number)
                spare.begin(AdoptedHandler(pid))
                ready.append(spare)
        self.is_ready = self.is_ready or bool(ready)
        return ready

    def close(self) -> None:
        """End the process, and the spares that it has not made yet."""
        stop(self.handler)
        for spare in self._waiting.values():
            spare.stop()
        self.close_descriptors(*self._closed_later)

    def close_descriptors(self, *others: int) -> None:
        """Close this side of the pipes."""
        for each in (self._requests, self._answers, *others):
            os.close(each)


def _start(
    module: str,
    descriptors: tuple[int, int],
    key: int,
    stdout: str | None = None,
    stderr: str | None = None,
) -> Any:
    """Start a module like a rank, with two descriptors of this process."""
    parent = os.getpid()
    bootstrap = ("-I", "-S", rank_bootstrap.__file__, parent, 0, key, sys.executable)
    command = (*bootstrap, "-u", "-m", module, parent, *descriptors)
    start: Any = get_subprocess_handler  # its annotations demand paths
    return start(sys.executable, command, {}, stdout, stderr, 0)


class Newcomers:
    """The newcomers of a job on this host, and the spares that wait to become such.

    Args:
        script: The script of each rank.
        spares: The number of spares.
        simulated_hosts: The number of hosts that this machine simulates; 0 for none.
        key: The descriptor of the job's key; -1 if there is none.
    """

    def __init__(self, script: Script, spares: int, simulated_hosts: int, key: int) -> None:
        self._script = script
        self._count = spares
        self._simulated_hosts = simulated_hosts
        self._key = key
        self._template: Template | None = None
        self._spares: list[Spare] = []
        self._placed: dict[int, Spare] = {}
        self._lost_in_a_row = 0

    def prepare(self) -> None:
        """Make the spares that are missing."""
        self._drop_lost_spares()
        template = self._template
        if template is not None and (code := template.handler.proc.poll()) is not None:
            self._add_spares(template)  # it has made them before its end
            template.close()
            template = self._template = None
            self._record_loss(describe_exit(code))
        if not self._count or self._lost_in_a_row >= _MOST_LOST_SPARES:
            return
        if template is None:
            template = self._template = Template(
                lambda descriptors: _start(
                    "phalanx.launcher.spare_template", descriptors, self._key
                )
            )
        self._add_spares(template)
        missing = self._count - len(self._spares) - template.waiting
        if self._lost_in_a_row < _MOST_LOST_SPARES:
            for _ in range(missing):
                template.copy()

    def _add_spares(self, template: Template, seconds: float = 0.0) -> None:
        """Take the spares that have a process now; wait for one for up to some seconds."""
        self._spares += template.poll(seconds)
        self._drop_lost_spares()  # a spare may have ended before its process was known

    def _drop_lost_spares(self) -> None:
        for spare in list(self._spares):
            if end := spare.describe_end():
                self._spares.remove(spare)
                spare.stop()
                self._record_loss(end)

    def _record_loss(self, end: str) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row == _MOST_LOST_SPARES:
            _log.warning(
                "phalanx run: no more spares, since %d in a row ended; the last one %s",
                _MOST_LOST_SPARES,
                end,
            )

    def _take_spare(self) -> Spare:
        """Return a spare with a process that has not ended: the oldest, or a new one."""
        self.prepare()
        template = self._template
        if not self._spares and template is not None and template.is_ready:
            self._add_spares(template, _COPY_SECONDS)
        if self._spares:
            return self._spares.pop(0)
        spare = Spare()
        try:
            spare.start(self._key)
        except OSError:
            spare.stop()
            raise
        return spare

    def start(
        self, local_rank: int, environment: Mapping[str, str], logs: tuple[str, str]
    ) -> Newcomer:
        """Start a process in the place of a rank; the oldest spare becomes it.

        Args:
            local_rank: The rank on this host.
            environment: The variables of the rank.
            logs: The paths of the log files of its stdout and stderr; empty for the console.

        Raises:
            OSError: The process cannot be created.
        """
        spare = self._take_spare()
        self._lost_in_a_row = 0
        if local_rank in self._placed:
            self._placed[local_rank].close()
        self._placed[local_rank] = spare
        return spare.assign(
            {
                "environment": {**environment, "PHALANX_NEWCOMER": "1"},
                "simulated_hosts": self._simulated_hosts,
                "logs": logs,
                **self._script._asdict(),
            }
        )

    def close(self) -> None:
        """End the spares."""
        if self._template is not None:
            self._template.close()
            self._template = None
        for spare in self._spares:
            spare.stop()
        for spare in self._placed.values():
            spare.close()
        self._spares.clear()
        self._placed.clear()


def stop(handler: Any) -> None:
    """End a process with all that it has started, and reap it and those that were adopted."""
    with contextlib.suppress(ProcessLookupError):
        handler.close(signal.SIGKILL)
    handler.proc.wait()
    reap_group(handler.proc.pid, _REAP_SECONDS)
