"""`phalanx run --elastic`: lost ranks are replaced while the others keep their state."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx import key

# Prints a hash of the parameters at the end. Arguments: RANK:STEP:HOW ends a rank in a step, once.
# A rank that stops itself is continued when the others have gone on without it.
SCRIPT = """
import hashlib, os, signal, sys
import time
from datetime import timedelta
from pathlib import Path
import psutil, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from phalanx.train import Elastic, recovery

recovery._LOOK_SECONDS = 0.0  # rank 0 looks for newcomers at each step
dist.init_process_group("phalanx", timeout=timedelta(seconds=TIMEOUT))
losses = [each.split(":") for each in sys.argv[1:]]

def may_end(rank, step):
    for index, (lost_rank, lost_step, how) in enumerate(losses):
        marker = Path(f"loss-{index}")
        if (int(lost_rank), int(lost_step)) == (rank, step) and not marker.exists():
            marker.touch()
            if how in ("spare", "template", "spares"):
                # These end before the rank that a spare should replace.
                found = spares()
                while len(found) < 2:
                    time.sleep(0.05)
                    found = spares()
                template, spare = found
                if how != "spare":
                    end(template)
                if how != "template":
                    end(spare)
            if how == "warm":
                while len(spares()) < 2:
                    time.sleep(0.05)
            if how not in ("stop", "always", "raise"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                Path("stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if how == "always":
                marker.unlink()
            raise RuntimeError(f"the batch of step {step} is damaged")

Path(f"rank-{os.getpid()}").touch()

def has_copied(process):
    return "phalanx.launcher.spare_template" in process.cmdline()

def end(process):
    process.kill()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)

def spares():  # the template, and its copies that have no place
    children = psutil.Process(os.getppid()).children()
    waiting = [each for each in children if not Path(f"rank-{each.pid}").exists()]
    return sorted(filter(has_copied, waiting), key=psutil.Process.create_time)

def wait_for_newcomer():
    end = time.monotonic() + 90
    while not dist.group.WORLD.has_newcomers():
        assert time.monotonic() < end, "no process replaces the rank"
        time.sleep(0.05)

def wrap(model):
    stopped = Path("stopped")
    if dist.get_world_size() == 2 and stopped.exists():
        os.kill(int(stopped.read_text()), signal.SIGCONT)
        stopped.rename("continued")
    return DistributedDataParallel(model)

torch.manual_seed(7)
# A newcomer with another model: the losses name it.
width = 8 if losses and losses[0][2] == "other" and Path("loss-0").exists() else 16
model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in Elastic(model, optimizer, 30, wrap=wrap, wait=WAIT):
    with step:
        if Path("continued").exists() and dist.get_world_size() < 3:
            wait_for_newcomer()
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * step.number + rank)
        inputs = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        loss = step.model(inputs).square().mean()
        may_end(rank, step.number)
        loss.backward()
        optimizer.step()
text = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
if has_copied(psutil.Process()):
    print("began as a copy")
print("world size", dist.get_world_size(), "hash", hashlib.sha256(text).hexdigest(), flush=True)
dist.destroy_process_group()
"""
Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> Run:
    """Return a function that runs the script, and returns exit code, stdout and stderr."""

    def run_job(
        *losses: str, options: str, wait: float = 60.0, timeout: float = 60.0
    ) -> tuple[int, str, str]:
        script = SCRIPT.replace("WAIT", str(wait)).replace("TIMEOUT", str(timeout))
        (tmp_path / "script.py").write_text(script)
        process = launch(*options.split(), "script.py", *losses)
        out, err = process.communicate()
        return process.returncode, out, err

    return run_job


def hashes(out: str, size: int, count: int) -> set[str]:
    found = re.findall(rf"\[rank \d\] world size {size} hash (\w+)", out)
    assert len(found) == count, out
    return set(found)


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_a_killed_rank_is_replaced(run: Run, spares: int) -> None:
    code, out, err = run(options="--nproc-per-node 3")
    assert code == 0, err
    expected = hashes(out, 3, 3)
    assert len(expected) == 1
    losses = ("1:5:kill", "0:12:kill", "2:20:raise")
    code, out, err = run(*losses, options=f"--nproc-per-node 3 --elastic --spares {spares}")
    assert code == 0, err
    assert hashes(out, 3, 3) == expected
    assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL.*\n  replacing it; 9 more", err)
    assert re.search(r"rank 2 \(pid \d+\) exited with code 1: .*damaged\n  replacing it; 7", err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "copies"),
    [("warm", {2}), ("spare", {2}), ("template", {1, 2}), ("spares", {0, 1})],
)
def test_a_spare_is_a_copy(run: Run, lost: str, copies: set[int]) -> None:
    """Unless the template is lost: until another is ready, a process that is needed starts anew."""
    code, out, err = run(
        f"1:5:{lost}", "0:12:kill", options="--nproc-per-node 2 --elastic --spares 1"
    )
    assert code == 0, err
    assert len(hashes(out, 2, 2)) == 1
    assert err.count("replacing it") == 2, err
    assert out.count("began as a copy") in copies


@pytest.mark.parametrize("lost", ["spare", "template"])
def test_a_process_ends_before_its_spare_is_known(tmp_path: Path, lost: str) -> None:
    """The place goes to the spare, or to another process if it has ended; no restart is lost."""
    script = tmp_path / "script.py"
    script.write_text("print('in place')")
    program = """
