"""The file of a flight recorder, and who of several ranks ends last."""

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
from phalanx.observe import exception_hook, recorder
from phalanx.observe.job_directory import JobDirectory, make_job_name
from phalanx.observe.recorder_reader import ended_well


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[JobDirectory]:
    with JobDirectory(str(tmp_path / "jobs"), make_job_name(), create=True) as made:
        yield made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The descriptors that the core would have got."""
    found: list[int] = []
    monkeypatch.setattr(_native, "open_flight_recorder", lambda fd, *_: found.append(fd))
    yield found
    for fd in found:
        os.close(fd)


def test_peers_are_told_whatever_becomes_of_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_ending: str, _words: str) -> None:
        raise OSError(errno.ENOSPC, "no space")

    told: list[bool] = []
    monkeypatch.setattr(exception_hook, "_callbacks", [lambda: told.append(True)])
    monkeypatch.setattr(exception_hook, "_native", SimpleNamespace(record_ending=full))
    with pytest.raises(OSError, match="no space"):
        exception_hook.announce(ValueError("x"))
    assert told == [True]


def test_words_that_are_no_utf_8() -> None:
    assert exception_hook.format_exception(OSError("\udcff\nmore")) == "OSError: \\udcff"


def job(directory: JobDirectory) -> recorder._JobSettings:
    store: Any = None
    return recorder._JobSettings(store, 0, 1, 0, directory.base, (20, 2**28), None)


def test_a_box_takes_all_of_its_blocks_at_once(directory: JobDirectory, opened: list[int]) -> None:
    recorder._open_file(directory, job(directory))
    found = os.fstat(opened[0])
    assert found.st_size == _native.flight_recorder_bytes()
    assert found.st_blocks * 512 >= found.st_size
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert directory.list_recorders() == {os.getpid(): f"{os.getpid()}.box"}


def test_a_box_of_a_process_that_had_this_pid_makes_room(
    directory: JobDirectory, opened: list[int]
) -> None:
    recorder._open_file(directory, job(directory))
    os.write(opened[0], b"old")
    recorder._open_file(directory, job(directory))
    assert os.pread(opened[1], 3, 0) == bytes(3)


def test_a_link_in_place_of_the_box_is_not_followed(
    directory: JobDirectory, opened: list[int], tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, f"{directory.path}/{os.getpid()}.box")
    recorder._open_file(directory, job(directory))
    assert victim.read_text() == "precious"


def test_a_directory_in_place_of_the_box(directory: JobDirectory) -> None:
    os.mkdir(f"{directory.path}/{os.getpid()}.box")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="directory"):
        recorder._open_file(directory, job(directory))
    assert os.listdir("/proc/self/fd") == before


def test_a_file_system_that_can_not_map(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(_native, "open_flight_recorder", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No such device"):
        recorder._open_file(directory, job(directory))
    assert directory.list_recorders() == {}
    assert os.listdir("/proc/self/fd") == before


def test_a_box_in_memory_can_not_be_made_smaller(
    directory: JobDirectory, opened: list[int]
) -> None:
    recorder._open_memory(job(directory))
    (fd,) = opened
    assert os.fstat(fd).st_size == _native.flight_recorder_bytes()
    assert not os.get_inheritable(fd)
    for size in (0, 2**30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


OK, LOST, LATE = ({"kind": "barrier", "outcome": how} for how in ("ok", "peer_lost", "timeout"))
FORMED, UNFORMED = ({"kind": "join", "outcome": how} for how in ("ok", "timeout"))


def box(**fields: Any) -> dict[str, Any]:
    groups = [{"left": False}]
    return {"attempt": 0, "ending": "exited", "groups": groups, "done": [], **fields}


@pytest.mark.parametrize(
    ("boxes", "well"),
    [
        ([], False),
        ([box()], True),
        ([box(), box(ending="left", groups=[{"left": True}])], True),
        ([box(), box(ending="")], False),
        ([box(), box(ending="failed")], False),
        ([box(done=[OK])], True),
        ([box(done=[OK, LOST])], False),
        ([box(done=[LATE], groups=[{"left": True}] * 2)], True),
        ([box(done=[LATE], groups=[{"left": True}, {"left": False}])], False),
        ([box(done=[UNFORMED], groups=[{"left": True}])], False),
        ([box(done=[UNFORMED, FORMED], groups=[{"left": True}])], True),
        ([box(ending="failed"), box(attempt=1)], True),
        ([box(), box(attempt=1, ending="")], False),
    ],
)
def test_whether_all_ended_well(boxes: list[dict[str, Any]], well: bool) -> None:
    assert ended_well(boxes) is well


def syntax_error() -> SyntaxError:
    try:
        compile("x = (\n", "train.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def noted(error: Exception) -> Exception:
    error.__dict__["__notes__"] = ["a note"]
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (syntax_error(), "SyntaxError: '(' was never closed"),
        (noted(syntax_error()), "SyntaxError: '(' was never closed"),
        (noted(ValueError("one\ntwo")), "ValueError: one"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_last_words_are_the_line_that_names_the_exception(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(_native, "record_ending", lambda *given: said.append(given))
    monkeypatch.setattr(exception_hook, "_callbacks", [])
    exception_hook.announce(error)
    assert said == [("failed", words)]
