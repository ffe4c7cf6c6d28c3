"""What ranks agree on before each step of the optimizer, in one small all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.errors import UsageError
from phalanx.train.replicas import Replicas

__all__ = ["Agreed", "Agreement", "Totals", "check_names"]


@dataclass
class Totals:
    """Weighted sums of what a loss function returned, batch by batch."""

    sums: dict[str, float] = field(default_factory=dict)
    """By name; "loss" first."""
    others: list[str] | None = None
    """The names of a batch whose names weren't those of the first one."""

    @property
    def names(self) -> list[str]:
        """Those of the first batch; empty if there was none."""
        return list(self.sums)

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Take in the means over a batch."""
        if self.sums and values.keys() != self.sums.keys():
            self.others = list(values)
            return
        for name, value in values.items():
            # A sample that only makes up the number doesn't count, even if it is NaN.
            self.sums[name] = self.sums.get(name, 0.0) + (value * weight if weight else 0.0)


@dataclass(frozen=True)
class Agreed:
    """What all ranks know, before they make a step."""

    metrics: dict[str, float]
    """Means over the step's samples: "loss", and what else the loss function returned."""
    finite: bool
    """Whether the loss, and the gradients that were looked at, are finite on all ranks."""
    stop: bool
    """Whether a rank has been asked to stop."""


class Agreement:
    """Exchanges totals and flags of all ranks, whose metrics must have the same names.

    Names are exchanged once, in the first step. After that a rank with other ones says so in the
    place of a number, so that sums by position are sums by name.

    Args:
        replicas: The ranks.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] | None = None

    def reach(self, totals: Totals, found: str, *, asked: bool, when: str) -> Agreed:
        """Return what the ranks agree on; collective.

        Args:
            totals: Of this rank's micro-batches.
            found: This rank's parameters of which a gradient isn't finite.
            asked: Whether this rank has been asked to stop.
            when: The step, in words.

        Raises:
            UsageError: Metrics of other names, on every rank.
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
        """Raise, on every rank, what each of them found that isn't finite; collective.

        Args:
            loss: This rank's.
            found: As in `reach`.
            when: The step, in words.
            why: What else is to be said.

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
    """Compare the names of all ranks' metrics; ranks that had no batch have none.

    Args:
        every: The totals of each rank.
        when: What they are of, in words.
        before: Names that were agreed on before; empty if there are none.

    Raises:
        UsageError: They differ between ranks, between batches of one, or from those before.
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
