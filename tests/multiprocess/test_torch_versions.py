"""Groups under each supported PyTorch: no warnings, and defined results of newer calls."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import rpc
from phalanx.backend.process_group import ProcessGroup
from phalanx.parallel import SharedDataParallel
from phalanx.torch_versions import all_gather_single, reduce_scatter_single
from phalanx.train import Checkpointer
from tests.ranks import RankServer

# PyTorch's deprecations, and its advice to users.
WARNINGS = (FutureWarning, UserWarning)
PHALANX = str(Path(sys.executable).with_name("phalanx"))
LIMIT = 60


@pytest.fixture(scope="module", autouse=True)
def preloaded(ranks: RankServer) -> None:
    """Import these modules once, rather than in each rank."""
    for module in ("torch._dynamo", "phalanx.rpc", "phalanx.train"):
        ranks.preload(module)


def main_paths(folder: str) -> None:
    for category in WARNINGS:
        warnings.simplefilter("error", category)
    operations()
    training(folder)
    calls()
    dist.barrier()


def operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=30))
    one, whole = torch.full((3,), float(rank)), torch.zeros(3 * size)
    for async_op in (False, True):
        options: dict[str, Any] = {"group": group, "async_op": async_op}
        for work in (
            dist.all_reduce(one.clone(), **options),
            dist.broadcast(one.clone(), 0, **options),
            dist.reduce(one.clone(), 0, **options),
            dist.all_gather([one.clone() for _ in range(size)], one, **options),
            all_gather_single(whole, one, **options),
            reduce_scatter_single(one.clone(), whole, **options),
            dist.all_to_all_single(whole.clone(), whole, **options),
            dist.barrier(group, async_op),
        ):
            if work is not None:
                work.wait()
    dist.all_gather_object([None] * size, {"rank": rank})
    dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, one, (rank + 1) % size),
            dist.P2POp(dist.irecv, one.clone(), (rank - 1) % size),
        ]
    )[1].wait()
    gathered = torch.zeros_like(whole)
    torch.ops._c10d_functional.all_gather_into_tensor_out(
        one, size, dist.group.WORLD.group_name, out=gathered
    )
    torch.ops._c10d_functional.wait_tensor(gathered)
    assert torch.equal(gathered, whole)
    dist.monitored_barrier()


def training(folder: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 3)
    model = SharedDataParallel(nn.Linear(3, 2))
    adam = model.optimizer(torch.optim.Adam, lr=0.1)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        for network, optimizer in ((model, adam), (ddp, sgd)):
            optimizer.zero_grad()
            network(inputs).square().sum().backward()
            optimizer.step()
    checkpoints = Checkpointer(folder)
    checkpoints.save(2, {"model": ddp.module.state_dict()})
    found = checkpoints.load()
    assert found is not None
    assert found.step == 2


def calls() -> None:
    rank = dist.get_rank()
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        peer = f"w{dist.get_world_size() - 1}"
        left = torch.ones(3, requires_grad=True)
        reference = rpc.remote(peer, torch.add, (left, left))
        (reference.to_here() + rpc.rpc_sync(peer, torch.mul, (left, 2.0))).sum().backward()
        assert left.grad is not None
        assert left.grad.tolist() == [4.0] * 3
    rpc.shutdown()


@pytest.mark.parametrize("hosts", ("a", "ab"))
def test_no_warning_of_pytorch(ranks: RankServer, hosts: str, tmp_path: Path) -> None:
    ranks.run(2, main_paths, str(tmp_path / "checkpoints"), hosts=hosts)


@pytest.mark.slow
def test_no_warning_of_pytorch_in_a_launched_job(tmp_path: Path) -> None:
    """This includes the launcher and `import torch`."""
    script = tmp_path / "script.py"
    script.write_text("import phalanx\nphalanx.init()\n")
    warned = ",".join(f"error::{category.__name__}" for category in WARNINGS)
    result = subprocess.run(
        [PHALANX, "run", "--nproc-per-node", "1", str(script)],
        env={**os.environ, "PYTHONWARNINGS": warned},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr


def call_newer_methods() -> None:
    group: Any = dist.group.WORLD
    assert not group.supports_window
    for refused in (
        lambda: group.new_window(torch.zeros(2)),
        lambda: group.register_abort_hook(1, print),
        lambda: group.register_pre_hook(1, print),
        lambda: group.register_post_hook(1, print),
    ):
        with pytest.raises(NotImplementedError, match=r"^\[rank \d/2\] \w+ is not supported: "):
            refused()
    assert group.get_backend(torch.device("cpu")) is group
    # PyTorch's own functions, for those that it has.
    for name, expected in EXPECTED.items():
        if function := getattr(dist, name, None):
            check_answer(function, expected)
    dist.all_reduce(torch.ones(1))


EXPECTED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "_supports_reconfigure": ((), True),
    "_supports_window": ((), False),
    "_new_window": ((), NotImplementedError),
    "get_backend_impl": ((), ProcessGroup),
    "set_timeout": ((timedelta(seconds=33),), None),
}


def check_answer(function: Callable[..., Any], expected: tuple[tuple[Any, ...], Any]) -> None:
    arguments, answer = expected
    if answer is NotImplementedError:
        with pytest.raises(NotImplementedError, match="is not supported"):
            function(*arguments)
    elif answer is ProcessGroup:
        assert isinstance(function(*arguments), ProcessGroup)
    else:
        assert function(*arguments) is answer


def nan_check() -> None:
    """Enable PyTorch's check of a new group, which a group cannot refuse."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    for _ in range(2):
        dist.all_reduce(torch.tensor(float("nan")), group=dist.new_group([0, 1]))
    assert messages == ["TORCH_DIST_NAN_CHECK has no effect: PyTorch checks its own groups only"]


def test_the_nan_check_has_no_effect(ranks: RankServer) -> None:
    ranks.run(2, nan_check)


def test_newer_calls(ranks: RankServer) -> None:
    ranks.run(2, call_newer_methods)
