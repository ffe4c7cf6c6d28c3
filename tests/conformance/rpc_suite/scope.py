"""The parts of PyTorch's RPC suite that `phalanx.rpc` does not implement, each with its reason.

A test is out of scope if it does not pass and either uses a name with an `internal_reason` or is
listed in `OUT_OF_SCOPE`. A test that fails for any other reason is a failure, unless
`DIFFERENCES` documents it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = [
    "DIFFERENCES",
    "INTERNAL",
    "OUT_OF_SCOPE",
    "difference_reason",
    "internal_reason",
    "out_of_scope_reason",
]

_PRIVATE = "the name begins with an underscore: it is private to PyTorch"

# Undocumented names without an underscore, by module; "*" matches any name.
INTERNAL = {
    "torch.distributed.rpc": {
        "TensorPipeAgent": "PyTorch's agent; Phalanx has another one",
        "PyRRef": "the C++ class of PyTorch's references",
        "RpcAgent": "the base class of PyTorch's agents",
        "RemoteProfilerManager": "a part of PyTorch's profiler for calls",
        "enable_gil_profiling": "measurements of PyTorch's agent",
    },
    "torch.distributed.rpc.api": {"*": "helpers of PyTorch's RPC; its documented API is in rpc"},
    "torch.distributed.rpc.backend_registry": {"*": "the registry of agents of PyTorch's RPC"},
    "torch.distributed.rpc.internal": {"*": "PyTorch's pickler and names of profiled events"},
}

TORCHSCRIPT = "TorchScript cannot call phalanx.rpc, nor use its references and futures"
_FAULTY = "it injects faults into messages of PyTorch's agent: the faulty agent is a part of it"
_PROFILED = "it reads events that PyTorch's agent records for PyTorch's profiler"
_DEVICES = "TensorPipe's device maps"
_SCRIPTED = (
    "all_kwargs_are_populated_by_defaults",
    "async_function_remote*",
    "async_function_simple",
    "args_and_kwargs_contain_different_types",
    "args_kwargs_are_neither_passed",
    "async_function_remote*",
    "async_function_simple",
    "call_*_from_script*",
    "future_passed_between_python_and_jit",
    "kwargs_not_passed",
    "less_than_needed_args_are_specified",
    "load_script_module_with_pickled_rref",
    "local_rref_local_value",
    "more_than_needed_args_are_specified",
    "my_script_module_with_rrefs",
    "no_kwargs_are_populated_by_defaults",
    "record_function_on_caller_rpc_async",
    "remote_script_module",
    "return_local_script_*_rref_in_py_and_use_in_script",
    "rpc_async_jit_profiled",
    "rpc_torchscript_record_function",
    "rref_as_arg_and_return",
    "rref_is_owner",
    "rref_jit_pickle_not_supported",
    "rref_list_mutate",
    "rref_local_value",
    "some_kwargs_are_populated_by_defaults",
    "unexepected_kwarg_is_specified",
    "user_rrefs_confirmed*",
)

# Tests that are not run, by pattern.
OUT_OF_SCOPE: dict[str, str] = {
    "FaultyAgent*": _FAULTY,
    "JitFaultyAgent*": _FAULTY,
    **{f"JitRpcTest.test_{name}": TORCHSCRIPT for name in _SCRIPTED},
    "JitDistAutogradTest.*": TORCHSCRIPT,
    "DistAutogradTest.test_trainer_ps_torchscript_functions": TORCHSCRIPT,
    "RpcTest.test_profiler_*": _PROFILED,
    "RpcTest.test_rpc_profiling_*": _PROFILED,
    "DistAutogradTest.test_dist_autograd_profiling": _PROFILED,
    "TensorPipeAgentCudaRpcTest.test_device_map*": _DEVICES,
}

# Deliberate differences from PyTorch's RPC, at most 10; docs/rpc.md lists them. By pattern.
DIFFERENCES: dict[str, str] = {
    "DistAutogradTest.test_backward_unused_send_function": (
        "a backward pass completes even if the result of a call was not used; PyTorch's blocks "
        "forever"
    ),
    "DistAutogradTest.test_no_grad_copy": (
        "of two parameters with the same gradient tensor one keeps it; PyTorch copies both"
    ),
    "DistAutogradTest.test_grad_copy_sparse_indices_extra_ref": (
        "a sparse gradient whose parts are held elsewhere is copied; PyTorch shares them"
    ),
    "RpcTest.test_rref_proxy_non_exist": (
        "rref.remote().method() does not first ask the owner for the type of the value, so that it "
        "never blocks: to_here() of the result raises AttributeError"
    ),
    "RpcTest.test_user_rref_backward": (
        "rref.backward() needs no context on workers other than the owner: gradients are then in "
        "grad, as after rref.to_here().backward()"
    ),
}


def internal_reason(module: str, name: str) -> str | None:
    """Return why a name of a module is internal to PyTorch; None if it is public."""
    if name.startswith("_"):
        return _PRIVATE
    names = INTERNAL.get(module, {})
    return names.get(name) or names.get("*")


def out_of_scope_reason(test: str) -> str | None:
    """Return why a test is out of scope; None if it is not listed."""
    return _reason(OUT_OF_SCOPE, test)


def difference_reason(test: str) -> str | None:
    """Return the deliberate difference that a test shows; None if there is none."""
    return _reason(DIFFERENCES, test)


def _reason(reasons: dict[str, str], test: str) -> str | None:
    return next((reason for pattern, reason in reasons.items() if fnmatchcase(test, pattern)), None)
