"""`DataParallel`: parameters, averaged gradients and the optimizer's state held once per host.

`module` is what users see, `copies` what a copy of it is. `places` says who shares memory, `layout`
where each parameter lies in it and who owns what, `memory` makes it, `parameters` moves a module's
parameters there. `passes` says which backward passes average; `gradients` takes what they make,
chunk by chunk, which `reducing` averages; `clipping` scales it. `optimizer` updates this rank's
slices, and `states` puts its state together.
"""

from phalanx.parallel.data_parallel.module import CHUNK_BYTES, DataParallel
from phalanx.parallel.data_parallel.optimizer import ELEMENTWISE, ShardedOptimizer

__all__ = ["CHUNK_BYTES", "ELEMENTWISE", "DataParallel", "ShardedOptimizer"]
