"""What is compared: `phalanx.rpc`, and `torch.distributed.rpc` with each of its transports."""

from typing import Any

import torch.distributed.rpc as torch_rpc

from phalanx import rpc as phalanx_rpc

__all__ = ["SYSTEMS", "join"]

SYSTEMS = ("phalanx", "torch", "torch_uv")
"""`torch`: as its users have it, memory on a host. `torch_uv`: sockets, which sleep when idle."""


def join(system: str, folder: str, name: str, rank: int, size: int) -> Any:
    """Become a worker; returns the module of RPC."""
    where = f"file://{folder}/rpc"
    if system == "phalanx":
        options: Any = phalanx_rpc.RpcBackendOptions(init_method=where)
        phalanx_rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
        return phalanx_rpc
    only = {"_transports": ["uv"]} if system == "torch_uv" else {}
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=where, num_worker_threads=4, **only)
    torch_rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return torch_rpc
