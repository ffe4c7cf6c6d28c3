"""Actions that succeed on all ranks or fail on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import CheckpointError, UsageError

Value = TypeVar("Value")
# Bytes per broadcast.
_BROADCAST_BYTES = 64 * 2**20


class UnusableCheckpoint(CheckpointError):  # noqa: N818 - the name describes the checkpoint
    """Raised if a checkpoint is unusable; an older one may be usable."""


class RankGroup:
    """The ranks of a group, or this process alone if there is no group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        is_single = group is None and not dist.is_initialized()
        self.rank = 0 if is_single else dist.get_rank(group)
        self.size = 1 if is_single else dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError(
                f"rank {dist.get_rank()} is not a member of the group given: call this only on the "
                "ranks of the group"
            )

    @classmethod
    def alone(cls) -> RankGroup:
        """Return the group of this process alone, even if there is a process group."""
        ranks = cls.__new__(cls)
        ranks._group, ranks.rank, ranks.size = None, 0, 1
        return ranks

    def run_and_gather(self, action: Callable[[], Value]) -> list[Value]:
        """Run an action on every rank, and return the results of all ranks, by rank. Collective.

        Raises:
            CheckpointError: The action failed on some rank. Every rank raises it, with the messages
                of all ranks that failed.
            UsageError: The same, if every failure is a UsageError.
        """
        return self._run(action, lambda value: value)[1]

    def run_on_all(self, action: Callable[[], Value]) -> Value:
        """Run an action on every rank, and return the result of this rank. Collective.

        Raises:
            CheckpointError, UsageError: As `run_and_gather`.
        """
        return self._run(action, lambda _: None)[0]

    def run_on_first(self, action: Callable[[], Value]) -> Value:
        """Run an action on rank 0 alone, and return its result on all ranks. Collective.

        Raises:
            CheckpointError, UsageError: As `run_and_gather`.
        """
        results: list[Any] = self.run_and_gather(lambda: action() if self.rank == 0 else None)
        first: Value = results[0]
        return first

    def broadcast(self, content: Tensor | None, length: int, source: int) -> Tensor:
        """Broadcast a uint8[length] from rank `source`, and return it on all ranks. Collective."""
        if content is None:
            content = torch.empty(length, dtype=torch.uint8, device="cpu")
        if self.size == 1:
            return content
        device = self._device()
        for start in range(0, length, _BROADCAST_BYTES):
            chunk = content[start : start + _BROADCAST_BYTES]
            on_device = chunk.to(device)
            dist.broadcast(on_device, group=self._group, group_src=source)
            if on_device is not chunk:
                chunk.copy_(on_device)
        return content

    def _run(
        self, action: Callable[[], Value], summarize: Callable[[Value], Any]
    ) -> tuple[Value, list[Any]]:
        """Run an action, and exchange `summarize(value)` of its value between the ranks."""
        cause: Exception | None = None
        try:
            value = action()
            result = summarize(value)
        except Exception as error:  # noqa: BLE001 - raised below, after the exchange
            cause, result = error, _to_known_error(error)
        results = self._exchange(result)
        failures = {
            rank: failure for rank, failure in enumerate(results) if isinstance(failure, Exception)
        }
        if failures:
            # The messages of known errors are in the raised one; only a bug needs its traceback.
            is_known = isinstance(cause, (CheckpointError, UsageError))
            raise self._merge_failures(failures) from (
                cause.__cause__ if cause and is_known else cause
            )
        return value, results

    def _device(self) -> torch.device:
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _exchange(self, result: Any) -> list[Any]:
        if self.size == 1:
            return [result]
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, result, group=self._group)
        return results

    def _merge_failures(self, failures: dict[int, Exception]) -> Exception:
        kinds = {type(failure) for failure in failures.values()}
        # An older checkpoint helps only if every failure is an UnusableCheckpoint.
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError
        messages: dict[str, list[str]] = {}
        for rank, failure in failures.items():
            messages.setdefault(str(failure), []).append(str(rank))
        if len(failures) == self.size and len(messages) == 1:
            return kind(*messages)
        return kind(
            "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in messages.items())
        )


def _to_known_error(error: Exception) -> Exception:
    """Return an error that can be sent to the other ranks."""
    for kind in (UnusableCheckpoint, CheckpointError, UsageError):
        if isinstance(error, kind):
            return kind(str(error))
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return CheckpointError(f"{error.strerror or error}{file}")
    return CheckpointError(f"{type(error).__name__}: {error}")
