"""Lightning's Trainer with `process_group_backend="phalanx"` equals training in one process."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ecosystem.oracle import adam, fresh, loss_of, new_model
from tests.ranks import RankServer

PRELOAD = ("lightning.pytorch",)
ROWS, BATCH, EPOCHS = 24, 4, 2


def make(seed: int) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model(seed)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return loss_of(self.model(batch[0]))

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.log("checked", loss_of(self.model(batch[0])), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.parameters())

    return Module()


def rows(seed: int) -> Tensor:
    return fresh(seed + 100, ROWS, 10)


def fit(seed: int, folder: Path, port: int) -> float:
    """Train as under torchrun; return the mean loss over all rows, as Lightning logs it."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    size = int(os.environ["WORLD_SIZE"])
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_RANK": os.environ["RANK"]}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="last")],
        use_distributed_sampler=False,  # Lightning's own sampler would shuffle
        strategy=DDPStrategy(process_group_backend="phalanx"),
    )
    dataset = TensorDataset(rows(seed))
    sampler = DistributedSampler(dataset, size, int(os.environ["RANK"]), shuffle=False)
    data = DataLoader(dataset, batch_size=BATCH // size, sampler=sampler)
    module = make(seed)
    trainer.fit(module, data, data)
    assert dist.get_backend() == "phalanx"
    checked = float(trainer.callback_metrics["checked"])
    for one, other in zip(module.parameters(), trained_alone(seed), strict=True):
        torch.testing.assert_close(one.data, other, rtol=1e-9, atol=1e-11)
    dist.destroy_process_group()
    return checked


def trained_alone(seed: int) -> list[Tensor]:
    model = new_model(seed)
    optimizer = adam(model.parameters())
    for _ in range(EPOCHS):
        for batch in rows(seed).split(BATCH):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()
    return [parameter.data for parameter in model.parameters()]


def test_trainer(ranks: RankServer, seed: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    checked = ranks.run(2, fit, seed, tmp_path, port, timeout=None)
    model = new_model(seed)
    for parameter, value in zip(model.parameters(), trained_alone(seed), strict=True):
        parameter.data.copy_(value)
    assert checked == pytest.approx([float(loss_of(model(rows(seed))).detach())] * 2, rel=1e-6)
    # The checkpoint has the same model.
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for one, other in zip(saved.values(), trained_alone(seed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
