"""The agreement of all ranks before each optimizer step, in one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.errors import UsageError
from phalanx.train.replicas import Replicas

__all__ = ["Agreed", "Agreement", "Totals", "check_names"]


@dataclass
class Totals:
    """Weighted sums of the values that the loss function returned, accumulated over batches."""

    sums: dict[str, float] = field(default_factory=dict)
    """The sum of each value by name; "loss" comes first."""
    others: list[str] | None = None
    """The names in a batch that differ from those of the first batch; None if all batches agree."""

    @property
    def names(self) -> list[str]:
        """The names in the first batch; empty if there was no batch."""
        return list(self.sums)

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Add the means over a batch, multiplied by its weight."""
        if self.sums and values.keys() != self.sums.keys():
            self.others = list(values)
            return
        for name, value in values.items():
            # A filler batch of weight 0 does not count, even if its value is NaN.
            self.sums[name] = self.sums.get(name, 0.0) + (value * weight if weight else 0.0)


@dataclass(frozen=True)
class Agreed:
    """The values that all ranks share before an optimizer step."""

    metrics: dict[str, float]
    """Means over the step's samples: "loss" and the metrics that the loss function returned."""
    finite: bool
    """True if the loss and all checked gradients are finite on all ranks."""
    stop: bool
    """True if a rank has been asked to stop."""


class Agreement:
    """The exchange of totals and flags between ranks, whose metrics must have the same names.

    Ranks exchange the names once, in the first step. In later steps a rank whose names differ sets
    a flag in the all-reduce. Sums by position are therefore sums by name.

    Args:
        replicas: The ranks of the model.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] | None = None

    def reach(self, totals: Totals, found: str, *, asked: bool, when: str) -> Agreed:
        """Return the values that all ranks agree on. Collective.

        Args:
            totals: The totals of this rank's micro-batches.
            found: The names of this rank's parameters whose gradient is not finite; empty if none.
            asked: True if this rank has been asked to stop.
            when: A description of the step, for messages.

        Raises:
            UsageError: The names of the metrics differ. Every rank raises it.
        """
        if self._names is None:
            check_names(self._every(totals), when)
            self._names = totals.names
        strange = totals.others is not None or totals.names != self._names
        values = [totals.sums.get(name, 0.0) for name in self._names]
        *sums, bad, stops, strangers = self._replicas.sum([*values, bool(found), asked, strange])
        if strangers:
            check_names(self._every(totals), when, self._names)
        metrics = dict(zip(self._names, sums, strict=True))
        return Agreed(metrics, not bad and math.isfinite(metrics["loss"]), stops > 0)

    def _every(self, totals: Totals) -> list[Totals]:
        names = Totals(dict.fromkeys(totals.names, 0.0), totals.others)
        return self._replicas.collect(names)

    def blame(self, loss: float, found: str, *, when: str, why: str = "") -> None:
        """Raise an error on every rank that lists the values that are not finite. Collective.

        Args:
            loss: This rank's loss.
            found: As in `reach`.
            when: A description of the step, for messages.
            why: Text to append to the statement that the step was not made.

        Raises:
            FloatingPointError: Always.
        """
        own = "" if math.isfinite(loss) else f"the loss is {loss}"
        if found:
            own += f"{', and ' if own else ''}the gradient of {found} isn't finite"
        every = self._replicas.collect(own)
        words = "; ".join(f"on rank {rank} {text}" for rank, text in enumerate(every) if text)
        raise FloatingPointError(
            f"{when}: {words or 'loss or gradients of all ranks together are not finite'}. "
            f"The step was not made{why}. Look at that rank's batch, lower the learning rate, clip "
            "gradients (clip=1.0), or find the operation with "
            "torch.autograd.set_detect_anomaly(True)"
        )


def check_names(every: Sequence[Totals], when: str, before: Sequence[str] = ()) -> None:
    """Check that the metrics of all ranks have the same names.

    A rank that had no batch has no names and is ignored.

    Args:
        every: The totals of each rank.
        when: A description of the step or the evaluation, for messages.
        before: The names that the ranks agreed on earlier; empty if there are none.

    Raises:
        UsageError: The names differ between ranks, between batches of one rank, or from `before`.
    """
    known = {tuple(names) for names in (before, *(totals.names for totals in every)) if names}
    if len(known) <= 1 and all(totals.others is None for totals in every):
        return
    ranks: dict[str, list[str]] = {}
    for rank, totals in enumerate(every):
        words = _listed(totals.names)
        if totals.others is not None:
            words += f", then {_listed(totals.others)}"
        if totals.names:
            ranks.setdefault(words, []).append(str(rank))
    said = "; ".join(f"{words} on rank {', '.join(those)}" for words, those in ranks.items())
    earlier = f"; {_listed(before)} before" if before else ""
    raise UsageError(
        f"{when}: the loss function returned the metrics {said}{earlier}; expected the same names "
        "on all ranks, each time: return a metric always or never"
    )


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(name for name in names if name != 'loss') or 'none'})"
