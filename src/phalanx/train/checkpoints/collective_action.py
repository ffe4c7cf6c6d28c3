"""Actions that succeed on all ranks or fail on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import CheckpointError, UsageError

__all__ = ["BadCheckpoint", "Peers"]

Value = TypeVar("Value")
# Bytes per broadcast.
_CHUNK = 64 * 2**20


class BadCheckpoint(CheckpointError):  # noqa: N818 - the name describes the checkpoint
    """Raised if a checkpoint is unusable; an older one may be usable."""


@dataclass(frozen=True)
class _Failure:
    kind: type[Exception]
    words: str


class Peers:
    """The ranks of a group, or this process alone if there is no group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        alone = group is None and not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError(
                f"rank {dist.get_rank()} isn't in the group given, expected one of its ranks: "
                "call this on the ranks of the group alone"
            )

    def gather(self, action: Callable[[], Value]) -> list[Value]:
        """Run an action on every rank, and return the results of all ranks, by rank. Collective.

        Raises:
            CheckpointError: The action failed on some rank. Every rank raises it, with the messages
                of all ranks that failed.
            UsageError: The same, if every failure is a UsageError.
        """
        return self._run(action, lambda value: value)[1]

    def together(self, action: Callable[[], Value]) -> Value:
        """Run an action on every rank, and return the result of this rank. Collective.

        Raises:
            CheckpointError, UsageError: As `gather`.
        """
        return self._run(action, lambda _: None)[0]

    def on_first(self, action: Callable[[], Value]) -> Value:
        """Run an action on rank 0 alone, and return its result on all ranks. Collective.

        Raises:
            CheckpointError, UsageError: As `gather`.
        """
        answers: list[Any] = self.gather(lambda: action() if self.rank == 0 else None)
        first: Value = answers[0]
        return first

    def share(self, content: Tensor | None, length: int, source: int) -> Tensor:
        """Broadcast a uint8[length] from rank `source`, and return it on all ranks. Collective."""
        if content is None:
            content = torch.empty(length, dtype=torch.uint8)
        if self.size == 1:
            return content
        device = self._device()
        for start in range(0, length, _CHUNK):
            chunk = content[start : start + _CHUNK]
            travelling = chunk.to(device)
            dist.broadcast(travelling, group=self._group, group_src=source)
            if travelling is not chunk:
                chunk.copy_(travelling)
        return content

    def _run(
        self, action: Callable[[], Value], words: Callable[[Value], Any]
    ) -> tuple[Value, list[Any]]:
        """Run an action, and exchange `words(value)` of its value between the ranks."""
        cause: Exception | None = None
        try:
            value = action()
            answer = words(value)
        except Exception as error:  # noqa: BLE001 - raised below, after the exchange
            cause, answer = error, _failure(error)
        answers = self._exchange(answer)
        failures = {rank: it for rank, it in enumerate(answers) if isinstance(it, _Failure)}
        if failures:
            # The messages of known errors are in the raised one; only a bug needs its traceback.
            known = isinstance(cause, (CheckpointError, UsageError))
            raise self._error(failures) from (cause.__cause__ if cause and known else cause)
        return value, answers

    def _device(self) -> torch.device:
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _exchange(self, answer: Any) -> list[Any]:
        if self.size == 1:
            return [answer]
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=self._group)
        return answers

    def _error(self, failures: dict[int, _Failure]) -> Exception:
        kinds = {failure.kind for failure in failures.values()}
        # An older checkpoint helps only if every failure is a BadCheckpoint.
        kind = kinds.pop() if len(kinds) == 1 else CheckpointError
        words: dict[str, list[str]] = {}
        for rank, failure in failures.items():
            words.setdefault(failure.words, []).append(str(rank))
        if len(failures) == self.size and len(words) == 1:
            return kind(*words)
        return kind("; ".join(f"rank {', '.join(ranks)}: {it}" for it, ranks in words.items()))


def _failure(error: Exception) -> _Failure:
    for kind in (BadCheckpoint, CheckpointError, UsageError):
        if isinstance(error, kind):
            return _Failure(kind, str(error))
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        return _Failure(CheckpointError, f"{error.strerror or error}{place}")
    return _Failure(CheckpointError, f"{type(error).__name__}: {error}")
