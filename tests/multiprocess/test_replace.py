"""Scripts that name other backends run on Phalanx unchanged: `phalanx run --replace`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import phalanx
from tests import copies

PHALANX = [copies.PHALANX]
LIMIT = 60

# A script for other backends. The last line belongs to the test: it prints the actual backend.
GLOO = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group(backend="gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.get_backend() == dist.Backend.GLOO == "gloo" and dist.is_gloo_available()
assert dist.group.WORLD.name() == "gloo"
tensor = torch.full((5,), float(rank))
dist.all_reduce(tensor)
assert tensor.tolist() == [size * (size - 1) / 2] * 5
groups = [dist.new_group([0, 1]), dist.new_group(backend="gloo")]
groups += [dist.new_group(backend="cpu:gloo"), dist.new_group(backend="cpu:gloo,cuda:gloo")]
assert [dist.get_backend(group) for group in groups] == [
    "gloo", "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"
]
alone = dist.new_group([1], backend="gloo")
assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (rank != 1)
for group in groups:
    dist.all_reduce(tensor, group=group)
assert tensor.tolist() == [size**4 * size * (size - 1) / 2] * 5
mesh = init_device_mesh("cpu", (size,))
groups.append(mesh.get_group())
try:
    dist.monitored_barrier()
except ValueError:
    print("monitored_barrier looks at the name")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.randn(4, 3)).sum().backward()
direct = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
assert direct.name() == "gloo"
"""

# From the tutorial "Writing distributed applications": MPI provides rank and size, so any will do.
MPI = """
import torch
import torch.distributed as dist

def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    assert tensor[0] == 1
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    assert tensor[0] == 2

def init_process(rank, size, fn, backend="tcp"):
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(dist.get_rank(), dist.get_world_size())

assert dist.is_mpi_available() and dist.is_backend_available("mpi")
init_process(0, 0, run, backend="mpi")
assert dist.get_backend() == dist.Backend.MPI == "mpi"
groups = []
"""

TCP = """
import os
import torch
import torch.distributed as dist

assert dist.is_backend_available("tcp") and dist.Backend("TCP") == "tcp"
url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("tcp", init_method=url, rank=rank, world_size=size)
assert dist.get_backend() == "tcp"
tensors = [torch.zeros(1) for _ in range(size)]
dist.all_gather(tensors, torch.full((1,), float(rank)))
assert [tensor.item() for tensor in tensors] == list(range(size))
groups = [dist.new_group()]
"""

DEFAULT = """
import torch
import torch.distributed as dist

dist.init_process_group()
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"rank": dist.get_rank()})
assert objects == [{"rank": rank} for rank in range(dist.get_world_size())]
groups = [dist.new_group()]
"""

BOTH = """
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2, 2, 2]
assert dist.get_backend() == "cpu:gloo,cuda:nccl"
groups = []
"""

REPORT = """
kinds = {type(group).__module__ for group in [dist.group.WORLD, *groups] if group is not None}
print("ran on", *kinds)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def run(path: Path, script: str, *options: str) -> tuple[int, str, str]:
    path.write_text(script + REPORT)
    command = [*PHALANX, "run", *options, "--nproc-per-node", "2", str(path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, cwd=path.parent, check=False
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("names", "script", "said"),
    [
        ("gloo", GLOO, "gloo"),
        ("gloo,mpi,tcp", MPI, "mpi"),
        ("tcp", TCP, "tcp"),
        ("Gloo", DEFAULT, "gloo"),
        ("gloo", BOTH, "gloo"),
    ],
)
def test_unchanged_scripts(tmp_path: Path, names: str, script: str, said: str) -> None:
    code, out, err = run(tmp_path / "script.py", script, "--replace", names)
    assert code == 0, err
    ran_on = sorted(line for line in out.splitlines() if "ran on" in line)
    assert ran_on == [f"[rank {rank}] ran on phalanx.backend.process_group" for rank in (0, 1)]
    assert err.count("phalanx:") == 1, err
    assert f"[rank 0] phalanx: runs in place of {said} (PHALANX_REPLACE)" in err


@pytest.mark.slow
def test_nothing_is_replaced_by_default(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "script.py", DEFAULT)
    assert code == 0, err
    assert out.count("ran on torch") == 2
    assert "phalanx:" not in err


@pytest.mark.slow
def test_only_named_backends_are_replaced(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "script.py", DEFAULT, "--replace", "mpi")
    assert code == 0, err
    assert out.count("ran on torch") == 2


@pytest.mark.slow
def test_a_wrong_name(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "script.py", DEFAULT, "--replace", "glo")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "phalanx: error: --replace is 'glo': 'glo' cannot be replaced; expected some of gloo, mpi, "
        "tcp, separated by commas"
    ]


@pytest.mark.slow
def test_ranks_of_a_launch_inherit_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend() -> tuple[str, str]:
        import torch
        import torch.distributed as dist

        with phalanx.init("gloo") as session:
            dist.all_reduce(torch.ones(1))
            return session.backend, type(dist.group.WORLD).__module__

    ours = ("gloo", "phalanx.backend.process_group")
    monkeypatch.setenv("PHALANX_REPLACE", "gloo")
    assert phalanx.launch(backend, 2, timeout=LIMIT) == [ours, ours]
    theirs = phalanx.launch(backend, 2, timeout=LIMIT, env={"PHALANX_REPLACE": ""})
    assert [module.partition(".")[0] for _, module in theirs] == ["torch", "torch"]
