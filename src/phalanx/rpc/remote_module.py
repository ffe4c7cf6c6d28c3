"""A module on another worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.rpc import calls, shared_embedding
from phalanx.rpc.agent import agent
from phalanx.rpc.pickling import thread_local
from phalanx.rpc.reference_counting import RRefId
from phalanx.rpc.rref import IdOf, RRef, owned_value
from phalanx.rpc.shared_embedding import MappedEmbedding
from phalanx.torch_versions import tree_map_only

_CPU = "cpu"
_CALLS_TO_MAP = 2
"""The forward pass at which a module in shared memory is mapped: one use costs less by a call."""


class RemoteModule(nn.Module):
    """A module on another worker that is called like a local one.

    A forward pass is a call, and `loss.backward()` goes through it. Gradients of the module's
    parameters stay on its worker, separately for each calling worker, until the
    `DistributedOptimizer` of that caller steps. A `RemoteModule` may be an argument of a call: it
    then refers to the same module.

    `train()` and `eval()` apply to the module itself, for all workers that use it. Every other
    method that concerns parameters, buffers, hooks or submodules raises, since there are none in
    this process: `state_dict()`, `to()`, `apply()` and so on. Call them on the module's worker:
    `module.get_module_rref().rpc_sync().state_dict()`.

    A module that contains a `RemoteModule` has only its local parameters: its `parameters()`,
    `to()` and `half()` apply to these. Its `state_dict()`, `load_state_dict()` and `apply()` raise,
    since they would silently omit the remote module: save and load the local parts one by one.

    If the module is a `torch.nn.Embedding` or `EmbeddingBag` (given as `module_cls` itself) with
    sparse gradients, or of at most 64 KiB, a worker on the owner's host reads its rows in shared
    memory from the second forward pass on, which is then no call. This ends, with a warning on the
    owner, when a function there uses the module through its `RRef`, other than by `state_dict` and
    `load_state_dict`.

    The constructor blocks until the module is created.

    Args:
        remote_device: The worker and, unless it is the CPU, the device there: "ps", "ps/cuda:0",
            "rank:2/cpu". Tensors are moved to the device, and results back to the CPU.
        module_cls: A class, or a function that returns a module.
        args: The positional arguments of `module_cls`.
        kwargs: The keyword arguments of `module_cls`.

    Attributes:
        on: The name or id of the worker.
        device: The device there, as a string.
        module_rref: An `RRef` to the module.

    Raises:
        UsageError: There is no such worker or device, the created object is not a module, or it
            averages gradients, as DDP and `SharedDataParallel` do, which is impossible here.
        PeerLost: The worker is dead.

    Example:
        >>> module = rpc.RemoteModule("ps", torch.nn.Linear, args=(2, 3))
        >>> module(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """

    _is_mode_set: bool
    _forward_count: int
    """The number of forward passes, up to the one that maps the module."""
    _embedding_class: type[nn.Module] | None
    """The class of the module if it may be used in shared memory."""
    _mapped: MappedEmbedding | None

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        on, device = _parse_remote_device(remote_device)
        arguments = (device, module_cls, tuple(args or ()), dict(kwargs or {}))
        made = calls.rpc_sync(on, _create_module, arguments)
        embedding_class: Any = module_cls if module_cls in shared_embedding.CLASSES else None
        self._set_reference(on, device, made, embedding_class if device == _CPU else None)

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: Any) -> RemoteModule:
        """Return another `RemoteModule` for a module that already exists.

        Args:
            remote_device: The device of the module. The module stays on its worker, even if
                another one is named here, as in PyTorch.
            module_rref: An `RRef` to the module.

        Example:
            >>> layer = rpc.remote("ps", torch.nn.Linear, args=(2, 3))
            >>> module = rpc.RemoteModule.init_from_module_rref("ps", layer)
        """
        _, device = _parse_remote_device(remote_device)
        return _make_reference(module_rref.owner_name(), device, module_rref, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module and return its result; block until that is there."""
        if (mapped := self._mapped_embedding()) is not None:
            return mapped.forward(args, kwargs)
        return calls.rpc_sync(self.on, _forward, self._arguments(args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Call the module and return a future of its result at once."""
        if (mapped := self._mapped_embedding()) is not None:
            return mapped.forward_async(args, kwargs)
        return calls.rpc_async(self.on, _forward, self._arguments(args, kwargs))

    def remote_parameters(self, recurse: bool = True) -> list[Any]:
        """Return `RRef`s to the module's parameters, for `DistributedOptimizer`; blocks.

        Args:
            recurse: Whether to include the parameters of its submodules.
        """
        found: list[Any] = calls.rpc_sync(self.on, _parameters, (IdOf(self.module_rref), recurse))
        return found

    def get_module_rref(self) -> Any:
        """Return an `RRef` to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode of the module on its worker; blocks."""
        if self.training != mode or not self._is_mode_set:
            calls.rpc_sync(self.on, _set_mode, (IdOf(self.module_rref), mode))
            self._is_mode_set = True
        self.training = mode
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module to a module that contains it, which passes `memo`.

        Raises:
            UsageError: `memo` is None, so no module contains it: its submodules are on its worker.
        """
        if memo is None:
            raise _not_supported("named_modules")
        found: Iterator[tuple[str, nn.Module]]
        found = super().named_modules(memo, prefix, remove_duplicate)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemoteModule:  # noqa: ARG002
        """Return this module unchanged; a module around it converts its local parameters."""
        return self

    def _load_from_state_dict(self, *_args: Any) -> None:
        raise _not_supported("load_state_dict")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __reduce__(self) -> Any:
        if thread_local.pickle_context is None:
            raise UsageError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
                "when using RPC: save the module on its worker, "
                f"{self.on!r}, by a function that is called there"
            )
        return _make_reference, (self.on, self.device, self.module_rref, self._embedding_class)

    def _mapped_embedding(self) -> MappedEmbedding | None:
        """Return the module in shared memory, which the second call maps; None to use calls."""
        if self._mapped is not None and not self._mapped.is_usable:
            self._mapped = None
        elif self._embedding_class is not None and self._forward_count < _CALLS_TO_MAP:
            self._forward_count += 1
            if self._forward_count < _CALLS_TO_MAP:
                return None
            self._mapped = shared_embedding.map_module(
                agent().peer(self.on).id, self._embedding_class, self.module_rref
            )
        return self._mapped

    def _arguments(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        return IdOf(self.module_rref), self.device, args, kwargs

    def _set_reference(
        self, on: str | int, device: str, rref: Any, embedding_class: type[nn.Module] | None
    ) -> None:
        self.on, self.device, self.module_rref = on, device, rref
        self._is_mode_set, self._forward_count = False, 0
        self._embedding_class, self._mapped = embedding_class, None


_HINTS = {
    "parameters": ". Please use ``remote_parameters`` instead.",
    "cuda": "; choose the device at construction, as in 'ps/cuda:0'",
    "to": "; choose the device at construction, as in 'ps/cuda:0'",
}


def _not_supported(name: str) -> UsageError:
    hint = f": call it on the owner, get_module_rref().rpc_sync().{name}(...)"
    return UsageError(f"Method ``{name}`` not supported for RemoteModule{_HINTS.get(name, hint)}")


def _raise_not_supported(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def method(_self: RemoteModule, *_args: Any, **_kwargs: Any) -> None:
        raise _not_supported(name)

    return method


# These methods of `nn.Module` would act on an empty module.
_UNSUPPORTED = (
    "add_module register_module register_buffer register_parameter get_parameter get_buffer "
    "get_submodule set_submodule parameters named_parameters buffers named_buffers children "
    "named_children modules apply cuda cpu ipu xpu mtia type float double half bfloat16 to "
    "to_empty requires_grad_ zero_grad share_memory state_dict load_state_dict extra_repr compile "
    "register_forward_pre_hook register_forward_hook register_full_backward_pre_hook "
    "register_full_backward_hook register_backward_pre_hook register_backward_hook "
    "register_state_dict_post_hook register_state_dict_pre_hook "
    "register_load_state_dict_pre_hook register_load_state_dict_post_hook"
).split()
for _name in _UNSUPPORTED:
    if hasattr(nn.Module, _name):
        setattr(RemoteModule, _name, _raise_not_supported(_name))


def _make_reference(
    on: str | int, device: str, rref: Any, embedding_class: type[nn.Module] | None
) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    module._set_reference(on, device, rref, embedding_class)
    return module


def _parse_remote_device(remote_device: str) -> tuple[str | int, str]:
    if not isinstance(remote_device, str):
        raise UsageError(
            f"remote_device is {remote_device!r}: expected the name of a worker, as in 'ps' or "
            "'ps/cuda:0'"
        )
    worker, _, name = remote_device.partition("/")
    try:
        device = str(torch.device(name or _CPU))
    except RuntimeError:
        raise UsageError(
            f"remote_device is {remote_device!r}: {name!r} is not a device; expected, for "
            "example, 'cpu' or 'cuda:0'"
        ) from None
    kind, _, rank = worker.partition(":")
    on: str | int = int(rank) if kind == "rank" and rank.isdecimal() else worker
    agent().peer(on)  # raises if there is none
    return on, device


def _create_module(
    device: str,
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise UsageError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but "
            f"{module_cls!r} returned an object of type {type(module).__name__}"
        )
    for name, part in module.named_modules():
        if _averages_gradients(part):
            raise UsageError(
                f"RemoteModule got a module whose {name or 'outermost part'} is "
                f"{type(part).__name__}: it averages gradients in the process that calls "
                "backward(), not in a module that others call; wrap the layers on the trainers"
            )
    rref: RRef[nn.Module] = RRef(module.to(device), nn.Module)
    shared_embedding.share(module_cls, module, rref)
    return rref


def _averages_gradients(part: nn.Module) -> bool:
    if isinstance(part, nn.parallel.DistributedDataParallel):
        return True
    return type(part).__module__.startswith("phalanx.parallel.shared_data_parallel.")


def _forward(module_id: RRefId, device: str, args: Any, kwargs: Any) -> Any:
    module = owned_value(module_id)
    if device == _CPU:
        return module(*args, **kwargs)
    moved = _move((args, kwargs), device)
    return _move(module(*moved[0], **moved[1]), _CPU)


def _move(value: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def _parameters(module_id: RRefId, recurse: bool) -> list[Any]:
    module = owned_value(module_id)
    rrefs: list[RRef[nn.Parameter]] = [RRef(each) for each in module.parameters(recurse)]
    for rref in rrefs:
        shared_embedding.revoke_before_use(rref, shared_embedding.shared_embedding(module))
    return rrefs


def _set_mode(module_id: RRefId, mode: bool) -> None:
    owned_value(module_id).train(mode)
