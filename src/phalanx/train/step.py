"""The parts of an optimizer step: backward pass, agreement of the ranks, and update.

`Stepper` has the precision, the backward pass and the update, with clipping. `FiniteCheck` finds
gradients that are not finite. `StepSync` exchanges totals and flags between all ranks before the
update, in one small all-reduce.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.train.replicas import Replicas

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class FiniteCheck:
    """A check for parameters whose gradient on this rank is not finite.

    The check must precede the averaging, which spreads the NaN of one rank to all. A hook therefore
    sums each gradient as soon as backward has computed it, while it is still in the cache. NaN and
    infinity carry over to the sum.

    Args:
        model: The module whose parameters are checked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: list[tuple[str, Tensor]] = []
        self._handles = [
            parameter.register_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _hook(self, name: str) -> Any:
        def sum_gradient(gradient: Tensor) -> None:
            is_half_precision = gradient.dtype in _DTYPES.values()  # the sum could overflow
            total = gradient.sum(dtype=torch.float32) if is_half_precision else gradient.sum()
            self._sums.append((name, total))

        return sum_gradient

    def pop_non_finite(self) -> str:
        """Return the names of parameters with a gradient that is not finite, and reset the check.

        The result covers the gradients since the last call. It is empty if all are finite.
        """
        sums, self._sums = self._sums, []
        if not sums:
            return ""
        finite = torch.stack([total.detach().abs().float() for _, total in sums]).isfinite()
        if finite.all():
            return ""
        bad = [
            name
            for (name, _), is_finite in zip(sums, finite.tolist(), strict=True)
            if not is_finite
        ]
        names = sorted(set(bad), key=bad.index)  # backward order: the first is the cause
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class Stepper:
    """The precision of the forward pass, the backward pass, and the optimizer step.

    Args:
        model: The wrapper, or the plain module.
        optimizer: The optimizer of the model's parameters.
        precision: None, "bfloat16", or "float16", which scales the loss.
        clip: The maximum norm of all gradients together; None disables clipping.
        device: The device of the parameters.

    Raises:
        UsageError: The precision is unknown, or `clip` is not above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: str | None,
        clip: float | None,
        device: torch.device,
    ) -> None:
        if precision is not None and precision not in _DTYPES:
            raise UsageError(
                f"precision is {precision!r}, expected None (that of the parameters), 'bfloat16' "
                "or 'float16'"
            )
        if clip is not None and not clip > 0:
            raise UsageError(f"clip is {clip}, expected a norm above 0, or None")
        self.model, self.optimizer, self._clip, self._device = model, optimizer, clip, device
        self._dtype = None if precision is None else _DTYPES[precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for a forward pass."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss, which accumulates gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> bool:
        """Clip the gradients, make the optimizer step, and release the gradients.

        Returns:
            True if the optimizer made the step. The float16 scaler skips a step and reduces the
            scale if the gradients, averaged over the ranks, are not finite.
        """
        previous_scale = self.scaler.get_scale()
        if self._clip is not None:
            self.scaler.unscale_(self.optimizer)
            self._clip_gradients(self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale() >= previous_scale

    def _clip_gradients(self, max_norm: float) -> None:
        # A model whose gradients are sharded over ranks clips them itself.
        clip_own = getattr(self.model, "clip_grad_norm_", None)
        if clip_own is not None:
            clip_own(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


@dataclass
class Totals:
    """Weighted sums of the values that the loss function returned, accumulated over batches."""

    sums: dict[str, float] = field(default_factory=dict)
    """The sum of each value by name; "loss" comes first."""
    weight: float = 0.0
    """The sum of the weights."""
    mismatched_names: list[str] | None = None
    """The names in a batch that differ from those of the first batch; None if all batches agree."""

    @property
    def names(self) -> list[str]:
        """The names in the first batch; empty if there was no batch."""
        return list(self.sums)

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Add the means over a batch, multiplied by its weight."""
        if self.sums and values.keys() != self.sums.keys():
            self.mismatched_names = list(values)
            return
        self.weight += weight
        for name, value in values.items():
            # A filler batch of weight 0 does not count, even if its value is NaN.
            self.sums[name] = self.sums.get(name, 0.0) + (value * weight if weight else 0.0)


@dataclass(frozen=True)
class SyncResult:
    """The values that the ranks of a step share before the optimizer makes it."""

    metrics: dict[str, float]
    """Means over the step's samples: "loss" and the metrics that the loss function returned."""
    is_finite: bool
    """True if the loss and all checked gradients are finite on these ranks."""
    stop_requested: bool
    """True if a rank has been asked to stop."""


class StepSync:
    """The exchange of totals and flags between the ranks of a step.

    Their metrics must have the same names.

    Ranks exchange the names once, in the first step. In later steps a rank whose names differ sets
    a flag in the all-reduce. Sums by position are therefore sums by name.

    Args:
        replicas: The ranks of the model.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] | None = None

    def synchronize(
        self, totals: Totals, non_finite: str, *, stop_requested: bool, step: str
    ) -> SyncResult:
        """Exchange this step's totals and flags, and return the values of all ranks. Collective.

        Args:
            totals: The totals of this rank's micro-batches.
            non_finite: The names of this rank's parameters whose gradient is not finite; empty if
                none.
            stop_requested: True if this rank has been asked to stop.
            step: A description of the step, for messages.

        Raises:
            UsageError: The names of the metrics differ. Every rank raises it.
        """
        if self._names is None:
            check_metric_names(self._gather_names(totals), step)
            self._names = totals.names
        is_mismatched = totals.mismatched_names is not None or totals.names != self._names
        values = [totals.sums.get(name, 0.0) for name in self._names]
        *sums, weight, non_finite_ranks, stop_requests, mismatches = self._replicas.sum_of_step(
            [*values, totals.weight, bool(non_finite), stop_requested, is_mismatched]
        )
        if self._replicas.local is not None:  # these ranks have only a part of the step's samples
            sums = [each / weight if weight else math.nan for each in sums]
        if mismatches:
            check_metric_names(self._gather_names(totals), step, self._names)
        metrics = dict(zip(self._names, sums, strict=True))
        return SyncResult(
            metrics, not non_finite_ranks and math.isfinite(metrics["loss"]), stop_requests > 0
        )

    def _gather_names(self, totals: Totals) -> list[Totals]:
        names = Totals(dict.fromkeys(totals.names, 0.0), mismatched_names=totals.mismatched_names)
        return self._replicas.gather_of_step(names)

    def raise_non_finite(
        self, loss: float, non_finite: str, *, step: str, reason: str = ""
    ) -> None:
        """Raise an error on every rank that lists the values that are not finite. Collective.

        Args:
            loss: This rank's loss.
            non_finite: As in `synchronize`.
            step: A description of the step, for messages.
            reason: Text to append to the statement that the step was not made.

        Raises:
            FloatingPointError: Always.
        """
        problem = "" if math.isfinite(loss) else f"the loss is {loss}"
        if non_finite:
            problem += f"{', and ' if problem else ''}the gradient of {non_finite} is not finite"
        problems = self._replicas.gather_of_step(problem)
        description = "; ".join(
            f"on rank {rank} {text}" for rank, text in enumerate(problems) if text
        )
        raise FloatingPointError(
            f"{step}: {description or 'loss or gradients of all ranks together are not finite'}. "
            f"The step was not made{reason}. Look at that rank's batch, lower the learning rate, "
            "clip gradients (clip=1.0), or find the operation with "
            "torch.autograd.set_detect_anomaly(True)"
        )


def check_metric_names(
    totals_by_rank: Sequence[Totals], step: str, previous: Sequence[str] = ()
) -> None:
    """Check that the metrics of all ranks have the same names.

    A rank that had no batch has no names and is ignored.

    Args:
        totals_by_rank: The totals of each rank.
        step: A description of the step or the evaluation, for messages.
        previous: The names that the ranks agreed on earlier; empty if there are none.

    Raises:
        UsageError: The names differ between ranks, between batches of one rank, or from `previous`.
    """
    name_lists = {
        tuple(names) for names in (previous, *(totals.names for totals in totals_by_rank)) if names
    }
    if len(name_lists) <= 1 and all(totals.mismatched_names is None for totals in totals_by_rank):
        return
    ranks: dict[str, list[str]] = {}
    for rank, totals in enumerate(totals_by_rank):
        description = _format_names(totals.names)
        if totals.mismatched_names is not None:
            description += f", then {_format_names(totals.mismatched_names)}"
        if totals.names:
            ranks.setdefault(description, []).append(str(rank))
    listing = "; ".join(
        f"{description} on rank {', '.join(numbers)}" for description, numbers in ranks.items()
    )
    earlier = f"; {_format_names(previous)} before" if previous else ""
    raise UsageError(
        f"{step}: the loss function returned the metrics {listing}{earlier}; expected the same "
        "names on all ranks, each time: return a metric always or never"
    )


def _format_names(names: Sequence[str]) -> str:
    return f"({', '.join(name for name in names if name != 'loss') or 'none'})"
