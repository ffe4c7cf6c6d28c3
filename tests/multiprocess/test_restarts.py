"""`phalanx run --max-restarts` on several hosts, which are processes of this machine here."""

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

LIMIT = 100
KILLS = 10
# Rank 1 is killed in the group, then rank 0 before there is one; ranks elsewhere only wait for it.
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
# Goes on from the number in a file, until it is told to end.
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
    """Start `phalanx run` for one host of a job, of one rank each."""
    numbers = itertools.count()

    def run(script: str, *arguments: str, options: str) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(script)
        host = {"PHALANX_HOST_ID": f"host-{next(numbers)}"}
        return launch(*options.split(), "script.py", *arguments, **host)

    return run


def options_of(way: str, port: int, host: int, restarts: int) -> str:
    place = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 2 --max-restarts {restarts}"
    if way == "c10d":
        return f"{place} --rdzv-backend c10d --rdzv-id x --rdzv-conf is_host={host == 0}"
    return f"{place} --node-rank {host}"


@pytest.mark.parametrize(("way", "backend"), [("static", "phalanx"), ("c10d", "gloo")])
def test_ranks_of_all_hosts_start_again(start: Start, port: int, way: str, backend: str) -> None:
    both = [start(KILLED, backend, options=options_of(way, port, host, 2)) for host in (0, 1)]
    ended = [process.communicate(timeout=LIMIT) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    for out, err in ended:
        assert out.split("] ")[-1] == "attempt 2 sum 2.0\n", err
        lines = err.splitlines()
        assert lines.count("  starting all ranks again") == 2, err
        assert "rank 1 (pid" in err
        assert "rank 0 (pid" in err
        assert err.count("was killed by SIGKILL") == 2, err


def test_no_restart_is_left(start: Start, port: int) -> None:
    """Each host has counted the same, though the ranks of one only waited."""
    both = [start(KILLED, "phalanx", options=options_of("c10d", port, host, 1)) for host in (0, 1)]
    ended = [process.communicate(timeout=LIMIT) for process in both]
    assert [process.returncode for process in both] == [137, 137], ended
    for _, err in ended:
        assert err.count("  starting all ranks again") == 1, err


def test_ranks_that_are_killed_at_any_moment(start: Start, tmp_path: Path) -> None:
    """Also before they have become the script, and while the others are still being started."""
    script = """
import os, time
while not os.path.exists("end"):
    time.sleep(0.01)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
    process = start(script, options=f"--nproc-per-node 3 --max-restarts {KILLS}")
    launcher, seen, chance = psutil.Process(process.pid), set[int](), random.SystemRandom()
    for _ in range(KILLS):
        end = time.monotonic() + LIMIT
        while not (fresh := [rank for rank in launcher.children() if rank.pid not in seen]):
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))  # a random moment
        seen.update(rank.pid for rank in launcher.children())
        with contextlib.suppress(psutil.NoSuchProcess):  # one that came too late for the last kill
            chance.choice(fresh).kill()
    (tmp_path / "end").touch()
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    again = err.count("  starting all ranks again")
    assert 1 <= again <= KILLS
    last = sorted(line for line in out.splitlines() if line.endswith(f"attempt {again}"))
    assert last == [f"[rank {rank}] attempt {again}" for rank in range(3)], out


def attempt_of(process: subprocess.Popen[str], size: int) -> int:
    """Wait until its rank is in a world of this size; which attempt that is."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if found := re.fullmatch(rf"\[rank \d\] attempt (\d+) of {size}\n", line):
            return int(found[1])
    return pytest.fail(f"{size} ranks didn't start: {process.communicate()}")


def test_hosts_that_leave_and_come(start: Start, port: int, tmp_path: Path) -> None:
    """One is killed, the other goes on alone; one comes, and leaves when it is told to."""
    (tmp_path / "progress").write_text("0")
    place = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 1:2 --max-restarts 1 --rdzv-backend c10d"
    more = "last_call_timeout=1,keep_alive_interval=1"

    def host(is_host: bool) -> subprocess.Popen[str]:
        conf = f"--rdzv-conf is_host={is_host},{more}"
        return start(ELASTIC, options=f"{place} --rdzv-id x {conf}")

    def progress(more_than: int) -> int:
        end = time.monotonic() + LIMIT
        while (done := int((tmp_path / "progress").read_text())) <= more_than:
            assert time.monotonic() < end
            time.sleep(0.01)
        return done

    first, second = host(True), host(False)
    attempts = [attempt_of(first, 2)]  # perhaps after one alone, if the other was late
    before = progress(0)
    ranks = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    psutil.wait_procs(ranks, timeout=10)
    attempts.append(attempt_of(first, 1))
    before = progress(before)
    third = host(False)
    attempts += attempt_of(third, 2), attempt_of(first, 2)
    third.send_signal(signal.SIGTERM)
    _, err = third.communicate(timeout=LIMIT)
    assert third.returncode == 143, err
    assert "phalanx run: stopped by SIGTERM\n" in err
    attempts.append(attempt_of(first, 1))
    start_at = attempts[0]
    assert attempts == [start_at, start_at + 1, start_at + 2, start_at + 2, start_at + 3]
    progress(before)
    (tmp_path / "end").touch()
    _, err = first.communicate(timeout=LIMIT)
    assert first.returncode == 0, err
    again = r"^phalanx run: (.*)\n(?:  (?!starting).*\n)*  starting all ranks again$"
    killed, came, stopped = re.findall(again, err, re.MULTILINE)[-3:]
    assert re.match(r"rank 0 \(pid \d+\) exited with|the launcher on \S+, or .* gone$", killed), err
    assert came == "another host has come"
    assert stopped.endswith(": stopped by SIGTERM")


def test_a_host_that_is_killed_while_the_hosts_meet(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been counted, and the others must not wait for it for long."""
    place = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 2:4 --max-restarts 1 --rdzv-backend c10d"
    conf = "--rdzv-id x --rdzv-conf is_host={},last_call_timeout=2,keep_alive_interval=1"
    script = "import os\nprint('of', os.environ['WORLD_SIZE'], flush=True)\n"
    others = [start(script, options=f"{place} {conf.format(n == 0)}") for n in range(2)]
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    monkeypatch.setenv("TORCH_LOGS", "+torch.distributed.elastic.rendezvous")
    third = start(script, options=f"{place} {conf.format(False)}")
    assert third.stderr is not None
    for words in ("added itself to the participants", "successfully synced"):
        while words not in (line := third.stderr.readline()):
            assert line, "it has ended"
    third.kill()
    began = time.monotonic()
    ended = [process.communicate(timeout=LIMIT) for process in others]
    assert [process.returncode for process in others] == [0, 0], ended
    assert time.monotonic() - began < 60  # 300 seconds is what PyTorch's stores wait
    for out, err in ended:
        assert out.endswith("of 2\n"), err
        assert re.search(
            r"^phalanx run: host \d of 3 didn't come, though .*\n  meeting again$",
            err,
            re.MULTILINE,
        ), err


@pytest.mark.parametrize("way", ["static", "c10d"])
def test_ctrl_c_ends_all_whatever_restarts_are_left(start: Start, port: int, way: str) -> None:
    script = "import time\nprint('ready', flush=True)\ntime.sleep(100)\n"
    both = [start(script, options=options_of(way, port, host, 3)) for host in (0, 1)]
    for number, process in enumerate(both):
        assert process.stdout is not None
        assert process.stdout.readline() == f"[rank {number}] ready\n"
    both[1].send_signal(signal.SIGINT)
    (_, err), (_, own) = both[0].communicate(timeout=LIMIT), both[1].communicate(timeout=LIMIT)
    assert [process.returncode for process in both] == [130, 130], (err, own)
    assert own.endswith("\nphalanx run: stopped by SIGINT\n")
    assert ": stopped by SIGINT\n  stopped because of it: rank 0\n" in err
    assert "again" not in err
