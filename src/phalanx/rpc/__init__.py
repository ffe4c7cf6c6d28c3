"""Remote procedure calls with PyTorch's names and semantics.

`init_rpc` makes this process a worker. `rpc_sync`, `rpc_async` and `remote` call functions on other
workers, an `RRef` refers to a value that lives on one of them, and `shutdown` leaves. By default
the workers rendezvous through the store of the process group.

The modules, from the bottom up:

- `event_loop` (event loop and its threads), `message` (format of messages)
- `functions` (functions that return futures, and futures of calls)
- `shared_memory` (tensors in memory that workers of one host share)
- `local_connection`, `remote_connection` (connections between workers of one host and of several)
- `workers` (rendezvous of the workers)
- `reference_counting` (values that `RRef`s refer to, and the counts of their references)
- `peer` (another worker), `pickling`, `codec` (messages with their tensors) and `call_log`
  (unanswered calls, for `phalanx explain`)
- `agent` (this worker) and `server` (execution of requests)
- `dynamic_group` (groups whose workers join and leave)
- `calls` (for users)
- `autograd` (gradients through calls)
- `rref`, `init`, `remote_module` and `optimizer` (for users)
- `shared_embedding` (remote embedding modules that are read in shared memory)

A call passes from `calls` through `agent` and `peer` to `codec`, which uses `pickling` and
`message`, and then through a connection (`local_connection`) to the other worker. There
`event_loop` reads it and `server` executes it. The answer takes the same connection back.
"""

from phalanx.rpc import autograd, functions
from phalanx.rpc.calls import (
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    is_available,
    is_initialized,
    rpc_async,
    rpc_sync,
)
from phalanx.rpc.init import (
    BackendType,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    init_rpc,
    shutdown,
)
from phalanx.rpc.optimizer import DistributedOptimizer
from phalanx.rpc.remote_module import RemoteModule
from phalanx.rpc.rref import RRef, remote
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
