"""Backward passes across remote calls.

- `nodes`: the graph nodes of tensors that are sent and received, their metadata in messages, and
  traversal of this process's graph.
- `gradients`: gradients of parameters, kept separately for each worker that calls `backward()`.
- `graph`: the graph of this worker, and the calls that connect it to those of other workers.
- `api`: the API of `torch.distributed.autograd`.

`loss.backward()` works across calls without this module. Scripts that were written for PyTorch use
`import phalanx.rpc.autograd as dist_autograd`.
"""

from phalanx.rpc.autograd.api import (
    backward,
    context,
    get_gradients,
    is_available,
    mix_gradients,
)

__all__ = ["backward", "context", "get_gradients", "is_available", "mix_gradients"]
