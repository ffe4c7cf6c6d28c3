"""Data parallelism on plain `torch.distributed`: runs on any backend.

- `gradients` averages the gradients of all ranks after a backward pass: synchronous SGD in one
  call.
- `algorithms`: all-reduce by messages alone: two rings, halving and doubling, a tree.
- `data_parallel` is what DDP is, for ranks that share memory: with one copy for all of them.
- `sync_batch_norm` normalizes over the batches of all ranks.
"""

from phalanx.parallel.algorithms import (
    halving_doubling_all_reduce,
    ring_all_reduce,
    ring_all_reduce_simple,
    tree_all_reduce,
)
from phalanx.parallel.data_parallel import DataParallel, ShardedOptimizer
from phalanx.parallel.gradients import average_gradients, average_gradients_per_parameter
from phalanx.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DataParallel",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "average_gradients",
    "average_gradients_per_parameter",
    "halving_doubling_all_reduce",
    "ring_all_reduce",
    "ring_all_reduce_simple",
    "tree_all_reduce",
]