import os, select, signal, sys
import psutil
from phalanx.launcher.newcomers import Newcomers
from phalanx.launcher.options import Script
from tests.waiting import wait_for

newcomers = Newcomers(Script(sys.argv[1], [], False), 1, 0, -1)
newcomers.prepare()
wait_for(lambda: select.select([newcomers._template._answers], [], [], 0)[0])
template = psutil.Process(newcomers._template.handler.proc.pid)
spare, = [each for each in psutil.Process().children() if each != template]
lost = spare if sys.argv[2] == "spare" else template
lost.send_signal(signal.SIGKILL)
wait_for(lambda: lost.status() == psutil.STATUS_ZOMBIE)
newcomer = newcomers.start(0, dict(os.environ), ("", ""))
assert (newcomer.handler.proc.pid == spare.pid) == (lost == template)
with os.fdopen(newcomer.stdout) as output:
    print(output.read(), newcomer.handler.proc.wait())
newcomers.close()
"""
    command = [sys.executable, "-c", program, str(script), lost]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n") == ["in place", " 0", ""], ended.stderr


def test_the_imports_of_a_spare_leave_it_fit_to_be_copied() -> None:
    """They start no thread that a copy would lack, and do not ask for GPUs."""
    program = """
import threading, torch
def refuse(*_arguments): raise SystemExit("an import asks for GPUs")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
torch.accelerator.is_available = refuse
from phalanx.launcher import spare
spare.import_modules()
assert threading.active_count() == 1, threading.enumerate()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_job_continues_with_fewer_ranks(run: Run) -> None:
    options = "--nproc-per-node 2:3 --elastic --max-restarts 0"
    code, out, err = run("1:5:kill", options=options, wait=0.0)
    assert code == 0, err
    assert len(hashes(out, 2, 2)) == 1
    assert "continuing with 2 ranks on this host" in err


@pytest.mark.slow
def test_a_rank_that_was_stopped_is_refused_and_replaced(run: Run) -> None:
    options = "--nproc-per-node 3 --elastic"
    code, out, err = run("1:5:stop", options=options, wait=0.0, timeout=3.0)
    assert code == 0, err
    assert len(hashes(out, 3, 3)) == 1
    assert re.search(r"rank 1 \(pid \d+\) exited with code 1: .*RankExcluded", err)


@pytest.mark.slow
def test_too_many_losses_end_the_job(run: Run) -> None:
    options = "--nproc-per-node 2:3 --elastic --max-restarts 0"
    code, _, err = run("1:5:kill", "0:9:kill", options=options, wait=0.0)
    assert code == 137, err
    assert re.search(r"rank 0 \(pid \d+\) was killed by SIGKILL", err)


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_ends_the_job(run: Run) -> None:
    options = "--nproc-per-node 2 --elastic --max-restarts 2"
    code, _, err = run("1:5:always", options=options)
    assert code == 1, err
    assert err.count("replacing it") == 2
    assert "the batch of step 5 is damaged" in err


