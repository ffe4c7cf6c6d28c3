"""TorchRec's sharded embedding tables, with Gloo replaced, against whole ones in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ecosystem.programs import run

SCRIPT = """
import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

cpu = torch.device("cpu")
dist.init_process_group("gloo")
assert "phalanx" in type(dist.group.WORLD).__module__
torch.manual_seed(0)


def tables():
    return torchrec.EmbeddingBagCollection(
        device=cpu,
        tables=[
            torchrec.EmbeddingBagConfig(
                name=f"table{n}", embedding_dim=8, num_embeddings=16, feature_names=[f"feature{n}"]
            )
            for n in range(2)
        ],
    )


def bags(rows):
    lengths = torch.ones(2 * len(rows), dtype=torch.int64)
    values = torch.cat([rows % 16, 3 * rows % 16])
    names = ["feature0", "feature1"]
    return torchrec.KeyedJaggedTensor.from_lengths_sync(names, values, lengths)


def parts(sharded, name):
    for shard in sharded.state_dict()[name].local_shards():
        start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        yield shard.tensor.detach(), slice(start, start + size)


whole, module, sharder = tables(), tables(), EmbeddingBagCollectionSharder()
plan = construct_module_sharding_plan(
    module,
    {
        "table0": row_wise(compute_kernel="dense"),
        "table1": table_wise(rank=1, compute_kernel="dense"),
    },
    sharder, local_size=2, world_size=2, device_type="cpu",
)
sharded = DistributedModelParallel(
    module, device=cpu, plan=ShardingPlan({"": plan}), sharders=[sharder]
)
for name, weight in whole.state_dict().items():
    for part, rows in parts(sharded, name):
        part.copy_(weight[rows])

everything = torch.arange(12)
own = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
values, expected = sharded(bags(everything[own])).values(), whole(bags(everything)).values()
torch.testing.assert_close(values, expected[own])
values.pow(2).sum().backward()
expected.pow(2).sum().backward()
gradients = {name: weight.grad for name, weight in whole.named_parameters()}
for name, weight in sharded.named_parameters():
    for _, rows in parts(sharded, name):
        # TorchRec divides by the world size.
        torch.testing.assert_close(2 * weight.grad, gradients[name][rows])
"""


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchrec", "fbgemm_gpu"))),
    reason="`make ecosystem` installs torchrec",
)
def test_row_wise_and_table_wise(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run("phalanx", "run", "--nproc-per-node", "2", "--replace", "gloo", str(script))
