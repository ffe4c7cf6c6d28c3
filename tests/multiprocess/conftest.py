"""Fixtures of the tests of this folder."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx import key
from tests.ports import find_free_port
from tests.ranks import RankServer, ranks

__all__ = ["ranks"]

PHALANX = str(Path(sys.executable).with_name("phalanx"))
# Seconds after which a launcher is killed.
LIMIT = 100


@pytest.fixture(scope="module")
def trainer_loaded(ranks: RankServer) -> None:
    """Imported once, not by each rank: the trainer, and what the step of an optimizer imports."""
    ranks.preload("torch._dynamo")
    ranks.preload("phalanx.train")


@pytest.fixture
def port() -> int:
    """A port that nobody listens at."""
    return find_free_port()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `phalanx run` in the test's folder, for one host of a job, with a key of the job's.

    Options and script come as arguments, environment variables by their names.
    """
    key.create_file(str(tmp_path / "key"))
    started = []

    def run(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
        command = [PHALANX, "run", "--nproc-per-node", "1", "--key-file", "key", *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        started.append((process, watchdog))
        return process

    yield run
    for process, watchdog in started:
        watchdog.cancel()
        process.kill()
        process.communicate()
