"""Accelerate uses the existing group, and equals training in one process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.oracle import adam, fresh, loss_of, new_model
from tests.ranks import RankServer

PRELOAD = ("accelerate",)
ROWS, BATCH = 22, 4  # rank 1 has nothing for the last batch, and gets the first rows again


def train(seed: int) -> None:
    from accelerate import Accelerator

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert (accelerator.num_processes, accelerator.process_index) == (size, rank)
    assert dist.get_backend() == "phalanx"
    model = new_model(seed)
    data = DataLoader(TensorDataset(fresh(seed + 100, ROWS, 10)), batch_size=BATCH // size)
    model, optimizer, data = accelerator.prepare(model, adam(model.parameters()), data)
    for (rows,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(rows)))
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), trained_alone(seed), strict=True):
        torch.testing.assert_close(one.data, other, rtol=1e-9, atol=1e-11)

    # Rows gathered for metrics are unique, although the loader fills up the last batch.
    seen = torch.cat([accelerator.gather_for_metrics(rows) for (rows,) in data])
    assert sorted(seen[:, 0].tolist()) == sorted(fresh(seed + 100, ROWS, 10)[:, 0].tolist())
    total = accelerator.reduce(torch.tensor([rank + 1.0]), reduction="mean")
    assert total.tolist() == [(size + 1) / 2]
    accelerator.wait_for_everyone()
    assert accelerator.unwrap_model(model) is not model


def trained_alone(seed: int) -> list[Tensor]:
    model = new_model(seed)
    optimizer = adam(model.parameters())
    rows = fresh(seed + 100, ROWS, 10)
    batches = torch.cat([rows, rows[: -ROWS % BATCH]]).split(BATCH)
    for step, batch in enumerate(batches, 1):
        (loss_of(model(batch)) / 2).backward()
        if step % 2 == 0 or step == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.data for parameter in model.parameters()]


def test_accelerator(ranks: RankServer, seed: int) -> None:
    ranks.run(2, train, seed)


SCRIPT = """
import sys
import accelerate
import torch.distributed as dist

accelerator = accelerate.Accelerator()
print(accelerator.num_processes, type(dist.group.WORLD).__module__, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_script_without_changes(tmp_path: Path) -> None:
    """Without an accelerator, `Accelerator()` joins the ranks of `phalanx run`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if "ACCELERATE" not in key}
    command = ["phalanx", "run", "--nproc-per-node", "2", "--replace", "gloo", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("2 phalanx.backend.process_group") == 2
