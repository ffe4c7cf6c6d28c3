"""`phalanx explain` of jobs on Gloo, which `phalanx run` has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LIMIT = 100
PHALANX = str(Path(sys.executable).with_name("phalanx"))
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
record = os.path.join(os.environ["PHALANX_JOBS_DIR"], os.environ["PHALANX_JOB"])
pair = dist.new_group([1, 2])
dist.all_reduce(x)
dist.broadcast(x, 1)
if rank == 1:
    {action}
dist.all_reduce(x)
"""
NESTED = """
import os, time
import torch
import torch.distributed as dist
from phalanx.backend import cuda

def make_group(child):
    # Gloo in place of NCCL, and numbers in place of GPUs: there are none here.
    size, kind = len(child.members), dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(child.rank, size)
    store = dist.PrefixStore("nccl/", child.store)
    gloo = dist.ProcessGroupGloo(store, child.rank, size, timeout=child.timeout)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    group._set_group_name(child.name)
    return group

cuda._make_nccl, cuda.device_id = make_group, lambda device: str(device.index)
dist.init_process_group("phalanx")
rank, x = dist.get_rank(), torch.ones(4)
nccl = dist.group.WORLD._nccl.group_for(torch.device("cuda", rank))
nccl.allreduce([x]).wait()
dist.all_reduce(x)
if rank == 1:
    {action}
nccl.allreduce([x]).wait()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
UNSEEN = """
import os
import phalanx.recorder.torch_recorder as recorder
recorder._FIRST_GLANCE_SECONDS = 1000.0  # it glances at no group
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(3 if dist.get_rank() == 0 else 2):
    dist.all_reduce(torch.ones(4))
{action}
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that starts a job of three ranks on Gloo, in which rank 1 is at fault."""
    started: list[subprocess.Popen[str]] = []

    def run(
        action: str, script: str = SCRIPT, launcher: Sequence[str] = (PHALANX, "run")
    ) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(script.format(action=action))
        command = [*launcher, "--nproc-per-node", "3", "train.py"]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path))
        return started[-1]

    monkeypatch.setenv("PHALANX_JOBS_DIR", str(tmp_path / "jobs"))
    yield run
    for process in started:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)


def explain(*command: str) -> dict[str, Any]:
    """Return what a command says of the newest job; empty if there is none yet."""
    arguments = [PHALANX, *(command or ("explain",)), "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _is_record_read(found: dict[str, Any]) -> bool:
    """Return whether an explanation has the broadcast of rank 1 from PyTorch's record."""
    last = found["ranks"][1]["last_operation"] if found else None
    return last is not None and last["kind"] == "broadcast"


