"""Evaluation: the means of loss and metrics over a data set, with each sample counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phalanx.data import EvaluationSampler
from phalanx.errors import UsageError
from phalanx.train.batch_schedule import make_loader
from phalanx.train.replicas import Replicas
from phalanx.train.step import Totals, check_metric_names

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]
"""A function of the model and a batch.

It returns the mean loss over the batch, or a pair of that and the means of metrics by name.
"""


class Evaluation:
    """A data set to evaluate on.

    It is neither padded nor truncated, so the result does not depend on the number of ranks.

    Args:
        data: The data set.
        batch: Number of samples in a batch on one rank.
        loss: The loss function, as for training.
        loader: Arguments for `DataLoader`.
    """

    def __init__(
        self, data: Dataset[Any], batch: int, loss: Loss, loader: Mapping[str, Any]
    ) -> None:
        self._data, self._batch, self._loss = data, batch, loss
        self._indices = list(EvaluationSampler(data))
        self._options = loader

    def run(
        self, replicas: Replicas, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """Return the means of loss and metrics over all samples, on every rank. Collective.

        Args:
            replicas: The model on all ranks.
            autocast: A function that returns the autocast context of a forward pass, as in
                training.

        Raises:
            UsageError: The names of the metrics differ between batches.
        """
        totals, count = Totals(), 0
        replicas.broadcast_buffers()
        # Use the inner module: a wrapper's forward may run collectives, and the number of batches
        # differs between ranks.
        with evaluating(replicas.inner), torch.no_grad():
            for content, size in self._batches():
                batch = move_to_device(content, replicas.device)
                with autocast():
                    loss, metrics = unpack_loss(self._loss(replicas.inner, batch))
                totals.add({"loss": loss.item(), **metrics}, size)
                count += size
        parts = replicas.gather((totals, count))
        # A rank without samples has no names.
        with_samples = [totals_of_rank for totals_of_rank, size in parts if size]
        check_metric_names([totals_of_rank for totals_of_rank, _ in parts], "evaluation")
        samples = sum(size for _, size in parts)
        return {
            name: sum(totals_of_rank.sums[name] for totals_of_rank in with_samples) / samples
            for name in with_samples[0].names
        }

    def _batches(self) -> Iterator[tuple[Any, int]]:
        """Yield the batches of this rank's samples with their sizes; the last may be smaller."""
        indices, size = self._indices, self._batch
        parts = [indices[first : first + size] for first in range(0, len(indices), size)]
        loader = make_loader(self._data, parts, torch.Generator(), self._options)
        for content, part in zip(loader, parts, strict=True):
            yield content, len(part)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and restore the mode of each one on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def unpack_loss(result: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and the metrics contained in the result of a loss function.

    Raises:
        UsageError: The result is neither a tensor of one element nor a pair of such a tensor and a
            dict of numbers, or a metric is called "loss".
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        shown = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"the loss function returned {shown}, expected a tensor of one element, the mean over "
            "the batch, or a pair of it and a dict of metrics"
        )
    if "loss" in metrics:
        raise UsageError("the loss function returned a metric called loss: give it another name")
    try:
        return loss, {str(name): float(value) for name, value in sorted(metrics.items())}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the loss function returned metrics that are not numbers: {error}"
        ) from None


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors moved to a device, including those in nested containers."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: move_to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [move_to_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
