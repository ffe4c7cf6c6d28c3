"""`phalanx run --max-restarts` on several hosts, simulated by processes of this machine."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.seeds import fresh_seed

pytestmark = pytest.mark.slow

LIMIT = 100
KILLS = 10
# Rank 1 is killed in the group, then rank 0 before the group exists; the other rank only waits.
KILLED = """
import os, signal, sys
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if (rank, attempt) == (0, 1):
    os.kill(os.getpid(), signal.SIGKILL)
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
tensor = torch.ones(3)
dist.all_reduce(tensor)
if (rank, attempt) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print("attempt", attempt, "sum", tensor[0].item(), flush=True)
dist.destroy_process_group()
"""
# Continues from the number in a file until the file `end` exists.
ELASTIC = """
import os, time
from pathlib import Path
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
progress = Path("progress")
done = int(progress.read_text())
if size > 1:
    import torch, torch.distributed as dist
    dist.init_process_group("phalanx")
print("attempt", attempt, "of", size, flush=True)
while not Path("end").exists():
    if size > 1:
        dist.barrier()
    if rank == 0:
        done += 1
        Path("new").write_text(str(done))
        Path("new").rename(progress)
    time.sleep(0.02)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> Start:
    """Return a function that starts `phalanx run` with one rank for one host of a job."""
    numbers = itertools.count()

    def run(script: str, *arguments: str, options: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(script)
        host = {"PHALANX_HOST_ID": f"host-{next(numbers)}"}
        return launch(*options.split(), "script.py", *arguments, **host)

    return run


def rendezvous_options(backend_name: str, port: int, host: int, restarts: int) -> str:
    endpoint = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 2 --max-restarts {restarts}"
    if backend_name == "c10d":
        return f"{endpoint} --rdzv-backend c10d --rdzv-id x --rdzv-conf is_host={host == 0}"
    return f"{endpoint} --node-rank {host}"


@pytest.mark.parametrize(("backend_name", "backend"), [("static", "phalanx"), ("c10d", "gloo")])
def test_ranks_of_all_hosts_restart(
    start: Start, port: int, backend_name: str, backend: str
) -> None:
    launchers = [
        start(KILLED, backend, options=rendezvous_options(backend_name, port, host, 2))
        for host in (0, 1)
    ]
    outputs = [process.communicate(timeout=LIMIT) for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    for out, err in outputs:
        assert out.split("] ")[-1] == "attempt 2 sum 2.0\n", err
        lines = err.splitlines()
        assert lines.count("  restarting all ranks") == 2, err
        assert "rank 1 (pid" in err
        assert "rank 0 (pid" in err
        assert err.count("was killed by SIGKILL") == 2, err


def test_exhausted_restarts(start: Start, port: int) -> None:
    """All hosts have the same count, even if the ranks of one only waited."""
    launchers = [
        start(KILLED, "phalanx", options=rendezvous_options("c10d", port, host, 1))
        for host in (0, 1)
    ]
    outputs = [process.communicate(timeout=LIMIT) for process in launchers]
    assert [process.returncode for process in launchers] == [137, 137], outputs
    for _, err in outputs:
        assert err.count("  restarting all ranks") == 1, err


@pytest.mark.usefixtures("no_copies")
def test_ranks_killed_at_random_times(start: Start, tmp_path: Path) -> None:
    """Even before a rank has executed the script, and while others are being started."""
    script = """
import os, time
while not os.path.exists("end"):
    time.sleep(0.01)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
    process = start(script, options=f"--nproc-per-node 3 --max-restarts {KILLS}")
    launcher, seen, chance = psutil.Process(process.pid), set[int](), random.Random(fresh_seed())
    for _ in range(KILLS):
        end = time.monotonic() + LIMIT
        while not (fresh := [rank for rank in launcher.children() if rank.pid not in seen]):
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))  # a random moment
        seen.update(rank.pid for rank in launcher.children())
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended after the last kill
            chance.choice(fresh).kill()
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    restarts = err.count("  restarting all ranks")
    assert 1 <= restarts <= KILLS
    last = sorted(line for line in out.splitlines() if line.endswith(f"attempt {restarts}"))
    assert last == [f"[rank {rank}] attempt {restarts}" for rank in range(3)], out


def wait_for_attempt(process: subprocess.Popen[str], size: int) -> int:
    """Wait until the rank is in a world of this size; return the number of the attempt."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if found := re.fullmatch(rf"\[rank \d\] attempt (\d+) of {size}\n", line):
            return int(found[1])
    return pytest.fail(f"{size} ranks did not start: {process.communicate()}")


def test_hosts_that_leave_and_join(start: Start, port: int, tmp_path: Path) -> None:
    """One host is killed and the other continues; a third joins, and leaves on SIGTERM."""
    (tmp_path / "progress").write_text("0")
    endpoint = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 1:2 --max-restarts 1 --rdzv-backend c10d"
    more = "last_call_timeout=1,keep_alive_interval=1"

    def host(is_host: bool) -> subprocess.Popen[str]:
        conf = f"--rdzv-conf is_host={is_host},{more}"
        return start(ELASTIC, options=f"{endpoint} --rdzv-id x {conf}")

    def progress(more_than: int) -> int:
        end = time.monotonic() + LIMIT
        while (done := int((tmp_path / "progress").read_text())) <= more_than:
            assert time.monotonic() < end
            time.sleep(0.01)
        return done

    first, second = host(True), host(False)
    attempts = [
        wait_for_attempt(first, 2)
    ]  # possibly after an attempt of one host, if the other was late
    before = progress(0)
    ranks = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    psutil.wait_procs(ranks, timeout=10)
    attempts.append(wait_for_attempt(first, 1))
    before = progress(before)
    third = host(False)
    attempts += wait_for_attempt(third, 2), wait_for_attempt(first, 2)
    third.send_signal(signal.SIGTERM)
    _, err = third.communicate(timeout=LIMIT)
    assert third.returncode == 143, err
    assert "phalanx run: stopped by SIGTERM\n" in err
    attempts.append(wait_for_attempt(first, 1))
    start_at = attempts[0]
    assert attempts == [start_at, start_at + 1, start_at + 2, start_at + 2, start_at + 3]
    progress(before)
    (tmp_path / "end").touch()
    _, err = first.communicate(timeout=LIMIT)
    assert first.returncode == 0, err
    restarts = r"^phalanx run: (.*)\n(?:  (?!restarting).*\n)*  restarting all ranks$"
    killed, joined, stopped = re.findall(restarts, err, re.MULTILINE)[-3:]
    assert re.match(
        r"rank 0 \(pid \d+\) exited with|rank 1 \(pid \d+ on \S+\) has died, or its host has"
        r"|lost the launcher on \S+, or the connection to it$",
        killed,
    ), err
    assert joined == "another host has joined"
    assert stopped.endswith(": stopped by SIGTERM")


def test_a_host_killed_during_the_rendezvous(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch, no_copies: None
) -> None:
    """The host has been counted, and the others must not wait for it for long."""
    # All launchers need the same time to start: copies would be done before the third comes.
    endpoint = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 2:4 --max-restarts 1 --rdzv-backend c10d"
    conf = "--rdzv-id x --rdzv-conf is_host={},last_call_timeout=6,keep_alive_interval=3"
    script = "import os\nprint('of', os.environ['WORLD_SIZE'], flush=True)\n"
    others = [start(script, options=f"{endpoint} {conf.format(n == 0)}") for n in range(2)]
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    monkeypatch.setenv("TORCH_LOGS", "+torch.distributed.elastic.rendezvous")
    third = start(script, options=f"{endpoint} {conf.format(False)}")
    assert third.stderr is not None
    for text in ("added itself to the participants", "successfully synced"):
        while text not in (line := third.stderr.readline()):
            assert line, "the launcher has ended"
    third.kill()
    outputs = [process.communicate(timeout=LIMIT) for process in others]
    assert [process.returncode for process in others] == [0, 0], outputs
    for out, err in outputs:
        assert out.endswith("of 2\n"), err
        assert re.search(
            r"^phalanx run: host \d of 3 did not take part, although .*\n"
            r"  repeating the rendezvous$",
            err,
            re.MULTILINE,
        ), err


@pytest.mark.parametrize("backend_name", ["static", "c10d"])
def test_ctrl_c_ends_all_hosts_despite_remaining_restarts(
    start: Start, port: int, backend_name: str
) -> None:
    script = "import time\nprint('ready', flush=True)\ntime.sleep(100)\n"
    launchers = [
        start(script, options=rendezvous_options(backend_name, port, host, 3)) for host in (0, 1)
    ]
    for number, process in enumerate(launchers):
        assert process.stdout is not None
        assert process.stdout.readline() == f"[rank {number}] ready\n"
    launchers[1].send_signal(signal.SIGINT)
    (_, err), (_, own_err) = (
        launchers[0].communicate(timeout=LIMIT),
        launchers[1].communicate(timeout=LIMIT),
    )
    assert [process.returncode for process in launchers] == [130, 130], (err, own_err)
    assert own_err.endswith("\nphalanx run: stopped by SIGINT\n")
    assert ": stopped by SIGINT\n  stopped because of it: rank 0\n" in err
    assert "restarting" not in err
