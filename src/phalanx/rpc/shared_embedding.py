"""Embedding modules whose rows other workers of the host read in memory, without a call.

A forward pass of an embedding reads a few rows, so the call costs more than the work. If a
`RemoteModule` creates a `torch.nn.Embedding` or `EmbeddingBag`, its owner keeps the weight in
memory that it shares with its host. A worker of the host maps that memory at its second forward
pass, and from then on runs the same forward pass on it itself. (A reference that is used once costs
less by a call.) The gradient of the rows goes to the owner in the backward pass, as if the weight
had been sent (`SharedTensor`). The owner's optimizers work on the same memory.

A reader sees a concurrent update before, during or after it, as a call that is executed beside it
does. It would not see a change of the module itself: another weight, a hook, another mode. Such a
change is made by the user's code on the owner, which gets the module only by the `RRef`s of the
module and of its parameters. So before such code runs, the owner revokes all mappings, and waits
until the readers have confirmed it. They make calls from then on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from phalanx._native import CowMemory
from phalanx.errors import PeerLost
from phalanx.rpc import calls
from phalanx.rpc.agent import agent
from phalanx.rpc.autograd.graph import graph
from phalanx.rpc.autograd.nodes import SharedTensor
from phalanx.rpc.functions import CallFuture
from phalanx.rpc.reference_counting import RRefId
from phalanx.rpc.rref import IdOf, RRef, owned_value

CLASSES = (nn.Embedding, nn.EmbeddingBag)
"""The modules that can be shared; subclasses may have code of their own."""
_MAX_DENSE_SIZE = 64 * 2**10
"""The maximum size, in bytes, of a weight with dense gradients.

