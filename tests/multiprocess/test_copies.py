"""Launchers that are copies (tests/copies.py) do what processes of their own would do."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.copies import PHALANX, USUAL_START, CopyServer, copying_start

LIMIT = 100
COMMAND = [PHALANX, "run", "--nproc-per-node", "1", "script.py"]
SCRIPT = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("NEW"), os.environ.get("OLD"))
print(os.getsid(os.getppid()) == os.getppid(), flush=True)
print("wrong", file=sys.stderr)
sys.exit(3)
"""
WAITS = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def server() -> Iterator[CopyServer]:
    server = CopyServer()
    yield server
    server.close()


@pytest.fixture(params=["process", "copy"])
def start(
    request: pytest.FixtureRequest,
    server: CopyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Start a command in the test's folder, as a process of its own and as a copy."""
    is_copy = request.param == "copy"
    monkeypatch.setenv("PHALANX_PRELOAD", "torch")
    start = copying_start(server) if is_copy else USUAL_START
    monkeypatch.setattr(subprocess.Popen, "_execute_child", start)

    def run(*command: str, **options: Any) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, **options
        )
        own = psutil.Process(process.pid)
        assert own.ppid() == os.getpid()
        assert ("tests.copies" in own.cmdline()) == is_copy
        return process

    return run


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_copy_has_its_own_place(
    start: Any, tmp_path: Path, is_leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("OLD", "1")
    environment = {k: v for k, v in os.environ.items() if k != "OLD"} | {"NEW": "new"}
    process = start(*COMMAND, "a", "b c", env=environment, start_new_session=is_leader)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 3, err
    place = f"[rank 0] ['a', 'b c'] {tmp_path} new None"
    assert out.splitlines() == [place, f"[rank 0] {is_leader}"]
    assert err.splitlines()[0] == "[rank 0] wrong"


def test_a_wrong_argument(start: Any) -> None:
    process = start(PHALANX, "run", "--nproc-per-node", "none", "script.py")
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("phalanx: error: ")


def test_a_signal(start: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    process = start(*COMMAND)
    assert process.stdout.readline() == "[rank 0] here\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (143, "phalanx run: stopped by SIGTERM\n")


def test_a_copy_only_if_it_is_the_same(server: CopyServer) -> None:
    usual = {**os.environ, "PHALANX_PRELOAD": "torch"}
    assert server.can_start(COMMAND, usual)
    assert server.can_start(COMMAND, {**usual, "PHALANX_NAME": "x", "COLUMNS": "80"})
    assert not server.can_start(COMMAND, {**usual, "OMP_NUM_THREADS": "7"})
    assert not server.can_start(COMMAND, {**usual, "TORCH_CPP_LOG_LEVEL": "INFO"})
    assert not server.can_start(COMMAND, {**usual, "PHALANX_PRELOAD": ""})
    assert not server.can_start([PHALANX, "explain"], usual)
    assert not server.can_start(" ".join(COMMAND), usual)
