"""A module that lives on another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from phalanx.errors import UsageError
from phalanx.rpc import calls
from phalanx.rpc.rref import RRef
from phalanx.rpc.state import agent

__all__ = ["RemoteModule"]

_CPU = torch.device("cpu")


class RemoteModule(nn.Module):
    """A module on another worker, called like one that is here.

    A forward pass is a call. `loss.backward()` goes through it: gradients of its parameters stay
    where they are, apart for each worker, until its `DistributedOptimizer` steps. It may be an
    argument of a call: it then refers to the same module.

    To the module that contains it it has no parameters: `parameters()` and `state_dict()` of that
    one speak of what is here. `train()` and `eval()` reach the module itself, for all who use it.

    Args:
        remote_device: The worker and, if it isn't the CPU, the device there: "ps", "ps/cuda:0",
            "rank:2/cpu". Tensors are moved to the device, and results back to the CPU.
        module_cls: What makes the module there: a class, or a function that returns one.
        args: Its arguments.
        kwargs: Its arguments by name.

    Blocks until the module is made.

    Raises:
        UsageError: There is no such worker or device, or what was made is no module, or one that
            averages gradients, as DDP and `DataParallel` do, which it couldn't.
        PeerLost: The worker is dead.
    """

    _told: bool

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        on, device = _place(remote_device)
        what = (device, module_cls, tuple(args or ()), dict(kwargs or {}))
        made = calls.rpc_sync(on, _made, what)
        self._refer(on, device, made)

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: Any) -> RemoteModule:
        """One more of a module that is there already.

        Args:
            remote_device: The worker and the device of the module.
            module_rref: An `RRef` to it.

        Raises:
            UsageError: The reference is to another worker's.
        """
        on, device = _place(remote_device)
        if agent().peer(on).info != module_rref.owner():
            raise UsageError(
                f"remote_device is {remote_device!r}, but the module is on worker "
                f"{module_rref.owner().name!r}: expected that one"
            )
        return _referring(on, device, module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns; blocks until it has."""
        return calls.rpc_sync(self.on, _forward, (self._rref, self.device, args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Call the module and return at once; the future is of what it returns."""
        return calls.rpc_async(self.on, _forward, (self._rref, self.device, args, kwargs))

    def remote_parameters(self, recurse: bool = True) -> list[Any]:
        """References to its parameters, for `DistributedOptimizer`; blocks.

        Args:
            recurse: Whether to include those of its submodules.
        """
        found: list[Any] = calls.rpc_sync(self.on, _parameters, (self._rref, recurse))
        return found

    def get_module_rref(self) -> Any:
        """An `RRef` to the module."""
        return self._rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the module's mode, there; blocks."""
        if self.training != mode or not self._told:
            calls.rpc_sync(self.on, _set_mode, (self._rref, mode))
            self._told = True
        self.training = mode
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002
        """None is here.

        Raises:
            UsageError: Always; an optimizer must not be left without them by accident.
        """
        raise UsageError(
            f"the parameters of this module are on worker {self.on!r}: use remote_parameters() and "
            "DistributedOptimizer"
        )

    def extra_repr(self) -> str:
        """Where it is."""
        return f"on={self.on!r}, device={str(self.device)!r}"

    def __reduce__(self) -> Any:
        return _referring, (self.on, self.device, self._rref)

    def _refer(self, on: str | int, device: torch.device, rref: Any) -> None:
        self.on, self.device, self._rref = on, device, rref
        self._told = False


def _referring(on: str | int, device: torch.device, rref: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    module._refer(on, device, rref)
    return module


def _place(remote_device: str) -> tuple[str | int, torch.device]:
    if not isinstance(remote_device, str):
        raise UsageError(
            f"remote_device is {remote_device!r}: expected the name of a worker, as in 'ps' or "
            "'ps/cuda:0'"
        )
    worker, _, name = remote_device.partition("/")
    try:
        device = torch.device(name or "cpu")
    except RuntimeError:
        raise UsageError(
            f"remote_device is {remote_device!r}: {name!r} is no device; expected such as 'cpu' or "
            "'cuda:0'"
        ) from None
    kind, _, rank = worker.partition(":")
    on: str | int = int(rank) if kind == "rank" and rank.isdecimal() else worker
    agent().peer(on)  # raises if there is none
    return on, device


def _made(
    device: torch.device,
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"RemoteModule got {module_cls!r}, which made an object of type "
            f"{type(module).__name__}: expected a torch.nn.Module"
        )
    for name, part in module.named_modules():
        if _averages(part):
            raise UsageError(
                f"RemoteModule got a module whose {name or 'outermost part'} is "
                f"{type(part).__name__}: it averages gradients where backward() is called, not in "
                "a module that others call; wrap what is on the trainers"
            )
    return RRef(module.to(device))


def _averages(part: nn.Module) -> bool:
    if isinstance(part, nn.parallel.DistributedDataParallel):
        return True
    return type(part).__module__.startswith("phalanx.parallel.data_parallel.")


def _forward(rref: Any, device: torch.device, args: Any, kwargs: Any) -> Any:
    module = rref.local_value()
    if device == _CPU:
        return module(*args, **kwargs)
    moved = _moved((args, kwargs), device)
    return _moved(module(*moved[0], **moved[1]), _CPU)


def _moved(what: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), what)


def _parameters(rref: Any, recurse: bool) -> list[Any]:
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def _set_mode(rref: Any, mode: bool) -> None:
    rref.local_value().train(mode)
