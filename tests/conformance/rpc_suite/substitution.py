"""Replacement of PyTorch's modules by `phalanx.rpc`, for a suite that is imported afterwards."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from tests.conformance.rpc_suite import scope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["InternalNameUsed", "Uses", "compile_scripts_if_possible", "substitute"]


class InternalNameUsed(Exception):
    """A test used a name that is out of scope."""


_CANNOT_COMPILE = (InternalNameUsed, NotImplementedError, RuntimeError, TypeError, ValueError)


class Uses:
    """Out-of-scope names that a test has used, in a file shared by its processes."""

    _fd = -1

    @classmethod
    def record_in(cls, path: Path) -> None:
        cls._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    @classmethod
    def add(cls, name: str, reason: str) -> None:
        if cls._fd >= 0:
            os.write(cls._fd, f"{name}: {reason}\n".encode())

    @classmethod
    def first(cls) -> str:
        """Return the first use and its reason; empty if there was none."""
        return os.pread(cls._fd, 4096, 0).decode().partition("\n")[0]


class _Internal:
    """An out-of-scope name: it can be imported, and using it raises `InternalNameUsed`."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__.update(__name__=name.rpartition(".")[2], _of=(name, reason))

    def _raise_used(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        name, reason = self.__dict__["_of"]
        Uses.add(name, reason)
        raise InternalNameUsed(f"{name}: {reason}")

    __call__ = __enter__ = __iter__ = __getitem__ = __setattr__ = __reduce__ = _raise_used

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_torchdynamo_inline":
            raise AttributeError(name)
        self._raise_used()


class _Substitute(ModuleType):
    """A substitute for one of PyTorch's modules."""

    def __init__(self, real: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__path__: list[str] = []
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if name.startswith("__") or not hasattr(real, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        reason = scope.internal_reason(self.__name__, name)
        if reason is None:
            raise AttributeError(f"phalanx.rpc has no {name!r}, which is public in {self.__name__}")
        # Recorded as a use, because a test may replace the value.
        Uses.add(f"{self.__name__}.{name}", reason)
        return _Internal(f"{self.__name__}.{name}", reason)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def substitute() -> None:
    """Replace PyTorch's modules by `phalanx.rpc` for all later imports."""
    import torch.distributed.autograd
    import torch.distributed.nn
    import torch.distributed.optim
    import torch.distributed.rpc

    import phalanx.rpc

    public = {name: getattr(phalanx.rpc, name) for name in phalanx.rpc.__all__}
    autograd = public.pop("autograd")
    module = {"RemoteModule": public.pop("RemoteModule")}
    optimizer = {"DistributedOptimizer": public.pop("DistributedOptimizer")}
    real = torch.distributed.rpc
    shared = {"constants": real.constants, "_set_rpc_timeout": _set_rpc_timeout}
    rpc = _install(real, {**public, **shared})
    api = {name: public[name] for name in real.api.__all__ if name in public}
    registry = {
        "BackendType": phalanx.rpc.BackendType,
        "construct_rpc_backend_options": _construct_rpc_backend_options,
    }
    # Tests use its members as default arguments.
    modes = {"RPCExecMode": real.internal.RPCExecMode}
    for name, names in (("api", api), ("backend_registry", registry), ("internal", modes)):
        setattr(rpc, name, _install(getattr(real, name), names))
    torch.distributed.rpc = rpc
    torch.distributed.autograd = _install(
        torch.distributed.autograd, {name: getattr(autograd, name) for name in autograd.__all__}
    )
    vars(torch.distributed.optim).update(optimizer)
    vars(torch.distributed.nn).update(module)
    nn_api = torch.distributed.nn.api
    nn_api.remote_module = _install(nn_api.remote_module, module)
    _refuse_private_attributes(phalanx.rpc.RRef, real.PyRRef)


def _refuse_private_attributes(phalanx_class: type, torch_class: type) -> None:
    """Make private attributes of PyTorch's class raise `InternalNameUsed` on Phalanx's."""
    for name in dir(torch_class):
        if not name.startswith("__") and not hasattr(phalanx_class, name):
            reason = scope.internal_reason("", name)
            if reason:
                target = _Internal(f"{torch_class.__name__}.{name}", reason)
                setattr(phalanx_class, name, property(target._raise_used))


def _install(real: ModuleType, names: Mapping[str, Any]) -> ModuleType:
    sys.modules[real.__name__] = substitute_module = _Substitute(real, names)
    return substitute_module


def _construct_rpc_backend_options(_backend: object, **options: Any) -> Any:
    import phalanx.rpc

    return phalanx.rpc.TensorPipeRpcBackendOptions(**options)


def _set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout, which has no public name; tests of public names need it."""
    from phalanx.rpc.agent import agent

    agent().timeout = seconds


@contextlib.contextmanager
def compile_scripts_if_possible() -> Iterator[None]:
    """Make functions and classes that `torch.jit.script` cannot compile raise when used."""
    import torch

    script = torch.jit.script

    def compile_if_possible(target: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return script(target, *args, **kwargs)
        except _CANNOT_COMPILE:
            return _Internal(f"{target.__module__}.{target.__qualname__}", scope.TORCHSCRIPT)

    torch.jit.script = compile_if_possible
    try:
        yield
    finally:
        torch.jit.script = script
