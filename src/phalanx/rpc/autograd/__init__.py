"""Backward passes across remote calls.

- `metadata`: the autograd metadata of a message.
- `send_rpc_backward`, `recv_rpc_backward`: the graph nodes of a tensor that is sent, on the sending
  and on the receiving worker.
- `traversal`: traversal of this process's graph, from a tensor to its dependencies.
- `graph`: the graph of a worker, connected to those of other workers.
- `remote_backward`: the part of another worker's backward pass that runs in this process.
- `gradients`: gradients of parameters, kept separately for each worker that calls `backward()`.
- `accumulation`: gradients that own their memory.
- `releases`: notifications that a sender may free its handles.
- `container`: the graph of this process, and the calls of `phalanx.rpc` between the graphs.
- `contexts`, `api`: the API of `torch.distributed.autograd`.

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
