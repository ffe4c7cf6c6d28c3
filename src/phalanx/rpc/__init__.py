"""Remote procedure calls with PyTorch's names and semantics.

`init_rpc` makes this process a worker. `rpc_sync`, `rpc_async` and `remote` call functions on other
workers, an `RRef` refers to a value that lives on one of them, and `shutdown` leaves. By default
the workers rendezvous through the store of the process group.

The modules, from the bottom up:

- `codec` (encoding and decoding of messages)
- `shared_memory` (tensors in memory that workers of one host share)
- `transport` (connections between workers, their authentication, and the server)
- `event_loop` (event loop and its threads)
- `owned_values` (values that `RRef`s refer to), `root_worker` (worker on whose behalf a thread
  works) and `peer_loss` (listeners for the loss of workers)
- `release_notifier` (notifications about ended references and unmapped blocks) and
  `request_handlers`
- `agent` (this worker), `peer` (another worker), `pending_call` (a call whose answer a thread waits
  for), `futures` and `call_log` (unanswered calls, for `phalanx explain`)
- `current_agent`, `calls`, `rref`, `init`, `options` and `functions` (for users)
- `autograd` (gradients through calls), `remote_module` and `optimizer`
"""

from phalanx.rpc import autograd, functions
from phalanx.rpc.calls import (
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    is_available,
    is_initialized,
    remote,
    rpc_async,
    rpc_sync,
)
from phalanx.rpc.init import init_rpc, shutdown
from phalanx.rpc.optimizer import DistributedOptimizer
from phalanx.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from phalanx.rpc.remote_module import RemoteModule
from phalanx.rpc.rref import RRef
from phalanx.rpc.workers import WorkerInfo

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "is_initialized",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
