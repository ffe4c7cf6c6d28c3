"""Options under PyTorch's names, so that scripts for its RPC run with only the import changed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import ArgumentTypeError, UsageError
from phalanx.rpc.current_agent import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "DEFAULT_INIT_METHOD",
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "check_options",
]

DEFAULT_INIT_METHOD = "env://"


class BackendType(enum.Enum):
    """The names of the backend; all mean the same one."""

    TENSORPIPE = "TENSORPIPE"
    PHALANX = "PHALANX"


@dataclass
class RpcBackendOptions:
    """Options of `init_rpc`.

    Attributes:
        rpc_timeout: The default timeout of a call, in seconds; 0 means no limit.
        init_method: The rendezvous, a URL as for `torch.distributed.init_process_group`; by default
            that of the process group.
    """

    rpc_timeout: float = DEFAULT_TIMEOUT
    init_method: str = DEFAULT_INIT_METHOD


@dataclass
class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of `init_rpc` with PyTorch's signature.

    Attributes:
        num_worker_threads: Unused: there are as many threads as there are requests that wait.
        device_maps: Must be empty: only CPU tensors can be sent.
        devices: Unused.
    """

    num_worker_threads: int = 16
    rpc_timeout: float = DEFAULT_TIMEOUT
    init_method: str = DEFAULT_INIT_METHOD
    device_maps: Mapping[str, Any] | None = None
    devices: Sequence[Any] | None = None

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        **_transports: Any,
    ) -> None:
        if not isinstance(rpc_timeout, int | float):
            raise ArgumentTypeError(
                f"incompatible constructor arguments: rpc_timeout={rpc_timeout!r}, expected seconds"
            )
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads, self.devices = num_worker_threads, devices
        self.device_maps = device_maps
        if device_maps:
            raise UsageError(
                "device_maps: RPC sends CPU tensors only; send tensor.cpu(), and move it to the "
                "device on the receiver"
            )

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Raise `UsageError`: only CPU tensors can be sent."""
        raise UsageError(f"set_device_map({to!r}, {device_map!r}): RPC sends CPU tensors only")

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Set `devices`, which is unused."""
        self.devices = devices


_BACKEND_NAMES = {kind.name for kind in BackendType}


def check_options(backend: object, options: Any) -> Any:
    """Return the options to use.

    Raises:
        ArgumentTypeError: An argument has a type that `init_rpc` does not accept.
    """
    if backend is not None and not (
        isinstance(backend, enum.Enum) and backend.name in _BACKEND_NAMES
    ):
        raise ArgumentTypeError(
            f"Argument backend must be a member of BackendType, got {backend!r}"
        )
    if options is None:
        return RpcBackendOptions()
    if type(options) is RpcBackendOptions or isinstance(options, TensorPipeRpcBackendOptions):
        return options
    # PyTorch's own options, if a script has changed only some of its imports.
    torch_rpc: Any = vars(torch._C).get("_distributed_rpc")  # set once PyTorch's RPC is imported
    if torch_rpc is not None and isinstance(options, torch_rpc._TensorPipeRpcBackendOptionsBase):
        return TensorPipeRpcBackendOptions(
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
            device_maps=options.device_maps,
        )
    if not isinstance(options, RpcBackendOptions):
        expected = "Argument rpc_backend_options must be an instance of RpcBackendOptions"
    elif backend is None:
        expected = "Could not infer backend for options: expected TensorPipeRpcBackendOptions"
    else:
        expected = "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"
    raise ArgumentTypeError(f"{expected}, got {options!r}")
