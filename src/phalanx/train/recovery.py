"""The recovery of a training after ranks are lost: newcomers, and the state that all take over.

All ranks then have the state of the rank that has come furthest: a rank may have completed the step
in which another one failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx import env
from phalanx.errors import PhalanxError, UsageError
from phalanx.parallel import SharedDataParallel
from phalanx.torch_versions import world
from phalanx.train.trees import broadcast_tree

NEWCOMER = -1
"""The progress of a process that has no whole state, such as one that has joined."""

_LOOK_SECONDS = 1.0
"""The time between two looks for newcomers, in seconds."""
_logger = logging.getLogger("phalanx")


class NewcomersWait(Exception):  # noqa: N818 - no error
    """Processes wait to join the training."""


class Recovery:
    """The recovery of a training on the default group.

    Args:
        owner: The name of the class that uses it, for messages.
        min_ranks: The least number of ranks.
        wait: The time to wait for newcomers after a loss, in seconds.

    Raises:
        UsageError: An argument is wrong.
    """

    def __init__(self, owner: str, min_ranks: int, wait: float) -> None:
        check_number(owner, "min_ranks", min_ranks, int, 1)
        check_number(owner, "wait", wait, (int, float), 0)
        self._min_ranks = min_ranks
        self._wait = wait
        self._next_look = 0.0

    def run(
        self,
        train: Callable[[int | None], None],
        own: int | None,
        progress: Callable[[], int | None],
    ) -> None:
        """Train until that ends without the loss of a rank.

        Args:
            train: Trains from the furthest progress of all ranks; called with that of this rank.
            own: The progress of this rank now.
            progress: Returns the progress of this rank after a loss.
        """
        if (group := _default_group()) is not None:
            group.accept_newcomers()
        while True:
            failure: PhalanxError | None = None
            try:
                train(own)
            except NewcomersWait:
                pass
            except Exception as error:
                failure = find_loss(error)
                if failure is None:
                    raise
            else:
                return
            self.replace(failure)
            own = progress()

    def has_newcomers(self) -> bool:
        """Return whether processes wait to join, as rank 0 sees it; the others see False."""
        group = _default_group()
        if group is None or dist.get_rank() != 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        found: bool = group.has_newcomers()
        return found

    def replace(self, error: PhalanxError | None) -> None:
        """Continue with the ranks that are left and newcomers.

        Args:
            error: The loss; None if newcomers are the reason.

        Raises:
            PhalanxError: The same error, if too few ranks are left.
        """
        _leave_other_groups()
        change = phalanx.replace(wait=self._wait)
        _logger.warning(
            "[rank %d/%d] continues%s",
            change.rank,
            change.world_size,
            " with newcomers" if error is None else f" after: {error}",
        )
        if change.world_size < self._min_ranks and error is not None:
            raise error.replace(
                f"{error}; {change.world_size} ranks are left, expected at least "
                f"{self._min_ranks} (min_ranks)"
            )


def find_loss(error: BaseException) -> PhalanxError | None:
    """Return the loss of a rank that an exception reports; None if it reports something else."""
    group = _default_group()
    loss: PhalanxError | None = None if group is None else group.find_loss(error)
    if loss is not None:
        error.__traceback__ = None  # its frames keep the tensors of the step
    return loss


def _leave_other_groups() -> None:
    """Leave all groups but the default one: in these, others may wait for this rank."""
    groups = list(world().pg_map)
    for group in groups if is_distributed() else ():
        if group is not dist.group.WORLD:
            group.abort()  # what others wait for in it fails like an operation with a lost rank
            dist.destroy_process_group(group)


def _default_group() -> Any:
    """Return the default group if it is one of Phalanx, else None."""
    group = dist.group.WORLD if is_distributed() else None
    return group if hasattr(group, "accept_newcomers") else None


def progress_at_start() -> int | None:
    """Return the progress at the start: `NEWCOMER` in a process that has joined, else None."""
    return NEWCOMER if env.is_newcomer() else None


def has_begun(progress: int | None) -> bool:
    """Return whether the training has begun on any rank, even if its state is lost. Collective.

    Args:
        progress: The progress of this rank; None if it has none yet.
    """
    return max(gather(_rank_progress(progress))) != 0


def _rank_progress(progress: int | None) -> int:
    """Return a number by which the progress of ranks is compared; 0 if this one has not begun."""
    return 0 if progress is None else progress if progress == NEWCOMER else progress + 1


def find_furthest(progress: int | None) -> list[bool]:
    """Return, by rank, whether it has come as far as any other. Collective.

    Args:
        progress: The progress of this rank; None if it has not begun.

    Raises:
        PhalanxError: No rank has the whole state.
    """
    numbers = gather(_rank_progress(progress))
    if max(numbers) == NEWCOMER:
        raise PhalanxError(
            "no rank has the whole state of the training: those that are left had not begun the "
            "optimizer's step that a lost one had begun; start again from a checkpoint"
        )
    return [number == max(numbers) for number in numbers]


def share_furthest(progress: int | None, capture: Callable[[], Any]) -> Any:
    """Return the state of the rank that has come furthest, or None if this rank keeps its own.

    Collective. The tensors of the state are broadcast one by one.

    Args:
        progress: The progress of this rank; None if it has not begun.
        capture: Returns the state of this rank: nested containers of tensors and other values.
    """
    is_furthest = find_furthest(progress)
    # At the start all have equal progress, and take over the state of rank 0.
    if len(is_furthest) == 1 or (all(is_furthest) and progress is not None):
        return None
    source, rank = is_furthest.index(True), dist.get_rank()
    state = broadcast_tree(capture() if rank == source else None, source)
    return None if rank == source or (is_furthest[rank] and progress is not None) else state


def gather(own: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the numbers of all ranks."""
    if not is_distributed():
        return [own]
    numbers = [
        torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(numbers, torch.tensor([own], device="cpu"), group=group)
    return [int(each) for each in numbers]


def is_distributed() -> bool:
    """Return whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def check_number(owner: str, name: str, value: object, kinds: Any, least: int) -> None:
    """Raise UsageError unless a value is a finite number of a kind, and not too small."""
    if not (isinstance(value, kinds) and least <= value < math.inf):
        raise UsageError(f"{owner}: {name} is {value!r}, expected a number from {least} on")


def check_model(owner: str, model: nn.Module) -> None:
    """Raise UsageError for a wrapper whose state ranks can't take over."""
    if isinstance(model, SharedDataParallel) and not model.elastic:
        raise UsageError(f"{owner}: a SharedDataParallel without elastic=True given, expected it")
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"{owner}: a model in DistributedDataParallel given, expected the plain module"
        )
