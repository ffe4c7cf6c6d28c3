"""Whether `phalanx.rpc` has what `torch.distributed.rpc` has, by the same names."""

from __future__ import annotations

import inspect

import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc

from phalanx import rpc
from phalanx.rpc import autograd as dist_autograd

# What PyTorch's users don't call.
INTERNAL = {"AllGatherStates", "Generator", "PyRRef", "RemoteProfilerManager", "RpcAgent", "Store"}
INTERNAL |= {
    "DistAutogradContext",
    "TensorPipeAgent",
    "enable_gil_profiling",
    "logger",
    "new_method",
    "method_factory",
}


def test_every_public_name_is_there() -> None:
    for theirs, ours in ((torch_rpc, rpc), (torch_autograd, dist_autograd)):
        for name, value in vars(theirs).items():
            here = getattr(value, "__module__", "") or ""
            if name.startswith("_") or name in INTERNAL or inspect.ismodule(value):
                continue
            if here.startswith(("torch.distributed", "torch._C._distributed")):
                assert hasattr(ours, name), name
    for name in ("init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown"):
        theirs, ours = (inspect.signature(getattr(each, name)) for each in (torch_rpc, rpc))
        assert list(ours.parameters)[: len(theirs.parameters)] == list(theirs.parameters), name
    for theirs, ours in (
        (torch_rpc.RRef, rpc.RRef),
        (torch_rpc.TensorPipeRpcBackendOptions, rpc.TensorPipeRpcBackendOptions),
    ):
        public = {name for name in dir(theirs) if not name.startswith("_")}
        assert public <= set(dir(ours)), public - set(dir(ours))
