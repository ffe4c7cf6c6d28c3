"""Test that `phalanx.rpc` has all public names of `torch.distributed.rpc`."""

from __future__ import annotations

import inspect

import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc

from phalanx import rpc
from phalanx.rpc import autograd as dist_autograd

# Names that are not for PyTorch's users.
INTERNAL = {"AllGatherStates", "Generator", "PyRRef", "RemoteProfilerManager", "RpcAgent", "Store"}
INTERNAL |= {
    "DistAutogradContext",
    "TensorPipeAgent",
    "enable_gil_profiling",
    "logger",
    "new_method",
    "method_factory",
}


def test_all_public_names_exist() -> None:
    for torch_object, own_object in ((torch_rpc, rpc), (torch_autograd, dist_autograd)):
        for name, value in vars(torch_object).items():
            module = getattr(value, "__module__", "") or ""
            if name.startswith("_") or name in INTERNAL or inspect.ismodule(value):
                continue
            if module.startswith(("torch.distributed", "torch._C._distributed")):
                assert hasattr(own_object, name), name
    for name in ("init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown"):
        torch_object, own_object = (
            inspect.signature(getattr(each, name)) for each in (torch_rpc, rpc)
        )
        assert list(own_object.parameters)[: len(torch_object.parameters)] == list(
            torch_object.parameters
        ), name
    for torch_object, own_object in (
        (torch_rpc.RRef, rpc.RRef),
        (torch_rpc.TensorPipeRpcBackendOptions, rpc.TensorPipeRpcBackendOptions),
    ):
        public = {name for name in dir(torch_object) if not name.startswith("_")}
        assert public <= set(dir(own_object)), public - set(dir(own_object))
