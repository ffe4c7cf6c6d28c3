"""How rows are updated: the rules of `torch.optim` for sparse gradients, on the rows alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from phalanx.errors import UsageError

__all__ = ["SGD", "Adagrad", "Adam", "Rule"]


@dataclass(frozen=True)
class Rule:
    """What all rules have; `state` names what is kept for each row, of the row's own shape."""

    number: ClassVar[int]
    state: ClassVar[tuple[str, ...]]
    lr: float

    def factors(self) -> tuple[float, float, float, float, float]:
        """Learning rate, its decay, epsilon, and the two betas, as the core takes them."""
        return self.lr, 0.0, 0.0, 0.0, 0.0

    def _check(self, **least: float) -> None:
        for name, value in {"lr": self.lr, **least}.items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{type(self).__name__}: {name}={value} given, expected 0 or more")


@dataclass(frozen=True)
class SGD(Rule):
    """`torch.optim.SGD` without momentum, which has no meaning for rows that are seldom met.

    Args:
        lr: The learning rate.

    Raises:
        UsageError: A factor below 0, or not finite.
    """

    number = 0
    state = ()
    lr: float = 1e-3

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True)
class Adagrad(Rule):
    """`torch.optim.Adagrad` on sparse gradients.

    Args:
        lr: The learning rate.
        lr_decay: Its decay: in step n it is `lr / (1 + (n - 1) * lr_decay)`.
        initial_accumulator_value: What the sums of squares begin with.
        eps: Added to their root.

    Raises:
        UsageError: A factor below 0, or not finite.
    """

    number = 1
    state = ("sum",)
    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        initial = self.initial_accumulator_value
        self._check(lr_decay=self.lr_decay, initial_accumulator_value=initial, eps=self.eps)

    def factors(self) -> tuple[float, float, float, float, float]:
        """As for all rules."""
        return self.lr, self.lr_decay, self.eps, 0.0, 0.0


@dataclass(frozen=True)
class Adam(Rule):
    """`torch.optim.SparseAdam`: moments move with the rows that are met, steps count for all.

    Args:
        lr: The learning rate.
        betas: How much of the first and of the second moment stays, each in [0, 1).
        eps: Added to the root of the second.

    Raises:
        UsageError: A factor below 0, not finite, or a beta of 1 or more.
    """

    number = 2
    state = ("exp_avg", "exp_avg_sq")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self._check(eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"Adam: betas={self.betas} given, expected two in [0, 1)")

    def factors(self) -> tuple[float, float, float, float, float]:
        """As for all rules."""
        return self.lr, 0.0, self.eps, *self.betas