CASES = {
    "new group": (
        "dist.barrier()\nelse:\n    dist.new_group()",
        "missing",
        [1],
        "new_group",
    ),
    "asleep": ("time.sleep(1000)", "busy", [1], "own code"),
    "recv": ("dist.recv(x, 0, tag=5)", "unsent", [1], "recv from rank 0 tag 5 at train.py:12"),
    "branch": ("dist.barrier()", "branch", [1], "called barrier #3 at train.py:12"),
    "subgroup": (
        "dist.all_reduce(x, group=pair)",
        "order",
        [1],
        'rank 1 is in all_reduce #1 float32[4] in group "1" at train.py:12',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_hangs(start: Any, case: str) -> None:
    action, *verdict, text = CASES[case]
    start(action)
    found: dict[str, Any] = {}

    def is_explained() -> bool:
        found.update(explain())
        # Before the third rank has been looked at, the fault may be that of either of the others.
        return bool(found) and [found["diagnosis"][key] for key in ("kind", "ranks")] == verdict

    wait_for(is_explained)
    assert text in " ".join(found["diagnosis"]["text"])


@pytest.mark.parametrize("launcher", [(PHALANX, "run"), TORCHRUN], ids=["phalanx", "torchrun"])
def test_operations_that_go_from_phalanx_to_nccl(
    start: Any, launcher: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    start("time.sleep(1000)", NESTED, launcher)
    found: dict[str, Any] = {}

    def is_explained() -> bool:
        found.update(explain())
        diagnosis = found.get("diagnosis", {"kind": "", "text": []})
        return diagnosis["kind"] == "busy" and "all_reduce #2" in " ".join(diagnosis["text"])

    wait_for(is_explained)
    text = 'Ranks 0 and 2 have waited for rank 1 in all_reduce #2 float32[4] in group "0 (NCCL)"'
    assert found["diagnosis"]["ranks"] == [1]
    assert text in " ".join(found["diagnosis"]["text"])
    assert "after all_reduce #1 float32[4]" in " ".join(found["diagnosis"]["text"])


def test_watch_and_trace(start: Any, tmp_path: Path) -> None:
    start("time.sleep(1000)")
    view: dict[str, Any] = {}

    def is_shown() -> bool:
        view.update(explain("watch", "--once"))
        shown = [(rank["operation"] or {}).get("kind") for rank in view.get("ranks", [])]
        return len(shown) == 3 and shown[0] == shown[2] == "all_reduce"

    wait_for(is_shown)
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1, 2]

    def is_traced() -> bool:  # rank 1, in its own code, has its record written every two seconds
        written = explain("trace", "-o", str(tmp_path / "job.pftrace"))
        return [rank["operations"] for rank in written.get("ranks", [])] == [3, 2, 3]

    wait_for(is_traced)


def test_a_rank_that_is_killed(start: Any) -> None:
    process = start("time.sleep(1000)")
    found: dict[str, Any] = {}
    wait_for(lambda: found.update(explain()) or _is_record_read(found))
    os.kill(found["ranks"][1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err
    diagnosis = explain()["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("killed", [1])
    assert "after broadcast #2 float32[4]" in diagnosis["text"][0]
    assert "\nRank 1 (pid " in err, "the launcher has not printed the explanation"


def test_a_rank_of_which_the_exception_is_a_consequence(start: Any) -> None:
    """The record at its exit has the call in which rank 0 or 2 failed."""
    waiting = """sum(b'"name": "all_reduce"' in open(f, 'rb').read() for f in """
    files = "[os.path.join(record, each) for each in os.listdir(record) if '.torch' in each])"
    process = start(f"while {waiting}{files} < 2: time.sleep(0.01)\n    raise ValueError('why')")
    process.communicate(timeout=LIMIT)
    found = explain()
    diagnosis = found["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("failed", [1])
    assert "ValueError: why" in diagnosis["text"][0]
    waiting = "Ranks 0 and 2 waited for rank 1 in all_reduce #3 float32[4] at train.py:14"
    assert any(text.startswith(waiting) for text in diagnosis["text"]), diagnosis["text"]


def test_a_rank_that_leaves_early(start: Any) -> None:
    own = "while not os.path.exists(f'{record}/{os.getpid()}.torch'): time.sleep(0.01)"
    process = start(f"{own}\n    dist.destroy_process_group()\n    time.sleep(1000)")
    process.communicate(timeout=LIMIT)
    diagnosis = explain()["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("finished", [1])


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("dist.destroy_process_group()", ", after 2 collectives of that group."),
        ("os._exit(0)", "they reached the end of their script."),
    ],
)
def test_ranks_that_end_before_they_are_looked_at(start: Any, action: str, text: str) -> None:
    process = start(action, UNSEEN)
    process.communicate(timeout=LIMIT)
    diagnosis = explain()["diagnosis"]
    assert (diagnosis["kind"], diagnosis["ranks"]) == ("finished", [1, 2])
    assert text in diagnosis["text"][0]


def test_a_job_that_ends_well_leaves_nothing(start: Any) -> None:
    process = start("while not os.path.exists(f'{record}/{os.getpid()}.torch'): time.sleep(0.01)")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert os.listdir(os.environ["PHALANX_JOBS_DIR"]) == []