@pytest.mark.slow
def test_a_newcomer_with_another_model_is_refused(run: Run) -> None:
    options = "--nproc-per-node 2 --elastic --max-restarts 2"
    code, _, err = run("1:5:other", options=options)
    assert code == 1, err
    assert "size mismatch for 0.weight" in err


@pytest.mark.slow
def test_all_ranks_are_lost(run: Run) -> None:
    code, out, err = run("0:3:kill", "1:3:kill", options="--nproc-per-node 2 --elastic")
    assert code == 0, err
    assert len(hashes(out, 2, 2)) == 1
    assert "restarting all ranks" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--spares 1", "--spares is for jobs whose ranks are replaced: give --elastic"),
        ("--nproc-per-node 1:2", "MIN:MAX is for jobs that continue with fewer ranks"),
        ("--elastic --nproc-per-node 3:2", "expected MIN:MAX with MIN <= MAX"),
        ("--elastic --spares x", "--spares is 'x': expected an integer"),
        ("--rejoin 1", "--rejoin is for jobs whose ranks are replaced: give --elastic"),
        ("--elastic --rejoin 1", "--rejoin is for jobs on several hosts: give --nnodes"),
        ("--elastic --nnodes 1:2 --rejoin 1.5", "--rejoin is '1.5': expected an integer"),
        ("--elastic --no-python", "--elastic starts Python scripts only: omit --no-python"),
    ],
)
def test_wrong_options_are_refused(run: Run, options: str, words: str) -> None:
    code, _, err = run(options=options)
    assert code == 2
    assert words in err


# ---- several hosts, simulated by processes of this machine ----

HOSTS_SCRIPT = """
import hashlib, time
from pathlib import Path
import torch, torch.distributed as dist
from phalanx.parallel import average_gradients
from phalanx.train import Elastic

dist.init_process_group("phalanx")
torch.manual_seed(7)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_back = False
for step in Elastic(model, optimizer, 10_000):
    with step:
        time.sleep(0.05)
        size = torch.ones(1)
        dist.all_reduce(size)
        optimizer.zero_grad()
        model(torch.full((4, 6), 1.0 * step.number)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
    if step.error is None:
        Path(f"size-{int(size)}").touch()
        if Path("size-2").exists() and int(size) == 3:
            break
text = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("world size", dist.get_world_size(), "hash", hashlib.sha256(text).hexdigest(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_host_leaves_and_another_one_joins(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]], port: int
) -> None:
    (tmp_path / "script.py").write_text(HOSTS_SCRIPT)
    options = f"--nnodes 2:3 --elastic --master-addr 127.0.0.1 --master-port {port} --node-rank"

    def start(number: int, name: str) -> subprocess.Popen[str]:
        return launch(*options.split(), str(number), "script.py", PHALANX_HOST_ID=name)

    hosts = [start(number, f"host-{number}") for number in range(3)]
    wait_for(tmp_path / "size-3")
    hosts[1].kill()
    hosts[1].communicate()
    wait_for(tmp_path / "size-2")
    key.create_file(str(tmp_path / "other"))
    stranger = launch(*options.split(), "1", "--key-file", "other", "script.py")
    assert "key" in stranger.communicate()[1]
    assert stranger.returncode == 1
    hosts[1] = start(1, "host-3")
    ended = [(host.communicate(), host.returncode) for host in hosts]
    assert [code for _, code in ended] == [0, 0, 0], ended
    assert len({each for (out, _), _ in ended for each in hashes(out, 3, 1)}) == 1
    assert "continuing without" in ended[0][0][1]


@pytest.mark.slow
def test_the_host_with_the_store_is_lost(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]], port: int
) -> None:
    """Nothing is left on which the others could agree: they end, and say why."""
    (tmp_path / "script.py").write_text(HOSTS_SCRIPT)
    options = f"--nnodes 2:3 --elastic --master-addr 127.0.0.1 --master-port {port} --node-rank"
    hosts = [
        launch(*options.split(), str(number), "script.py", PHALANX_HOST_ID=f"host-{number}")
        for number in range(3)
    ]
    wait_for(tmp_path / "size-3")
    hosts[0].kill()
    for host in hosts[1:]:
        err = host.communicate(timeout=60)[1]
        assert host.returncode == 1, err
        assert "lost the launcher of host 0, or the connection to it" in err


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.05)
