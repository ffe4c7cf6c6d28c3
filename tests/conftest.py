"""Shared parts of all tests: a guard against processes left behind, paths, Hypothesis' settings.

Test modules import nothing from one another: what several need is a fixture here, or a module of
its own beside this one.
"""

import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import hypothesis
import psutil
import pytest

from phalanx.system.processes import StatField, read_stat
from tests import copies
from tests.seeds import fresh_seed
from tools import gate

REPOSITORY = Path(__file__).parents[1]

# Every process that the tests start inherits this variable, whoever its parent is by now.
SESSION_VARIABLE = "PHALANX_TEST_SESSION"
SESSION = uuid.uuid4().hex
MARK = f"{SESSION_VARIABLE}={SESSION}".encode()
# Seconds that a process may take to end after the test that started it.
GRACE = 5.0

# The same examples at every run: a change is judged by its own failures. `make explore` draws fresh
# ones. No deadline per example: a loaded machine is no failure.
hypothesis.settings.register_profile("phalanx", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile(
    "explore", deadline=None, max_examples=500, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("phalanx")


JOBS = pytest.StashKey[str]()
HELPERS: set[int] = set()
"""The processes that live as long as the session."""
KNOWN: set[int] = set()
"""The processes that others have started: looking at all of them for each test takes long."""
PARENT = 1
"""The place of the parent's pid in /proc/PID/stat, from the state on."""
TICKS = os.sysconf("SC_CLK_TCK")

pytest_sessionfinish = gate.pytest_sessionfinish  # a hook


def pytest_configure(config: pytest.Config) -> None:
    # Started in the background, pytest ignores SIGINT, and so would all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[SESSION_VARIABLE] = SESSION
    # What ranks that are killed leave behind belongs to the session, not to the user.
    config.stash[JOBS] = os.environ["PHALANX_JOBS_DIR"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    is_main_of_many = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if os.environ.get(copies.VARIABLE) == "1" and not is_main_of_many:
        HELPERS.add(copies.use_copies().pid)


# Their tests start processes: `make test` runs one case of each that is not marked `sampled`.
ONE_CASE = ("docs", "ecosystem", "examples", "fault", "hosts", "multiprocess")


@pytest.hookimpl(tryfirst=True)  # before deselection by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of parametrized tests that `make test` leaves to `make test-long` as slow."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        folder = os.path.relpath(item.path, REPOSITORY / "tests").partition(os.sep)[0]
        is_left_out = any(item.get_closest_marker(name) for name in ("slow", "long"))
        if not is_left_out and (item.get_closest_marker("sampled") or folder in ONE_CASE):
            name = getattr(item, "originalname", None) or item.name
            cases.setdefault((item.path, name), []).append(item)
    for (path, name), group in cases.items():
        if sampled := group[0].get_closest_marker("sampled"):
            (count,) = sampled.args
            kept = {number * len(group) // count for number in range(count)}
        else:  # another one in each test, so that together they show every kind of case
            kept = {zlib.crc32(f"{path.stem} {name}".encode()) % len(group)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    # What the imports have made stays: the garbage collector need not look at it again and again.
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[JOBS], ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    import torch

    import phalanx

    cores = len(os.sched_getaffinity(0))
    return f"phalanx {phalanx.__version__}, torch {torch.__version__}, {cores} cores"


@pytest.fixture(autouse=True, scope="session")
def no_process_left_by_session() -> Iterator[None]:
    """Fail the run when a process of a fixture outlives it."""
    yield from _guard()


@pytest.fixture(autouse=True)
def no_process_left_by_test(no_process_left_by_session: None) -> Iterator[None]:
    """Fail the test that leaves a process behind, and kill that process."""
    yield from _guard()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Have a test draw the same numbers from `random` at every run; see tests/seeds.py."""
    random.seed(fresh_seed())


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of `phalanx run` start by themselves, so that their environment shows who they are."""
    monkeypatch.delenv("PHALANX_PRELOAD", raising=False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of jobs of this process, and of those that the test starts with subprocess."""
    path = tmp_path / "jobs"
    monkeypatch.setenv("PHALANX_JOBS_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """The real data sets beside the checkout (`../shared/data`), None where there are none."""
    path = REPOSITORY.parent / "shared" / "data"
    return path if path.is_dir() else None


def _guard() -> Iterator[None]:
    before = _started_processes()
    yield
    _, left = psutil.wait_procs(_started_processes() - before, timeout=GRACE)
    # A dead orphan stays a zombie where process 1 doesn't collect it, as in many containers.
    left = [process for process in left if not _is_dead(process)]
    if left:
        report = "\n".join(_describe(process) for process in left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE)
        pytest.fail(f"left running {GRACE:g} s after the end, killed now:\n{report}", pytrace=False)


def _started_processes() -> set[psutil.Process]:
    """Processes that the tests started: descendants, and orphans that carry the session's mark."""
    pids = set(psutil.pids())
    KNOWN.intersection_update(pids)
    stats = {pid: stat for pid in pids - KNOWN if (stat := read_stat(pid)) is not None}
    parents = {pid: int(stat[PARENT]) for pid, stat in stats.items()}
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = set()
    for pid, stat in stats.items():
        if _has_mark(pid) or _is_descendant(pid, parents):
            found.add(pid)
        # Between fork and exec, a process still has the environment of its parent.
        elif now - int(stat[StatField.START]) / TICKS > GRACE:
            KNOWN.add(pid)
    # multiprocessing keeps one helper for the life of the interpreter.
    found -= {resource_tracker._resource_tracker._pid, *HELPERS}  # type: ignore[attr-defined]
    processes = set()
    for pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.add(psutil.Process(pid))
    return processes


def _has_mark(pid: int) -> bool:
    try:
        return MARK in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, a zombie, or another user's
        return False


def _is_descendant(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"  pid {process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return f"  pid {process.pid}: {error}"
