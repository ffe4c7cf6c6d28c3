"""The compared systems: `phalanx.rpc`, and `torch.distributed.rpc` with different transports."""

from typing import Any

import torch.distributed.rpc as torch_rpc

from phalanx import rpc as phalanx_rpc

__all__ = ["SYSTEMS", "join"]

SYSTEMS = ("phalanx", "torch", "torch_uv")
"""`torch`: its default, shared memory on a host. `torch_uv`: sockets, which sleep when idle."""


def join(system: str, folder: str, name: str, rank: int, size: int) -> Any:
    """Join RPC as a worker; return the RPC module."""
    init_method = f"file://{folder}/rpc"
    if system == "phalanx":
        options: Any = phalanx_rpc.RpcBackendOptions(init_method=init_method)
        phalanx_rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
        return phalanx_rpc
    transports = {"_transports": ["uv"]} if system == "torch_uv" else {}
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, num_worker_threads=4, **transports
    )
    torch_rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return torch_rpc
