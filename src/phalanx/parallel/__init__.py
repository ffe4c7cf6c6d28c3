"""Data parallelism on plain `torch.distributed`, for any backend.

- `gradients`: average of the gradients of all ranks after a backward pass: synchronous SGD in one
  call.
- `algorithms`: all-reduce by point-to-point messages: two rings, halving and doubling, and a tree.
- `shared_data_parallel`: a counterpart of DDP for ranks that share memory, with one copy for all of
  them.
- `local_sgd`: hosts that exchange parameters once in many steps, for slow links.
- `groups`: groups of some ranks of a group, such as those of a host.
- `sync_batch_norm`: batch normalization over the batches of all ranks.
"""

from phalanx.parallel.algorithms import (
    halving_doubling_all_reduce,
    ring_all_reduce,
    ring_all_reduce_simple,
    tree_all_reduce,
)
from phalanx.parallel.gradients import average_gradients, average_gradients_per_parameter
from phalanx.parallel.local_sgd import DiLoCo, LocalSGD
from phalanx.parallel.shared_data_parallel import ShardedOptimizer, SharedDataParallel
from phalanx.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "ShardedOptimizer",
    "SharedDataParallel",
    "SyncBatchNorm",
    "average_gradients",
    "average_gradients_per_parameter",
    "halving_doubling_all_reduce",
    "ring_all_reduce",
    "ring_all_reduce_simple",
    "tree_all_reduce",
]
