"""The job's key: its sources, and rejected values."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from phalanx import UsageError, key


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PHALANX_KEY_FD", "PHALANX_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "key"
    key.create_file(str(path))
    return path


def test_new_file_is_private(path: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
    assert key.from_file(str(path)) == bytes.fromhex(path.read_text())
    other = tmp_path / "other"
    key.create_file(str(other))
    assert other.read_text() != path.read_text()


def test_existing_file_is_kept(path: Path) -> None:
    before = path.read_text()
    with pytest.raises(UsageError, match="already exists"):
        key.create_file(str(path))
    assert path.read_text() == before


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be created: No such file"):
        key.create_file(str(tmp_path / "none" / "key"))


@pytest.mark.parametrize("mode", (0o640, 0o604, 0o660))
def test_file_readable_by_others(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}: expected a file of user .* chmod 600"):
        key.from_file(str(path))


NO_KEYS = ("", "secret\n", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\n\n")


@pytest.mark.parametrize("text", NO_KEYS)
def test_invalid_key(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError, match="no key: expected 64 hexadecimal digits"):
        key.from_file(str(path))


@pytest.mark.parametrize("text", NO_KEYS[:-1])
def test_a_descriptor_without_a_key(path: Path, text: str) -> None:
    path.write_text(text)
    with path.open("rb") as file, pytest.raises(UsageError, match=r"--key-fd is .*no key"):
        key.from_descriptor(file.fileno())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--key-file is .*No such file.*`phalanx key "):
        key.from_file(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="directory"):
        key.from_file(str(tmp_path))


def test_a_pipe_that_stays_open() -> None:
    """The rest of the data stays unread."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"ab" * 32 + b"\nwhat follows")
        assert key.from_descriptor(reader) == b"\xab" * 32
        assert os.read(reader, 100) == b"what follows"
        os.close(reader)
        with pytest.raises(
            UsageError, match=f"--key-fd is {reader}, which cannot be read: Bad file"
        ):
            key.from_descriptor(reader)
        with pytest.raises(UsageError, match="not the number of an open file"):
            key.from_descriptor(10**20)
    finally:
        os.close(writer)


def test_key_from_a_launcher(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key.from_environment() is None
    monkeypatch.setenv("PHALANX_KEY_FILE", str(path))
    assert key.from_environment() == bytes.fromhex(path.read_text())
    descriptor = key.to_sealed_memory(b"k" * 32)
    try:
        monkeypatch.setenv("PHALANX_KEY_FD", str(descriptor))
        assert key.from_environment() == key.from_environment() == b"k" * 32
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        monkeypatch.setenv("PHALANX_KEY_FD", "2")
        with pytest.raises(UsageError, match=r"PHALANX_KEY_FD .* is 2, which is not the key"):
            key.from_environment()
        monkeypatch.setenv("PHALANX_KEY_FD", "two")
        with pytest.raises(UsageError, match="PHALANX_KEY_FD='two'"):
            key.from_environment()
    finally:
        os.close(descriptor)


def test_derived_keys_differ() -> None:
    ours = {key.derive(bytes(32), "a"), key.derive(bytes(32), "b"), key.derive(b"k" * 32, "a")}
    assert len(ours) == 3
    assert all(len(each) == key.SIZE for each in ours)
