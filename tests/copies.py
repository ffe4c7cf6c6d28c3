"""Launchers as copies of a process that has made their imports.

A slow test starts `phalanx run` as users do, with `subprocess`. Most of what the launcher does then
is to import torch. `use_copies` makes such a process a copy of a server that has imported it: a
child of this process, with the arguments, environment, directory and files that were asked for,
which runs the installed script from its first line. `PHALANX_PRELOAD` does the same for the ranks.

A process is started as usual if a copy could differ from it: if it is not `phalanx run`, if the
variable is not set for it, or if a variable differs that libraries read when they are loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PHALANX = str(Path(sys.executable).with_name("phalanx"))
USUAL_START: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
"""The method of `Popen` that starts a process."""
VARIABLE = "PHALANX_TEST_COPIES"
"""Set to 1 to have copies."""

_IMPORTS = ("phalanx.launcher.run", "phalanx.diagnosis.explain", "rich.console")
_FIXED = ("PYTHON", "LD_", "OMP_", "MKL_", "MALLOC_", "TORCH", "LOGLEVEL", "LC_", "LANG")
"""The beginnings of names of variables that are read when a process or a library starts."""
_CHOICES = (
    *("preexec_fn", "pass_fds", "shell", "gid", "gids", "uid", "umask"),
    *("startupinfo", "creationflags", "process_group"),
)
_USUAL = (None, False, -1, ())
"""Arguments of `Popen`, and the values that they must have for a copy."""
_MOST_BYTES = 1 << 20
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of sys/prctl.h


class CopyServer:
    """The process that is copied."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.copies", str(other.fileno())]
        root = Path(__file__).parents[1]
        environment = {k: v for k, v in os.environ.items() if k != "PHALANX_REPLACE"}
        self._process = subprocess.Popen(
            command, pass_fds=[other.fileno()], cwd=root, env=environment
        )
        other.close()
        self._environment = fixed_variables(os.environ)
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def close(self) -> None:
        """End it; copies go on."""
        self._socket.close()
        self._process.wait()

    def can_start(self, command: Any, environment: Mapping[str, str]) -> bool:
        """Return whether a copy does what a process with these arguments of `Popen` would do."""
        return (
            isinstance(command, list | tuple)
            and list(map(os.fspath, command[:2])) == [PHALANX, "run"]
            and environment.get("PHALANX_PRELOAD") == "torch"
            and fixed_variables(environment) == self._environment
        )

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Make a copy, which becomes a child of this process; return its pid."""
        with self._lock:
            _adopt(True)
            try:
                message = json.dumps({**request, "parent": os.getpid()}).encode()
                socket.send_fds(self._socket, [message], list(files))
                answer = json.loads(self._socket.recv(_MOST_BYTES) or "{}")
            finally:
                _adopt(False)
        if "pid" not in answer:
            raise RuntimeError("the process that launchers are copies of has ended")
        return int(answer["pid"])


def fixed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a copy cannot change any more."""
    return {name: value for name, value in environment.items() if name.startswith(_FIXED)}


def use_copies() -> CopyServer:
    """Have `subprocess` start `phalanx run` as a copy from now on; return the server."""
    server = CopyServer()
    subprocess.Popen._execute_child = copying_start(server)  # type: ignore[attr-defined]
    return server


def copying_start(server: CopyServer) -> Callable[..., None]:
    """Return the method of `Popen` that starts a process, with copies where these are the same."""
    start = USUAL_START
    names = start.__code__.co_varnames[1 : start.__code__.co_argcount]

    def execute_child(self: Any, *arguments: Any) -> None:
        values = dict(zip(names, arguments, strict=True))
        environment = os.environ if values["env"] is None else values["env"]
        is_usual = any(values[name] not in _USUAL for name in _CHOICES)
        if is_usual or not server.can_start(values["args"], environment):
            start(self, *arguments)
            return
        files = (values[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        self.pid = server.start(
            {
                "arguments": list(map(os.fspath, values["args"])),
                "environment": dict(environment),
                "directory": os.fspath(values["cwd"] or os.getcwd()),
                "starts_session": values["start_new_session"],
            },
            [number if file == -1 else file for number, file in enumerate(files)],
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(values[name] for name in pipes))

    return execute_child


def _adopt(is_wanted: bool) -> None:
    """Become the parent of orphans among this process's descendants, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(is_wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Make copies until the other side is gone; in a copy, return the request."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not message:
            return None
        request = json.loads(message)
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != request["parent"]:
                time.sleep(0.0002)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            connection.send(json.dumps({"pid": os.getpid()}).encode())
            connection.close()
            return dict(request)
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


def _become(request: Mapping[str, Any]) -> None:
    """Be as a process that was just started with these arguments."""
    if request["starts_session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = list(request["arguments"])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        former = getattr(sys, name)
        stream = io.TextIOWrapper(
            open(number, "rb" if number == 0 else "wb", closefd=False),  # noqa: SIM115 - until the end
            former.encoding,
            "backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Make the imports, then copies; in a copy, be the launcher."""
    from phalanx.cli.run import load_torch_quietly

    connection = socket.socket(fileno=int(sys.argv[1]))
    load_torch_quietly()
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = _serve(connection)
    if request is not None:
        _become(request)
        runpy.run_path(request["arguments"][0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
