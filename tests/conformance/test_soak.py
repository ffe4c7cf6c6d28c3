"""The short soak: random operations of all kinds in overlapping groups.

`make soak` is the long one. A failure names the operation and the command that repeats it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.conformance import cases
from tests.ranks import RankServer
from tests.seeds import fresh_seed
from tests.soak.__main__ import app
from tests.soak.operations import Task
from tests.soak.plan import CHAPTER, WEIGHTS, Operation, Plan
from tests.soak.rank import soak

# Operations by world size: a few seconds each on two cores.
SHARES = {2: 3000, 3: 2500, 5: 1200, 8: 800}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", SHARES)
def test_random_operations(ranks: RankServer, world_size: int) -> None:
    plan = Plan(fresh_seed(), world_size)
    results = ranks.run(world_size, soak, plan, 0, SHARES[world_size], 60.0)
    assert all(result.operations == SHARES[world_size] for result in results)
    assert all(result.checked > 0 for result in results)


def test_a_plan_has_everything() -> None:
    plan = Plan(fresh_seed(), 4)
    drawn = [operation for n in range(3000) if (operation := plan.operation(n))]
    assert {operation.kind for operation in drawn} == set(WEIGHTS)
    assert {operation.dtype for operation in drawn} == set(cases.DTYPES)
    assert {operation.reduction for operation in drawn} == {*cases.FOLD, "PREMUL_SUM", ""}
    assert {operation.asynchronous for operation in drawn} == {False, True}
    assert len({operation.members for operation in drawn}) > 4
    assert min(operation.count for operation in drawn) == 0


def test_an_operation_depends_on_nothing_before_it() -> None:
    seed = fresh_seed()
    plan, in_order = Plan(seed, 3), [Plan(seed, 3).operation(n) for n in range(600)]
    numbers = (599, 3, 250)
    alone: list[Operation | None] = [plan.operation(number) for number in numbers]
    assert alone == [in_order[number] for number in numbers]


def soak_with_a_fault(seed: int) -> None:
    """Run the soak with a broadcast that changes a bit on rank 1."""
    sound: Any = dist.broadcast

    def faulty(tensor: torch.Tensor, source: int, group: Any, async_op: bool = False) -> Any:
        work = sound(tensor, source, group, async_op)
        if work is not None:
            work.wait()
        if dist.get_rank() == 1 and source == 0 and tensor.numel():
            bits = tensor.clone(memory_format=torch.contiguous_format)
            bits.view(torch.uint8).bitwise_xor_(1)
            tensor.copy_(bits)
        return work

    dist.broadcast = faulty
    Task._prepare = lambda *_: None  # type: ignore[method-assign]
    # Within a chapter; otherwise rank 0, which sends, could wait in the next for rank 1 to join.
    soak(Plan(seed, 2, ("broadcast",)), 0, CHAPTER, 10.0)


def test_a_wrong_result_is_found(ranks: RankServer) -> None:
    """The rank with the wrong result reports the operation and the command that repeats it."""
    seed = fresh_seed()
    message = str(ranks.start(2, soak_with_a_fault, seed, timeout=10).join()[1].error)
    found = re.search(
        r"rank 1, operation (\d+) of seed (\d+): broadcast \w+\[\d+\] root 0", message
    )
    assert found, message
    assert int(found[2]) == seed
    assert "elements differ, the first at 0" in message
    command = (
        f"--kinds broadcast --nproc-per-node 2 --seed {seed} --first {found[1]} --operations 1"
    )
    assert f'make soak ARGS="{command}"' in message


@pytest.mark.slow
def test_the_command_line(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--operations", "60", "--nproc-per-node", "2"]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"2 ranks: 60 operations in", ended.stdout)
    assert ended.stdout.endswith("every result was right\n")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--nproc-per-node", "3-2", "'3-2': expected a number of ranks or a range"),
        ("--kinds", "all_reduce,reduced", "reduced: expected one or several of all_reduce"),
    ],
)
def test_wrong_options(option: str, value: str, message: str) -> None:
    ended = CliRunner().invoke(app, [option, value], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())