Such a gradient has the size of the weight, while a call sends that of its result.
"""
_HARMLESS_METHODS = frozenset(("forward", "state_dict", "train", "eval"))
_LOG = logging.getLogger("phalanx.rpc")

_owned: WeakKeyDictionary[nn.Module, SharedEmbedding] = WeakKeyDictionary()
"""The modules of this worker that are shared."""
_mapped: WeakValueDictionary[int, MappedEmbedding] = WeakValueDictionary()
"""The modules of other workers that this worker has mapped, by a number of this worker."""


class Mapping(NamedTuple):
    """The answer to a worker that maps a module.

    Attributes:
        descriptor: The descriptor of the memory in the owner's process.
        dtype: The dtype of the weight.
        shape: Its shape.
        options: The attributes of the module that its forward pass reads, without the weight.
        handle: The number of the handle of the weight in the owner's graph.
    """

    descriptor: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: dict[str, Any]
    handle: int


class SharedEmbedding:
    """The owner's side of a shared module: the memory of its weight, and the workers that read it.

    Args:
        module: A module of which only the caller has a reference; its weight moves to new memory.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(self, module: nn.Module) -> None:
        weight: Any = module.weight
        self._memory = CowMemory.create(weight.nbytes)
        values = _view(self._memory.shared_view(0, weight.nbytes), weight.dtype, weight.shape)
        with torch.no_grad():
            values.copy_(weight)
            weight.data = values
        self._weight = weight
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self._options, self._description = public, type(module).__name__
        self._readers: dict[int, tuple[int, int]] = {}
        """The workers that have mapped the module and the handles that they use, each by the
        worker's number of the mapping."""
        self._is_revoked = False
        self._lock = threading.Lock()

    def map_for(self, worker: int, number: int) -> Mapping | None:
        """Return what a worker needs to map the module; None if it can no longer be mapped.

        Args:
            worker: The id of the worker.
            number: The number by which the worker identifies the mapping.
        """
        with self._lock:
            if self._is_revoked:
                return None
            own_graph = graph()
            self._readers = {
                each: reader
                for each, reader in self._readers.items()
                if own_graph.is_shared(reader[1])  # otherwise the reader has dropped it
            }
            handle = own_graph.share(worker, self._weight)
            self._readers[number] = worker, handle
        shape = tuple(self._weight.shape)
        return Mapping(self._memory.descriptor, self._weight.dtype, shape, self._options, handle)

    def on_use(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Revoke all mappings before code of the user gets the module, or calls such a method.

        Blocks until the readers have confirmed it.

        Raises:
            CallTimeout: A reader does not answer, as it is stopped.
        """
        if method in _HARMLESS_METHODS or (
            method == "load_state_dict" and len(args) < 3 and not kwargs.get("assign")
        ):
            return
        with self._lock:  # another thread waits until the mappings are revoked
            if not self._is_revoked and self._readers:
                _LOG.warning(
                    "A remote module %s is used by calls from now on, not in shared memory, since "
                    "its owner uses it itself (%s)",
                    self._description,
                    method or "RRef.local_value",
                )
            self._is_revoked = True
            for number, (worker, _) in list(self._readers.items()):
                with contextlib.suppress(PeerLost):
                    calls.rpc_sync(worker, _revoke, (number,))
                del self._readers[number]


class MappedEmbedding:
    """The reader's side of a shared module.

    Args:
        owner: The id of the owner.

    Attributes:
        is_revoked: True once the module must be used by calls.
    """

    def __init__(self, owner: int) -> None:
        own = agent()
        self.is_revoked = False
        self._own, self._peer = own, own.peers[owner]
        # The upper bits make it unique among all workers.
        self.number = own.id << 48 | next(own.local_ids)

    def open(self, module_class: type[nn.Module], mapping: Mapping) -> None:
        """Map the memory of the module.

        Raises:
            OSError: It cannot be mapped.
        """
        size = math.prod(mapping.shape) * mapping.dtype.itemsize
        memory = CowMemory.open(self._peer.record.pid, mapping.descriptor, size)
        # Private: should anything write to it here, the owner's weight does not change.
        values = _view(memory.private_view(0, size), mapping.dtype, mapping.shape)
        memory.close_descriptor()
        self._class: Any = module_class
        self._options = mapping.options
        self._weight: SharedTensor = graph().receive_shared(self._peer.id, mapping.handle, values)

    @property
    def is_usable(self) -> bool:
        """True if the next forward pass may read the memory."""
        return not self.is_revoked and self._own is agent()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward pass.

        Raises:
            PeerLost: The owner is dead or has left.
            Exception: The exception of the forward pass.
        """
        if self._peer.is_unreachable():
            raise self._own.loss_error(self._peer, f"forward of {self._class.__name__}")
        values = self._weight.values
        weight = self._weight.attach() if torch.is_grad_enabled() else values
        return self._class.forward(SimpleNamespace(weight=weight, **self._options), *args, **kwargs)

    def forward_async(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.futures.Future[Any]:
        """Run the forward pass now; return a future of the result or the exception."""
        future = CallFuture()
        try:
            future.set_result(self.forward(args, kwargs))
        except Exception as error:  # noqa: BLE001 - the future raises it
            # A future keeps its exception, whose frames would keep this module.
            future.set_exception(error.with_traceback(None))
        return future


def share(module_class: object, module: Any, rref: RRef[nn.Module]) -> None:
    """Share a module that this worker has just created, if that pays and is possible.

    Args:
        module_class: The class or function that made the module.
        module: The module.
        rref: A reference to it.
    """
    weight: Any = getattr(module, "weight", None)
    if (
        module_class is not type(module)
        or module_class not in CLASSES
        or not any(peer.is_local and peer.id != agent().id for peer in agent().peers)
        or weight.device.type != "cpu"
        or not weight.numel()
        or module.max_norm is not None  # its forward pass changes the weight
        or not (module.sparse or weight.nbytes <= _MAX_DENSE_SIZE)
    ):
        return
    try:
        shared = _owned[module] = SharedEmbedding(module)
    except OSError as error:
        _LOG.warning(
            "A remote module %s of %d bytes is used by calls, as there is no shared memory for it: "
            "%s",
            type(module).__name__,
            weight.nbytes,
            error.strerror,
        )
        return
    revoke_before_use(rref, shared)


def revoke_before_use(rref: RRef[Any], shared: SharedEmbedding | None) -> None:
    """Revoke the mappings of a module before the referenced value, a part of it, is used here."""
    if shared is not None:
        agent().owned_values.get_or_create(rref._rref_id).on_use = shared.on_use


def shared_embedding(module: nn.Module) -> SharedEmbedding | None:
    """Return the owner's side of a shared module, or None if it is not shared."""
    return _owned.get(module)


def map_module(owner: int, module_class: type[nn.Module], rref: RRef[nn.Module]) -> Any:
    """Map a module of another worker; blocks for a call.

    Returns:
        The mapped module; None if it must be used by calls.
    """
    own = agent()
    if owner == own.id or not own.peers[owner].is_local:
        return None
    # Known before the owner knows it: the owner may revoke it at once.
    mapped = MappedEmbedding(owner)
    _mapped[mapped.number] = mapped
    mapping = calls.rpc_sync(owner, _map, (IdOf(rref), own.id, mapped.number))
    if mapping is None:
        return None
    try:
        mapped.open(module_class, mapping)
    except OSError as error:
        graph().receive_shared(
            owner, mapping.handle, torch.empty(0, dtype=torch.float32, device="cpu")
        )  # released at once
        _LOG.warning("cannot map a remote module: %s", os.strerror(error.errno or 0))
        return None
    return mapped


def _view(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return from_dlpack(memory).view(dtype).view(shape)


def _map(module_id: RRefId, worker: int, number: int) -> Mapping | None:
    shared = _owned.get(owned_value(module_id))
    return None if shared is None else shared.map_for(worker, number)


def _revoke(number: int) -> None:
    if (mapped := _mapped.get(number)) is not None:
        mapped.is_revoked = True
