"""The replicas of a model on the ranks: their synchronization, and exchanges between ranks."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.data.ranks import world_size_and_rank
from phalanx.errors import UsageError
from phalanx.parallel import LocalSGD, average_gradients

_PREFIX = "module."
# Number of differences that an error message lists.
_MAX_LISTED = 3


class Replicas:
    """A model on all ranks, either wrapped or plain.

    A model that has `module` and `no_sync()` (PyTorch's DistributedDataParallel, or
    `phalanx.parallel.SharedDataParallel`) averages gradients itself, in backward. Any other model
    is a plain module: its parameters are broadcast from rank 0, and `average_gradients` averages
    its gradients.

    Args:
        model: The model that the user gave.
        local: The optimizer, if the ranks of a host make steps without those of other hosts.

    Raises:
        UsageError: The parameters are sharded over the ranks.
    """

    def __init__(self, model: nn.Module, local: LocalSGD | None = None) -> None:
        self.world_size, self.rank = world_size_and_rank(None, "Trainer")
        self.local = local
        self._step_group = None if local is None else local.host_group
        self.step_size = self.world_size
        """The number of ranks that make each step together."""
        if local is not None:
            self.step_size = (
                1 if self._step_group is None else dist.get_world_size(self._step_group)
            )
        self.model = model
        # torch.compile adds a module that forwards attributes, but changes the parameter names.
        uncompiled = getattr(model, "_orig_mod", model)
        wrapped_module = getattr(uncompiled, "module", None)
        self.is_wrapped = isinstance(wrapped_module, nn.Module) and hasattr(uncompiled, "no_sync")
        self._uncompiled = uncompiled
        self.inner: nn.Module = (
            wrapped_module
            if isinstance(wrapped_module, nn.Module) and self.is_wrapped
            else uncompiled
        )
        if any(hasattr(parameter, "device_mesh") for parameter in self.inner.parameters()):
            raise UsageError(
                f"{type(self.inner).__name__} has sharded parameters (DTensor), expected a plain "
                "module, one in DistributedDataParallel or in "
                "phalanx.parallel.SharedDataParallel: write a training loop for it, with "
                "phalanx.train.Checkpointer"
            )
        first = next(self.inner.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        self._exchange_device = self.device if nccl else torch.device("cpu")

    @property
    def uses_phalanx(self) -> bool:
        """True if the default process group uses the backend "phalanx"."""
        return dist.is_initialized() and dist.get_backend() == "phalanx"

    def check(self) -> None:
        """Check that the model is the same on all ranks. Collective.

        Raises:
            UsageError: Parameters or buffers differ, on every rank; or the rank or world size has
                changed since this object was created, on this rank.
        """
        size, rank = world_size_and_rank(None, "Trainer")
        if (rank, size) != (self.rank, self.world_size):
            raise UsageError(
                f"the trainer was created as rank {self.rank} of {self.world_size}, but this is "
                f"rank {rank} of {size}: create it after the process group, within "
                "phalanx.init(), and create a new one for a new group"
            )
        parameters = {
            name: f"parameter {describe_tensor(it)}{'' if it.requires_grad else ', frozen'}"
            for name, it in self.inner.named_parameters()
        }
        self._check_equal(parameters | self._buffers())

    def _buffers(self) -> dict[str, str]:
        return {name: f"buffer {describe_tensor(it)}" for name, it in self.inner.named_buffers()}

    def _check_equal(self, own: dict[str, str]) -> None:
        """Raise UsageError on all ranks unless `own` is equal on all, including the order."""
        digest = zlib.crc32(repr(own).encode())
        if len(set(self.gather(digest))) == 1:
            return
        first, *others = self.gather(list(own.items()))
        differences = [
            f"{name} is {dict(first).get(name, 'missing')} on rank 0 and "
            f"{dict(other).get(name, 'missing')} on rank {rank}"
            for rank, other in enumerate(others, 1)
            for name in dict(first) | dict(other)
            if dict(first).get(name) != dict(other).get(name)
        ]
        differences = differences or ["the names are in a different order"]
        more = (
            f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        )
        raise UsageError(
            f"{type(self.inner).__name__} differs between ranks: "
            f"{'; '.join(differences[:_MAX_LISTED])}{more}. Build the same model on all ranks"
        )

    def synchronize(self) -> None:
        """Broadcast rank 0's buffers and, unless a wrapper has already done so, its parameters."""
        if self.world_size > 1 and not self.is_wrapped:
            self._broadcast([parameter.detach() for parameter in self.inner.parameters()])
        self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers (running means), as DDP does before each step."""
        if self.world_size > 1:
            self._check_equal(self._buffers())  # a forward pass may have changed their shapes
            self._broadcast(list(self.inner.buffers()))

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, src=0)
            if dense is not tensor:
                tensor.copy_(dense)

    def backward_context(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward and backward of a micro-batch.

        In the context a wrapper communicates only for the last micro-batch of the step.
        """
        if self.is_wrapped and not is_last:
            uncompiled: Any = self._uncompiled
            context: contextlib.AbstractContextManager[None] = uncompiled.no_sync()
            return context
        return contextlib.nullcontext()

    def average(self) -> None:
        """Average the gradients over the ranks of a step, unless the model does so itself."""
        if self.step_size > 1 and not self.is_wrapped:
            average_gradients(self.inner, self._step_group)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks, computed in float64 and bitwise equal on every rank."""
        return self._sum(values, self.world_size, None)

    def sum_of_step(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks of a step."""
        return self._sum(values, self.step_size, self._step_group)

    def _sum(
        self, values: Sequence[float], size: int, group: dist.ProcessGroup | None
    ) -> list[float]:
        if size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._exchange_device)
        dist.all_reduce(total, group=group)
        sums: list[float] = total.tolist()
        return sums

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank. Collective."""
        return _gather(value, self.world_size, None)

    def gather_of_step(self, value: object) -> list[Any]:
        """Return the values of the ranks of a step. Collective among them."""
        return _gather(value, self.step_size, self._step_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner module, under its own names even if wrapped. Collective."""
        state = self._uncompiled.state_dict()
        return {
            name.removeprefix(_PREFIX) if self.is_wrapped else name: state[name] for name in state
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`, whether or not its model was wrapped. Collective."""
        if self.is_wrapped:
            state = {_PREFIX + name: value for name, value in state.items()}
        self._uncompiled.load_state_dict(state)


def _gather(value: object, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def describe_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape as text, such as float32[3, 4]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
