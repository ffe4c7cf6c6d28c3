"""Damaged checkpoints are never loaded, and failed saves leave older checkpoints intact."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.checkpoints import directory, files
from phalanx.checkpoints.files import ContentError
from phalanx.checkpoints.safetensors import read_tensors
from phalanx.errors import CheckpointError, UsageError
from phalanx.train import Checkpointer
from tests.checkpoint_states import check_numbered, numbered, steps

# The tests make their own folders: Hypothesis runs one test function many times.
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@FOLDER
def test_damage_is_never_loaded(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, numbered(1))
    path = checkpoints.save(2, numbered(2))
    damaged_file = path / data.draw(st.sampled_from(sorted(os.listdir(path))))
    content = bytearray(damaged_file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "grow", "remove", "empty", "directory"])):
        case "flip":
            content[position] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[position:]
        case "grow":
            content[position:position] = b"\0"
        case "empty":
            content.clear()
        case kind:
            damaged_file.unlink()
            if kind == "directory":
                damaged_file.mkdir()
    if damaged_file.is_file():
        damaged_file.write_bytes(content)
    caplog.clear()
    check_numbered(checkpoints.load(), 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(rf"{path}: .*(SHA256SUMS|manifest|state-00000)", record.getMessage())
    # The damaged checkpoint is removed first.
    checkpoints.save(3, numbered(3))
    kept = Checkpointer(folder, keep=3)
    check_numbered(kept.load(), 3)
    shutil.rmtree(folder)


def test_unusable_checkpoint_is_removed_first(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, keep=2)
    checkpoints.save(1, numbered(1))
    (checkpoints.save(2, numbered(2)) / "manifest.json").unlink()
    check_numbered(checkpoints.load(), 1)
    checkpoints.save(3, numbered(3))
    assert steps(tmp_path) == [1, 3]


def test_no_usable_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    for step in (1, 2):
        (checkpoints.save(step, numbered(step)) / "manifest.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"(?s)none of 2 .*step-2: manifest.*step-1: manifest"
    ):
        checkpoints.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "of format phalanx-checkpoint version 2, expected"),
        ({"format": "other"}, "of format other version 1"),
        ({"step": 7}, "of step 7, which is not the step in the dir"),
        ({"files": [{"name": "../../secret", "bytes": 1}]}, "list different files"),
        ({"tensors": 3}, "is not a manifest of this format"),
        ({"state": {"x": {"$tensor": "y"}}}, "is not a manifest of this format: KeyError"),
        (
            {"tensors": {"x": {"dtype": "F32", "shape": [2], "shards": []}}},
            "x is missing from the files",
        ),
    ],
)
def test_foreign_manifest(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checksums are right, but another program wrote the manifest."""
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"x": torch.ones(2)})
    path = checkpoints.save(2, {"x": torch.ones(2)})
    manifest = json.loads((path / "manifest.json").read_text()) | change
    write_manifest(path, json.dumps(manifest))
    check_falls_back(checkpoints)
    assert message in caplog.text


def test_a_state_that_is_nested_too_deeply(tmp_path: Path) -> None:
    state: Any = torch.ones(2)
    for _ in range(3000):
        state = {"a": state}
    path = re.escape("state['a']['a']['a']...")
    with pytest.raises(UsageError, match=f"{path} is nested in more than 100 levels"):
        Checkpointer(tmp_path).save(1, state)
    for _ in range(3000 - 99):
        state = state["a"]
    Checkpointer(tmp_path).save(1, state)
    assert Checkpointer(tmp_path).load() is not None


@pytest.mark.parametrize("depth", (990, 100_000))
def test_nested_manifest(depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"x": torch.ones(2)})
    path = checkpoints.save(2, {"x": torch.ones(2), "nested": "HERE"})
    text = (path / "manifest.json").read_text()
    write_manifest(path, text.replace('"HERE"', "[" * depth + "]" * depth))
    check_falls_back(checkpoints)
    assert "is not a manifest of this format: RecursionError" in caplog.text


@pytest.mark.parametrize("name", ("manifest.json", "SHA256SUMS", "state-00000.safetensors"))
def test_fifo(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Opening it would wait for a writer."""
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"x": torch.ones(2)})
    path = checkpoints.save(2, {"x": torch.ones(2)})
    (path / name).unlink()
    os.mkfifo(path / name)
    check_falls_back(checkpoints)
    assert f"{name} is not a regular file" in caplog.text


def write_manifest(path: Path, text: str) -> None:
    """Replace the manifest of a checkpoint, and its checksum."""
    (path / "manifest.json").write_text(text)
    sums = (path / "SHA256SUMS").read_text().splitlines()[1:]
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "SHA256SUMS").write_text("\n".join([f"{digest}  manifest.json", *sums, ""]))


def check_falls_back(checkpoints: Checkpointer) -> None:
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == 1


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, b"\2" + b"\0" * 7 + b"[]"])
def test_invalid_safetensors(content: bytes) -> None:
    with pytest.raises(ContentError):
        read_tensors(torch.tensor(list(content), dtype=torch.uint8))


@pytest.mark.parametrize("position", ["file/below", "/proc/below"])
def test_unwritable_directory(position: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Not a directory|No such file or directory"):
        Checkpointer(tmp_path / position)


@pytest.fixture
def max_file_bytes() -> Iterator[int]:
    """Limit the size of files in this process; a write then fails as on a full disk."""
    limit, before = 100_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_write(tmp_path: Path, max_file_bytes: int) -> None:
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, numbered(1))
    for large in ({"x": torch.ones(max_file_bytes)}, {"x": "y" * max_file_bytes}):
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoints.save(2, large)
        assert os.listdir(tmp_path) == [path.name]
    check_numbered(checkpoints.load(), 1)
    checkpoints.save(2, numbered(2))
    check_numbered(checkpoints.load(), 2)


@pytest.mark.parametrize("call", ["mkdir", "writev", "fsync", "rename", "close"])
def test_every_call_may_fail(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk at the first call, the second, and so on until none fails."""
    checkpoints = Checkpointer(tmp_path, keep=2)
    last_saved = 0
    real = getattr(os, call)
    for number in range(100):
        step = last_saved + 1
        calls_left = number

        def fail(*arguments: Any, **options: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if calls_left == -1:
                if call == "close":
                    real(*arguments, **options)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, fail)
        with contextlib.suppress(CheckpointError):
            checkpoints.save(step, numbered(step))
        monkeypatch.setattr(os, call, real)
        checkpoints._directory.wait_for_removals()
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".saving")]
        if (found := checkpoints.load()) is not None:
            assert found.step in (last_saved, step)
            check_numbered(found, found.step)
            last_saved = found.step
        if calls_left >= 0:
            assert number > 0
            return
    pytest.fail("calls still fail")


def test_two_processes_save_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_LOCK_TIMEOUT_SECONDS", 0.05)
    other = directory.CheckpointDirectory(tmp_path, 1)
    other.begin(3)
    with pytest.raises(CheckpointError, match="another process has been saving there"):
        Checkpointer(tmp_path).save(1, {})
    other.end()
    Checkpointer(tmp_path).save(1, {})
    assert steps(tmp_path) == [1]


def test_interrupted_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, numbered(1))
    monkeypatch.setattr(files, "_write", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, numbered(2))
    monkeypatch.undo()
    assert steps(tmp_path) == [1]
    checkpoints.save(2, numbered(2))
    check_numbered(checkpoints.load(), 2)
