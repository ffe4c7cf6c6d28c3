"""Ranks as copies of a process that has made their imports (`PHALANX_PRELOAD`).

`phalanx run` makes the imports once, for itself too, and copies itself before it has threads or
anything of a job. That copy makes the ranks, as `spare_template` makes spares: each starts in some
hundredths of a second, and shares the memory of the imports with the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from phalanx import env
from phalanx.errors import LaunchError, UsageError
from phalanx.launcher import spare
from phalanx.launcher.rank_bootstrap import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.launcher.newcomers import Template
    from phalanx.launcher.options import Job

_COPY_SECONDS = 60.0
"""The longest time to wait for a copy, in seconds; it takes some hundredths."""
_POLL_SECONDS = 0.5
_ALLOCATOR = {-1: "MALLOC_TRIM_THRESHOLD_", -3: "MALLOC_MMAP_THRESHOLD_"}
"""The environment variables of parameters of glibc's `mallopt` (malloc.h)."""

_templates: list[Template] = []
"""The process whose copies become ranks, if there is one."""


def start(begin: Callable[[], None]) -> bool:
    """Make the imports and the process whose copies become ranks; call this without threads.

    Args:
        begin: A function that does what `import torch` does in a rank because of its environment.
            It must not have replaced backends yet, as the launcher's options decide about that.

    Returns:
        False in the launcher. True in a rank that has come to the end of its script, and in the
        process that is copied when it is not needed any more.

    Raises:
        UsageError: The variable is malformed, or a module cannot be imported.
    """
    try:
        for name in env.preloaded_modules():
            importlib.import_module(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        raise UsageError(f"PHALANX_PRELOAD in the environment: {error}") from None
    from phalanx.launcher.newcomers import Template
    from phalanx.launcher.spare_template import make_copies
    from phalanx.system.processes import AdoptedHandler

    launcher, descriptors = os.getpid(), (-1, -1)

    def fork(own: tuple[int, int]) -> Any:
        nonlocal descriptors
        descriptors = own
        pid = os.fork()
        if pid:
            with contextlib.suppress(ProcessLookupError):  # it has ended, as `Copies` will notice
                os.setpgid(pid, pid)
            return AdoptedHandler(pid)
        os.setpgid(0, 0)
        die_with_parent(launcher)
        return None

    template = Template(fork)
    if os.getpid() == launcher:
        _templates.append(template)
        return False
    template.close_descriptors(*descriptors)
    files: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # without /proc, the launcher cannot go on either
        files = make_copies(launcher, *descriptors)
    if files:
        _be_rank(files, begin)
    return True


def _be_rank(files: list[int], begin: Callable[[], None]) -> None:
    """Wait for the place of a rank, and run its script, as a new process would."""
    place = spare.wait_for_place(*files)
    if not place:
        return
    spare.take_place(place)
    for number, name in ((1, "stdout"), (2, "stderr")):  # unbuffered, as by `python -u`
        former = getattr(sys, name)
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - until the end
        errors = "strict" if number == 1 else "backslashreplace"
        stream = io.TextIOWrapper(raw, former.encoding, errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _apply_defaults()
    begin()
    spare.run_script(place)


def _apply_defaults() -> None:
    """Set what libraries read from the environment when they are loaded, which is over."""
    if (threads := _integer("OMP_NUM_THREADS")) > 0:
        import torch

        torch.set_num_threads(threads)
    allocator = ctypes.CDLL(None)
    for parameter, name in _ALLOCATOR.items():
        if (value := _integer(name)) >= 0:
            allocator.mallopt(parameter, value)


def _integer(variable: str) -> int:
    """Return the number in an environment variable; -1 if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else -1


class CopyError(LaunchError):
    """There is no process any more whose copies become ranks."""


class Copies:
    """The ranks of a job, made as copies.

    Args:
        job: The job.
        key: The descriptor of the job's key; -1 if there is none.
    """

    def __init__(self, job: Job, key: int) -> None:
        self._job, self._key = job, key

    @property
    def can_start(self) -> bool:
        """True if there is a process to copy, and ranks can be copies of it."""
        has_plain_processes = self._job.config.numa_options is None
        return bool(_templates) and self._job.script is not None and has_plain_processes

    def start(self, *, env: dict[str, str], stdout: str, stderr: str, **_others: Any) -> Any:
        """Start a rank; takes the place of PyTorch's `get_subprocess_handler`.

        Args:
            env: The variables of the rank, beside those of this process.
            stdout: The path of the file for its stdout.
            stderr: The path of the file for its stderr.

        Returns:
            An object like PyTorch's `SubprocessHandler`.

        Raises:
            CopyError: The process to copy has ended.
            OSError: There are no more descriptors.
        """
        (template,), script = _templates, self._job.script
        assert script is not None  # can_start
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        output, errors = (os.open(path or os.devnull, flags, 0o666) for path in (stdout, stderr))
        copy = template.copy((output, errors))
        end = time.monotonic() + _COPY_SECONDS
        while not template.poll(_POLL_SECONDS):
            if template.handler.proc.poll() is not None or time.monotonic() > end:
                raise CopyError(
                    "the process that ranks are copies of has ended, or does not answer: unset "
                    "PHALANX_PRELOAD, or remove modules from it that start threads"
                )
        launcher = os.getpid()
        copy.assign(
            {
                "environment": {**os.environ, **env},
                "key": (launcher, self._key),
                "simulated_hosts": self._job.simulated_hosts,
                "logs": ("", ""),
                **script._asdict(),
            }
        )
        copy.close()
        return copy.handler


def close() -> None:
    """End the process whose copies become ranks; those go on."""
    while _templates:
        _templates.pop().close()
