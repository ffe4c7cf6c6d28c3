"""Lightning's Trainer with `process_group_backend="phalanx"` equals training in one process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.oracle import fresh, loss_of, new_model
from tests.ranks import RankServer

PRELOAD = ("lightning",)
ROWS, BATCH, EPOCHS = 24, 4, 2


def make(seed: int) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model(seed)
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            loss = loss_of(self.model(batch[0]))
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.log("checked", loss_of(self.model(batch[0])), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Module()


def loader(seed: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(fresh(seed + 100, ROWS, 10)), batch_size=batch)


def fit(strategy: str, seed: int, folder: Path) -> None:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    rank, size = dist_place()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    environment = LightningEnvironment()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        strategy=DDPStrategy(process_group_backend="phalanx"),
        plugins=[environment],
        num_sanity_val_steps=0,
    )
    module = make(seed)
    trainer.fit(module, loader(seed, BATCH // size), loader(seed, BATCH // size))
    assert dist.get_backend() == "phalanx"


def dist_place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
