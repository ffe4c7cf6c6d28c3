"""The launcher on one host of `phalanx run --hosts`, started there by ssh; not for users.

It is `phalanx run` for the ranks of this host, but sends its output through a pipe to the local
launcher. It stops its ranks on request and when the connection to the local launcher is lost.
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
from phalanx.launcher.failures import STOPPED
from phalanx.launcher.ssh import HEARTBEAT_TIMEOUT
from phalanx.system.processes import ExitCode
from phalanx.system.ssh import LineSplitter, pack_message, unpack_message


class _MessageChannel:
    """The two pipes to the local launcher, which ssh has opened as stdin and stdout."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.dup(0), os.dup(1)
        # Ranks and unexpected prints must not reach the pipes.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._lines = LineSplitter()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; block until the local launcher reads it.

        Raises:
            BrokenPipeError: The connection is lost.
        """
        data = pack_message(kind=kind, **content)
        with self._lock:
            while data:
                data = data[os.write(self._write_fd, data) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the next messages, possibly none; None if the connection is lost."""
        if not select.select([self._read_fd], [], [], HEARTBEAT_TIMEOUT)[0]:
            return None
        data = os.read(self._read_fd, 1 << 16)
        if not data:
            return None
        return [message for line in self._lines.feed(data) if (message := unpack_message(line))]


class _Output(io.RawIOBase):
    """A stream of this process that sends its bytes to the local launcher."""

    def __init__(self, channel: _MessageChannel, stream: str) -> None:
        super().__init__()
        self._channel, self._stream = channel, stream

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Send the data; block until the local launcher reads it."""
        text = bytes(data).decode(errors="surrogateescape")
        self._channel.send("output", stream=self._stream, text=text)
        return len(data)


def main() -> None:
    """Run this host's part of a job until it has ended."""
    channel = _MessageChannel()
    channel.send(
        "hello",
        phalanx=__version__,
        torch=_torch_version(),
        python=sys.executable,
        port=_find_free_port(),
    )
    start = _receive_start(channel)
    if start is None:  # another host failed, and the local launcher has reported it
        return
    finished = threading.Event()
    threading.Thread(
        target=_watch_channel, args=(channel, start["stop_timeout"], finished), daemon=True
    ).start()
    for stream in ("stdout", "stderr"):
        output: Any = _Output(channel, stream)
        setattr(
            sys, stream, io.TextIOWrapper(output, errors="backslashreplace", write_through=True)
        )
    end = _run(start, finished)
    with contextlib.suppress(BrokenPipeError):  # the local launcher has ended
        channel.send("end", **end)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _find_free_port() -> int:
    """Return a port that is free now; used on the host of the rendezvous only."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _receive_start(channel: _MessageChannel) -> dict[str, Any] | None:
    while (messages := channel.receive()) is not None:
        for message in messages:
            if message["kind"] == "start":
                return message
    return None


def _watch_channel(
    channel: _MessageChannel, stop_timeout: float, finished: threading.Event
) -> None:
    """Stop the ranks on request or when the connection is lost, by signals to the main thread."""
    while (messages := channel.receive()) is not None:
        for message in messages:
            if message["kind"] == "stop" and not finished.is_set():
                os.kill(os.getpid(), message["signal"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_timeout)
    # The main thread hangs and handles no signal. The kernel ends the ranks with this process.
    os._exit(ExitCode.FAILURE)


def _run(start: dict[str, Any], finished: threading.Event) -> dict[str, Any]:
    """Run `phalanx run` with the requested options; return the content of the `end` message."""
    try:
        os.chdir(start["directory"])
    except OSError as error:
        return _make_end_message(
            ExitCode.USAGE,
            f"can't use directory {start['directory']}: {error.strerror}; create it there",
        )
    os.environ.update(start["environment"])
    sys.argv = ["phalanx", "run", *start["arguments"]]  # the command in the lists of jobs
    from phalanx.cli.run import explanation, load_torch_quietly

    load_torch_quietly()
    from phalanx import key as keys
    from phalanx.errors import PhalanxError, UsageError
    from phalanx.launcher.arguments import parse_arguments
    from phalanx.launcher.run import run

    key = keys.to_sealed_memory(bytes.fromhex(start["key"]))
    os.lseek(key, 0, os.SEEK_SET)
    try:
        outcome = run(parse_arguments(["--key-fd", str(key), *start["arguments"]]))
    except UsageError as error:
        return _make_end_message(ExitCode.USAGE, str(error))
    except PhalanxError as error:  # a failed rendezvous: another host may know the cause
        return _make_end_message(ExitCode.FAILURE, str(error), distance=1)
    except KeyboardInterrupt:
        return _make_end_message(ExitCode.INTERRUPTED, "stopped by SIGINT", distance=STOPPED)
    finally:
        finished.set()  # from now on there are no ranks to stop
    if outcome.is_remote:
        return _make_end_message(outcome.code, outcome.report, distance=STOPPED)
    text = explanation(outcome.job, "utf-8", start["name"]) if outcome.job else ""
    return _make_end_message(outcome.code, outcome.report, outcome.distance, text)


def _make_end_message(code: int, report: str, distance: int = 0, text: str = "") -> dict[str, Any]:
    return {"code": code, "report": report, "distance": distance, "explanation": text}


if __name__ == "__main__":
    main()
