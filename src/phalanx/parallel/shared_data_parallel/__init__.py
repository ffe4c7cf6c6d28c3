"""`SharedDataParallel`: parameters, gradients and optimizer state held once per host.

- `module`: the public class, and the plain module that a copy of it becomes.
- `layout`: the position of each parameter in the memory, and the slices of each owner.
- `memory`: the ranks of a host, the owners of slices, the shared memory, and its views as tensors.
- `parameters`: the move of a module's parameters into that memory.
- `deferred_linear`: gradients of linear layers, computed directly into the memory.
- `gradients`: collection of gradients bucket by bucket, and clipping by their norm.
- `reducer`: the average of each bucket.
- `optimizer`: updates of this rank's slices, and the state of the whole optimizer.
- `journal`: optimizer state that outlives a lost rank, and the old values of what ranks update.
"""

from phalanx.parallel.shared_data_parallel.module import BUCKET_BYTES, SharedDataParallel
from phalanx.parallel.shared_data_parallel.optimizer import ELEMENTWISE, ShardedOptimizer

__all__ = ["BUCKET_BYTES", "ELEMENTWISE", "ShardedOptimizer", "SharedDataParallel"]
