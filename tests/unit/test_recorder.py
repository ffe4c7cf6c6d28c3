"""The file of a flight recorder, and the end of a job without a launcher."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx import _native
from phalanx.recorder import exception_hook, flight_recorder
from phalanx.recorder.job_directory import JobDirectory, make_job_name
from phalanx.recorder.recorder_file import ended_well
from tests.descriptors import list_descriptors


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[JobDirectory]:
    with JobDirectory(str(tmp_path / "jobs"), make_job_name(), create=True) as made:
        yield made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the descriptors that would have been passed to the core."""
    found: list[int] = []
    monkeypatch.setattr(_native, "open_flight_recorder", lambda fd, *_: found.append(fd))
    yield found
    for fd in found:
        os.close(fd)


def test_peers_are_notified_even_if_the_exception_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_ending: str, _text: str) -> None:
        raise OSError(errno.ENOSPC, "no space")

    notified: list[bool] = []
    monkeypatch.setattr(exception_hook, "_callbacks", [lambda: notified.append(True)])
    monkeypatch.setattr(exception_hook, "_native", SimpleNamespace(record_ending=fail))
    with pytest.raises(OSError, match="no space"):
        exception_hook.announce(ValueError("x"))
    assert notified == [True]


def test_an_exception_text_that_is_not_utf_8() -> None:
    assert exception_hook.format_exception(OSError("\udcff\nmore")) == "OSError: \\udcff"


def build_settings(directory: JobDirectory) -> flight_recorder._JobSettings:
    store: Any = None
    return flight_recorder._JobSettings(store, 0, 1, 0, directory.base, (20, 2**28), None)


def test_all_blocks_of_a_recorder_are_allocated_at_once(
    directory: JobDirectory, opened: list[int]
) -> None:
    flight_recorder._open_file(directory, build_settings(directory))
    found = os.fstat(opened[0])
    assert found.st_size == _native.flight_recorder_bytes()
    assert found.st_blocks * 512 >= found.st_size
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert directory.list_recorders() == {os.getpid(): f"{os.getpid()}.recorder"}


def test_an_old_recorder_of_the_same_pid_is_replaced(
    directory: JobDirectory, opened: list[int]
) -> None:
    flight_recorder._open_file(directory, build_settings(directory))
    os.write(opened[0], b"old")
    flight_recorder._open_file(directory, build_settings(directory))
    assert os.pread(opened[1], 3, 0) == bytes(3)


def test_a_link_in_place_of_the_recorder_is_not_followed(
    directory: JobDirectory, opened: list[int], tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, f"{directory.path}/{os.getpid()}.recorder")
    flight_recorder._open_file(directory, build_settings(directory))
    assert victim.read_text() == "precious"


def test_a_directory_in_place_of_the_recorder(directory: JobDirectory) -> None:
    os.mkdir(f"{directory.path}/{os.getpid()}.recorder")
    before = list_descriptors()
    with pytest.raises(OSError, match="directory"):
        flight_recorder._open_file(directory, build_settings(directory))
    assert list_descriptors() == before


def test_a_file_system_that_cannot_map_files(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(_native, "open_flight_recorder", refuse)
    before = list_descriptors()
    with pytest.raises(OSError, match="No such device"):
        flight_recorder._open_file(directory, build_settings(directory))
    assert directory.list_recorders() == {}
    assert list_descriptors() == before


def test_a_recorder_in_memory_cannot_be_resized(directory: JobDirectory, opened: list[int]) -> None:
    flight_recorder._open_memory(build_settings(directory))
    (fd,) = opened
    assert os.fstat(fd).st_size == _native.flight_recorder_bytes()
    assert not os.get_inheritable(fd)
    for size in (0, 2**30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


OK, LOST, LATE = (
    {"kind": "barrier", "outcome": outcome} for outcome in ("ok", "peer_lost", "timeout")
)
FORMED, UNFORMED = ({"kind": "join", "outcome": outcome} for outcome in ("ok", "timeout"))


def build_recorder(**fields: Any) -> dict[str, Any]:
    groups = [{"left_time": 0}]
    return {"attempt": 0, "ending": "exited", "groups": groups, "done": [], **fields}


@pytest.mark.parametrize(
    ("recorders", "expected"),
    [
        ([], False),
        ([build_recorder()], True),
        ([build_recorder(), build_recorder(ending="left", groups=[{"left_time": 7}])], True),
        ([build_recorder(), build_recorder(ending="")], False),
        ([build_recorder(), build_recorder(ending="failed")], False),
        ([build_recorder(done=[OK])], True),
        ([build_recorder(done=[OK, LOST])], False),
        ([build_recorder(done=[LATE], groups=[{"left_time": 7}] * 2)], True),
        ([build_recorder(done=[LATE], groups=[{"left_time": 7}, {"left_time": 0}])], False),
        ([build_recorder(done=[UNFORMED], groups=[{"left_time": 7}])], False),
        ([build_recorder(done=[UNFORMED, FORMED], groups=[{"left_time": 7}])], True),
        ([build_recorder(ending="failed"), build_recorder(attempt=1)], True),
        ([build_recorder(), build_recorder(attempt=1, ending="")], False),
    ],
)
def test_ended_well(recorders: list[dict[str, Any]], expected: bool) -> None:
    assert ended_well(recorders) is expected


def syntax_error() -> SyntaxError:
    try:
        compile("x = (\n", "train.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def add_note(error: Exception) -> Exception:
    error.__dict__["__notes__"] = ["a note"]
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (syntax_error(), "SyntaxError: '(' was never closed"),
        (add_note(syntax_error()), "SyntaxError: '(' was never closed"),
        (add_note(ValueError("one\ntwo")), "ValueError: one"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_the_recorded_exception_is_the_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    recorded: list[tuple[str, str]] = []
    monkeypatch.setattr(_native, "record_ending", lambda *given: recorded.append(given))
    monkeypatch.setattr(exception_hook, "_callbacks", [])
    exception_hook.announce(error)
    assert recorded == [("failed", text)]
