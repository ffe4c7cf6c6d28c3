"""The text that names a killed DataLoader worker, whichever exception it causes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from types import FrameType

import pytest

from phalanx import _native
from phalanx.recorder.exception_hook import announce, format_exception

# The name of PyTorch's file in a traceback.
LOADER = "site-packages/torch/utils/data/dataloader.py"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_from(file: str, error: Exception) -> Exception:
    """Return the exception as if the file had raised it."""
    names: dict[str, object] = {"error": error}
    with pytest.raises(type(error)) as caught:
        exec(compile("raise error", file, "exec"), names)
    return caught.value


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError()])
def test_a_killed_worker_is_named(error: Exception) -> None:
    child = multiprocessing.get_context("spawn").Process(target=die)
    child.start()
    try:
        multiprocessing.connection.wait([child.sentinel], 60)
        text = format_exception(raise_from(LOADER, error))
        assert text.startswith(type(error).__name__)
        assert text.endswith(
            f"(caused by DataLoader worker (pid {child.pid}) is killed by signal: Killed.)"
        )
        assert "caused by" not in format_exception(
            raise_from("elsewhere.py", type(error)(*error.args))
        )
        assert "caused by" not in format_exception(raise_from(LOADER, ValueError("its own")))
    finally:
        child.join(60)


def test_no_worker_is_named_if_none_was_killed() -> None:
    assert "caused by" not in format_exception(
        raise_from(LOADER, ConnectionResetError(104, "reset"))
    )


def test_the_loader_may_raise_while_the_text_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DataLoader's SIGCHLD handler raises in the main thread, whatever that thread does."""
    recorded: list[tuple[str, str]] = []

    def lose_worker(_signal: int, _frame: FrameType | None) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    def wait(_sentinels: object, _seconds: float) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lose_worker)
    monkeypatch.setattr(_native, "record_ending", lambda *text: recorded.append(text))
    monkeypatch.setattr(multiprocessing.connection, "wait", wait)
    try:
        announce(raise_from(LOADER, ConnectionResetError(104, "reset")))
    finally:
        signal.signal(signal.SIGUSR1, before)
    text = "ConnectionResetError: [Errno 104] reset (caused by RuntimeError: DataLoader worker"
    assert recorded == [("failed", f"{text} (pid 7) is killed by signal: Killed.)")]
