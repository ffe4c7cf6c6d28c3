"""`phalanx.rpc` in the place of PyTorch's modules, for a suite that is imported afterwards."""

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

__all__ = ["InternalNameUsed", "Uses", "scripts_compiled_if_possible", "substitute"]


class InternalNameUsed(Exception):
    """A test used a name that is out of scope."""


_CANNOT_COMPILE = (InternalNameUsed, NotImplementedError, RuntimeError, TypeError, ValueError)


class Uses:
    """The names out of scope that a test has used, in a file that its processes share."""

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
    """A name out of scope: it can be imported, and using it raises `InternalNameUsed`."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__.update(__name__=name.rpartition(".")[2], _of=(name, reason))

    def _used(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        name, reason = self.__dict__["_of"]
        Uses.add(name, reason)
        raise InternalNameUsed(f"{name}: {reason}")

    __call__ = __enter__ = __iter__ = __getitem__ = __setattr__ = __reduce__ = _used

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_torchdynamo_inline":
            raise AttributeError(name)
        self._used()


class _Substitute(ModuleType):
    """A module with the names of another one of PyTorch's."""

    def __init__(self, real: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__path__: list[str] = []
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if name.startswith("__") or not hasattr(real, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        reason = scope.internal(self.__name__, name)
        if reason is None:
            raise AttributeError(f"phalanx.rpc has no {name!r}, which is public in {self.__name__}")
        # Recorded as a use: a test may replace what it takes.
        Uses.add(f"{self.__name__}.{name}", reason)
        return _Internal(f"{self.__name__}.{name}", reason)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def substitute() -> None:
    """Put `phalanx.rpc` in the place of PyTorch's modules for all later imports."""
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
    rpc = _put(real, {**public, **shared})
    api = {name: public[name] for name in real.api.__all__ if name in public}
    registry = {
        "BackendType": phalanx.rpc.BackendType,
        "construct_rpc_backend_options": _construct_rpc_backend_options,
    }
    # Tests have its members as default arguments.
    modes = {"RPCExecMode": real.internal.RPCExecMode}
    for name, names in (("api", api), ("backend_registry", registry), ("internal", modes)):
        setattr(rpc, name, _put(getattr(real, name), names))
    torch.distributed.rpc = rpc
    torch.distributed.autograd = _put(
        torch.distributed.autograd, {name: getattr(autograd, name) for name in autograd.__all__}
    )
    vars(torch.distributed.optim).update(optimizer)
    vars(torch.distributed.nn).update(module)
    nn_api = torch.distributed.nn.api
    nn_api.remote_module = _put(nn_api.remote_module, module)
    _refuse_private_attributes(phalanx.rpc.RRef, real.PyRRef)


def _refuse_private_attributes(own: type, theirs: type) -> None:
    """Let private attributes of PyTorch's objects raise `InternalNameUsed` on ours."""
    for name in dir(theirs):
        if not name.startswith("__") and not hasattr(own, name):
            reason = scope.internal("", name)
            if reason:
                what = _Internal(f"{theirs.__name__}.{name}", reason)
                setattr(own, name, property(what._used))


def _put(real: ModuleType, names: Mapping[str, Any]) -> ModuleType:
    sys.modules[real.__name__] = new = _Substitute(real, names)
    return new


def _construct_rpc_backend_options(_backend: object, **options: Any) -> Any:
    import phalanx.rpc

    return phalanx.rpc.TensorPipeRpcBackendOptions(**options)


def _set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout, which has no public name; tests of public names need it."""
    from phalanx.rpc.current_agent import agent

    agent().timeout = seconds


@contextlib.contextmanager
def scripts_compiled_if_possible() -> Iterator[None]:
    """Let a function or class that `torch.jit.script` cannot compile raise when it is used."""
    import torch

    script = torch.jit.script

    def compile_if_possible(what: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return script(what, *args, **kwargs)
        except _CANNOT_COMPILE:
            return _Internal(f"{what.__module__}.{what.__qualname__}", scope.TORCHSCRIPT)

    torch.jit.script = compile_if_possible
    try:
        yield
    finally:
        torch.jit.script = script
