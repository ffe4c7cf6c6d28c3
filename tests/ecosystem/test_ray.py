"""Ray Train, whose workers form the group with Gloo replaced, against one process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.ecosystem.programs import run

SCRIPT = """
import json, sys
import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

def work(config):
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(3, 1))
    rank = dist.get_rank()
    rows = torch.arange(24.0).reshape(8, 3)[rank::2]
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()
    result = type(dist.group.WORLD).__module__, model.module.weight[0].tolist()
    open(f"{config['folder']}/{rank}.json", "w").write(json.dumps(result))

if __name__ == "__main__":
    variables = {"PHALANX_REPLACE": "gloo"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    TorchTrainer(
        work,
        train_loop_config={"folder": sys.argv[1]},
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="`make ecosystem` installs ray")
def test_the_trainer_of_ray(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run(sys.executable, str(script), str(tmp_path))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(24.0).reshape(8, 3)).pow(2).mean().backward()
        optimizer.step()
    for rank in range(2):
        group, weight = json.loads((tmp_path / f"{rank}.json").read_text())
        assert group == "phalanx.backend.process_group"
        torch.testing.assert_close(torch.tensor(weight), model.weight[0].detach())
