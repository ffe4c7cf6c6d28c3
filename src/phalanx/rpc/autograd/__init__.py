"""Backward passes that go through calls.

- `note`: what is told along with tensors; `sent`, `received`: what stands for a tensor in the graph
  of the worker that sent it, and of the one that got it.
- `walk`: what a tensor depends on, in this process's graph.
- `graph` ties these together; `running` is a backward pass of another worker, while it is here.
- `gradients`: of parameters, apart for each worker that calls `backward()`.
- `releases`: what is needed no longer.
- `transport`: the graph of this process, by the calls of `phalanx.rpc`.
- `contexts`, `compatible`: the names of `torch.distributed.autograd`.

`loss.backward()` needs none of this by name. For scripts that were written for PyTorch:
`import phalanx.rpc.autograd as dist_autograd`.
"""

from phalanx.rpc.autograd.compatible import (
    backward,
    context,
    get_gradients,
    is_available,
    mix_gradients,
)

__all__ = ["backward", "context", "get_gradients", "is_available", "mix_gradients"]
