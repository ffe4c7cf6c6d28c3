"""Data parallelism on plain `torch.distributed`: runs on any backend.

- `gradients` averages the gradients of all ranks after a backward pass: synchronous SGD in one
  call.
- `algorithms`: all-reduce by messages alone: two rings, halving and doubling, a tree.
"""

from phalanx.parallel.algorithms import (
    halving_doubling_all_reduce,
    ring_all_reduce,
    ring_all_reduce_simple,
    tree_all_reduce,
)
from phalanx.parallel.gradients import average_gradients, average_gradients_per_parameter

__all__ = [
    "average_gradients",
    "average_gradients_per_parameter",
    "halving_doubling_all_reduce",
    "ring_all_reduce",
    "ring_all_reduce_simple",
    "tree_all_reduce",
]
