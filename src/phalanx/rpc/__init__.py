"""Remote calls: a function called by name on another worker, with PyTorch's names and meaning.

`init_rpc` makes this process a worker; `rpc_sync`, `rpc_async` and `remote` call functions on
others, `RRef` refers to values that live there, `shutdown` leaves. Workers meet where the process
group does. From the bottom up: `wire` (messages), `shipping` (pickles), `memory` with `arena`
and `mapped` (tensors on a host, where they are sent from and where they come), `near` with `door`,
and `far` (connections on a host, how they are made, and between hosts), `values` (what `RRef`s
refer to), `seam` (where autograd takes hold), `freight` (messages with all that is in them),
`spin`, `crew` and `reactor` (who waits, and who does the work), `reception` (who comes), `telling`
(what others may free), `executing`, `agent` (this worker) with `asked` (a call under way), and
`calls`, `rref`, `lifetime`, `options`, `functions` for users. On top: `autograd` (gradients through
calls), `remote_module`, `optimizer`, and `table` (embeddings on servers).
"""

from phalanx.rpc import autograd, functions, table
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
from phalanx.rpc.lifetime import init_rpc, shutdown
from phalanx.rpc.optimizer import DistributedOptimizer
from phalanx.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from phalanx.rpc.remote_module import RemoteModule
from phalanx.rpc.rref import RRef
from phalanx.rpc.table import ShardedEmbeddingBag
from phalanx.rpc.workers import WorkerInfo

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "RRef",
    "RemoteModule",
    "RpcBackendOptions",
    "ShardedEmbeddingBag",
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
    "table",
]
