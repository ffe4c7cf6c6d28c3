"""Libraries that form the group themselves, with Gloo replaced, equal one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.oracle import fresh
from tests.ecosystem.programs import run
from tests.ranks import RankServer

TRAINER = """
import json, sys
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
rows = [
    {"input_ids": torch.arange(6) + row % 5, "attention_mask": torch.ones(6), "labels": row % 2}
    for row in range(16)
]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), num_train_epochs=2,
    use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=0, learning_rate=0.01,
    max_grad_norm=0.0, optim="sgd",
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
trainer.train()
group = type(dist.group.WORLD).__module__ if dist.is_initialized() else "none"
if trainer.args.process_index == 0:
    total = sum(float(each.detach().double().abs().sum()) for each in trainer.model.parameters())
    result = [trainer.args.world_size, group, total]
    open(sys.argv[1] + ".json", "w").write(json.dumps(result))
"""

PLAN = """
import sys
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

folder, ids = sys.argv[1], torch.arange(8)[None]
if not dist.is_torchelastic_launched():
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=32,
    ))
    model.save_pretrained(folder)
    torch.save(model(ids).logits.detach(), folder + "/logits")
else:
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.to_local().shape == (16, 16), weight.to_local().shape
    assert "phalanx" in type(dist.group.WORLD).__module__
    torch.testing.assert_close(model(ids).logits.detach(), torch.load(folder + "/logits"))
"""

IGNITE = """
import sys
import ignite.distributed as idist
import torch
import torch.distributed as dist

def work(rank, folder):
    total = idist.all_reduce(torch.tensor([rank + 1.0]))
    line = f"{idist.backend()} {type(dist.group.WORLD).__module__} {total.item()}"
    open(f"{folder}/{rank}", "w").write(line)

if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(work, sys.argv[1])
"""


@pytest.mark.long
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    run(sys.executable, str(script), str(tmp_path / "alone"), "4")
    launcher = ("phalanx", "run", "--nproc-per-node", "2", "--replace", "gloo")
    run(*launcher, str(script), str(tmp_path / "both"), "2")
    size, group, expected = json.loads((tmp_path / "alone.json").read_text())
    assert (size, group) == (1, "none")
    size, group, total = json.loads((tmp_path / "both.json").read_text())
    assert (size, group) == (2, "phalanx.backend.process_group")
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_tensor_parallel_plan_of_transformers(tmp_path: Path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(PLAN)
    run(sys.executable, str(script), str(tmp_path / "model"))
    launcher = ("phalanx", "run", "--nproc-per-node", "2", "--replace", "gloo")
    run(*launcher, str(script), str(tmp_path / "model"))


@pytest.mark.long
def test_ignite_starts_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(IGNITE)
    run(sys.executable, str(script), str(tmp_path), PHALANX_REPLACE="gloo")
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "gloo phalanx.backend.process_group 3.0"


def metrics_over_ranks(seed: int) -> None:
    from torchmetrics.classification import MulticlassAccuracy
    from torchmetrics.regression import SpearmanCorrCoef

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = fresh(seed, 7 * size + 1, 3)  # a different number on each rank
    targets = rows.sum(1).sign().long() % 3
    # A metric whose state is a sum, and one that gathers all rows.
    accuracy: Any = MulticlassAccuracy(3)
    correlation: Any = SpearmanCorrCoef()
    accuracy.update(rows[rank::size], targets[rank::size])
    correlation.update(rows[rank::size, 0], rows[rank::size, 1])
    alone: list[Any] = [MulticlassAccuracy(3), SpearmanCorrCoef()]
    for metric in alone:
        metric.sync_on_compute = False
    alone[0].update(rows, targets)
    alone[1].update(rows[:, 0], rows[:, 1])
    torch.testing.assert_close(accuracy.compute(), alone[0].compute())
    torch.testing.assert_close(correlation.compute(), alone[1].compute())


def test_torchmetrics(ranks: RankServer, seed: int) -> None:
    ranks.run(2, metrics_over_ranks, seed)
