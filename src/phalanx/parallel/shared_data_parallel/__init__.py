"""`SharedDataParallel`: parameters, gradients and optimizer state held once per host.

- `module`: the public class; `copies`: the plain module that a copy of it becomes.
- `slice_owners`: the ranks that share memory, and the owners of slices.
- `layout`: the position of each parameter in the memory, and the slices of each owner.
- `memory`: memory that the ranks of a host share; `views`: flat and shaped views of tensors.
- `parameters`: the move of a module's parameters into that memory.
- `backward_tracking`: the distinction between backward passes that average and those that do not.
- `deferred_linear`: gradients of linear layers, computed directly into the memory.
- `gradients`: collection of gradients bucket by bucket; `reducer`: the average of each bucket.
- `clipping`: scaling of gradients by their norm.
- `optimizer`: updates of this rank's slices; `optimizer_state`: the state of the whole optimizer.
"""

from phalanx.parallel.shared_data_parallel.module import BUCKET_BYTES, SharedDataParallel
from phalanx.parallel.shared_data_parallel.optimizer import ELEMENTWISE, ShardedOptimizer

__all__ = ["BUCKET_BYTES", "ELEMENTWISE", "ShardedOptimizer", "SharedDataParallel"]
