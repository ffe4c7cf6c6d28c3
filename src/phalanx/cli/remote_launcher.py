"""One host of `phalanx run --hosts`, started there by ssh; no command for people.

It is `phalanx run` for the ranks of this host, with everything that it would print sent through the
pipe to the shell instead. It ends its ranks when the shell says so, and when the shell is gone.
"""

import contextlib
import io
import os
import select
import signal
import socket
import sys
import threading
import time
from importlib import metadata
from typing import Any

from phalanx import __version__
from phalanx.launcher.root_cause import STOPPED
from phalanx.launcher.ssh.protocol import SILENCE, Lines, pack, unpack
from phalanx.launcher.torch_import import load_torch_quietly

__all__ = ["main"]


class _Wire:
    """The two pipes to the shell, taken from what ssh has given as stdin and stdout."""

    def __init__(self) -> None:
        self._from, self._to = os.dup(0), os.dup(1)
        # Ranks, and prints that nobody expects, must not get at the messages.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._lines = Lines()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; blocks while the shell doesn't read.

        Raises:
            BrokenPipeError: the shell is gone.
        """
        data = pack(kind, **content)
        with self._lock:
            while data:
                data = data[os.write(self._to, data) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that come next, perhaps none; None if the shell is gone."""
        if not select.select([self._from], [], [], SILENCE)[0]:
            return None
        data = os.read(self._from, 1 << 16)
        if not data:
            return None
        return [message for line in self._lines.feed(data) if (message := unpack(line))]


class _Output(io.RawIOBase):
    """A stream of this process whose bytes go to the shell."""

    def __init__(self, wire: _Wire, stream: str) -> None:
        super().__init__()
        self._wire, self._stream = wire, stream

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Send it; blocks while the shell doesn't read."""
        text = bytes(data).decode(errors="surrogateescape")
        self._wire.send("output", stream=self._stream, text=text)
        return len(data)


def main() -> None:
    """Run this host's part of a job; returns when it has ended."""
    wire = _Wire()
    wire.send("hello", phalanx=__version__, torch=_torch(), python=sys.executable, port=_port())
    start = _start(wire)
    if start is None:  # another host can't go on, and the shell has said why
        return
    ended = threading.Event()
    threading.Thread(target=_obey, args=(wire, start["patience"], ended), daemon=True).start()
    for stream in ("stdout", "stderr"):
        output: Any = _Output(wire, stream)
        setattr(
            sys, stream, io.TextIOWrapper(output, errors="backslashreplace", write_through=True)
        )
    end = _run(start, ended)
    with contextlib.suppress(BrokenPipeError):  # then nobody wants to know
        wire.send("end", **end)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _port() -> int:
    """A port that is free now; asked for once per job, on the host where ranks meet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _start(wire: _Wire) -> dict[str, Any] | None:
    while (messages := wire.receive()) is not None:
        for message in messages:
            if message["kind"] == "start":
                return message
    return None


def _obey(wire: _Wire, patience: float, ended: threading.Event) -> None:
    """Stop the ranks when the shell says so or is gone; the launcher's main thread does it."""
    while (messages := wire.receive()) is not None:
        for message in messages:
            if message["kind"] == "stop" and not ended.is_set():
                os.kill(os.getpid(), message["signal"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    # It hangs where no signal reaches it. The kernel ends the ranks with this process.
    os._exit(1)


def _run(start: dict[str, Any], over: threading.Event) -> dict[str, Any]:
    """`phalanx run` as it was asked for; what the shell is told of its end."""
    try:
        os.chdir(start["directory"])
    except OSError as error:
        return _end(2, f"can't work in {start['directory']}: {error.strerror}; make it there too")
    os.environ.update(start["environment"])
    sys.argv = ["phalanx", "run", *start["arguments"]]  # as the job is called in lists
    load_torch_quietly()
    from phalanx import key as keys
    from phalanx.cli.run import explanation
    from phalanx.errors import PhalanxError, UsageError
    from phalanx.launcher.elastic_agent import run

    key = keys.to_sealed_memory(bytes.fromhex(start["key"]))
    os.lseek(key, 0, os.SEEK_SET)
    try:
        ended = run(["--key-fd", str(key), *start["arguments"]])
    except UsageError as error:
        return _end(2, str(error))
    except PhalanxError as error:  # hosts that didn't meet: another one may know why
        return _end(1, str(error), distance=1)
    except KeyboardInterrupt:
        return _end(128 + signal.SIGINT, "stopped by SIGINT", distance=STOPPED)
    finally:
        over.set()  # from here on there is nothing to stop
    if ended.elsewhere:
        return _end(ended.code, ended.report, distance=STOPPED)
    text = explanation(ended.job, "utf-8", start["name"]) if ended.job else ""
    return _end(ended.code, ended.report, ended.distance, text)


def _end(code: int, report: str, distance: int = 0, text: str = "") -> dict[str, Any]:
    return {"code": code, "report": report, "distance": distance, "explanation": text}


if __name__ == "__main__":
    main()
