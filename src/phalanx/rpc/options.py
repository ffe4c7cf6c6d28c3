"""Options under PyTorch's names, so that scripts for its RPC run with only the import changed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import UsageError
from phalanx.rpc.state import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "DEFAULT_INIT_METHOD",
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
]

DEFAULT_INIT_METHOD = "env://"


class BackendType(enum.Enum):
    """There is one way that calls travel: each of these names means it."""

    TENSORPIPE = "TENSORPIPE"
    PHALANX = "PHALANX"


@dataclass
class RpcBackendOptions:
    """Options of `init_rpc`.

    Attributes:
        rpc_timeout: Seconds that a call may take; 0: any.
        init_method: Where the workers meet, a URL as for `torch.distributed.init_process_group`;
            by default where the process group does.
    """

    rpc_timeout: float = DEFAULT_TIMEOUT
    init_method: str = DEFAULT_INIT_METHOD


@dataclass
class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The same with PyTorch's signature.

    Attributes:
        num_worker_threads: Not used: there are as many threads as there are requests that wait.
        device_maps: Must be empty: tensors of the CPU travel, no others.
        devices: Not used.
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
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads, self.devices = num_worker_threads, devices
        self.device_maps = device_maps
        if device_maps:
            raise UsageError(
                "device_maps: RPC carries tensors of the CPU; send tensor.cpu(), and move it where "
                "it arrives"
            )

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Refused: tensors of the CPU travel, no others."""
        raise UsageError(f"set_device_map({to!r}, {device_map!r}): RPC carries tensors of the CPU")

    def set_devices(self, devices: Sequence[Any]) -> None:
        """As `devices`: not used."""
        self.devices = devices
