"""The optimizers of rows: those of `torch.optim` for sparse gradients, applied to single rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from phalanx.errors import UsageError


@dataclass(frozen=True)
class RowOptimizer:
    """The base class of all optimizers of rows.

    `state_names` names the tensors kept for each row, which have its shape. `kernel_number` is the
    optimizer's number in the core.
    """

    kernel_number: ClassVar[int]
    state_names: ClassVar[tuple[str, ...]]
    lr: float

    def hyperparameters(self) -> tuple[float, float, float, float, float]:
        """Return the learning rate, its decay, epsilon and both betas, as the core takes them."""
        return self.lr, 0.0, 0.0, 0.0, 0.0

    def _check_nonnegative(self, **values: float) -> None:
        for name, value in {"lr": self.lr, **values}.items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{type(self).__name__}: {name}={value} given, expected 0 or more")


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """`torch.optim.SGD` without momentum, which is meaningless for rows that are rarely used.

    Args:
        lr: The learning rate.

    Raises:
        UsageError: A hyperparameter is negative or not finite.

    Example:
        >>> table = EmbeddingTable(1000, 8, SGD(lr=0.1))
    """

    kernel_number = 0
    state_names = ()
    lr: float = 1e-3

    def __post_init__(self) -> None:
        self._check_nonnegative()


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """`torch.optim.Adagrad` on sparse gradients.

    Args:
        lr: The learning rate.
        lr_decay: The decay of the learning rate, which is `lr / (1 + (n - 1) * lr_decay)` in step
            n.
        initial_accumulator_value: The initial value of the sums of squares.
        eps: The term added to their square root.

    Raises:
        UsageError: A hyperparameter is negative or not finite.

    Example:
        >>> table = EmbeddingTable(1000, 8, Adagrad(lr=0.1, initial_accumulator_value=0.1))
    """

    kernel_number = 1
    state_names = ("sum",)
    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        initial = self.initial_accumulator_value
        self._check_nonnegative(
            lr_decay=self.lr_decay, initial_accumulator_value=initial, eps=self.eps
        )

    def hyperparameters(self) -> tuple[float, float, float, float, float]:
        """Return the learning rate, its decay, epsilon and both betas, as the core takes them."""
        return self.lr, self.lr_decay, self.eps, 0.0, 0.0


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """`torch.optim.SparseAdam`: a step changes the moments of its rows only, but counts for all.

    Args:
        lr: The learning rate.
        betas: The decay rates of the first and the second moment, each in [0, 1).
        eps: The term added to the square root of the second moment.

    Raises:
        UsageError: A hyperparameter is negative or not finite, or a beta is 1 or more.

    Example:
        >>> table = EmbeddingTable(1000, 8, Adam(lr=0.001, betas=(0.9, 0.99)))
    """

    kernel_number = 2
    state_names = ("exp_avg", "exp_avg_sq")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self._check_nonnegative(eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"Adam: betas={self.betas} given, expected two in [0, 1)")

    def hyperparameters(self) -> tuple[float, float, float, float, float]:
        """Return the learning rate, its decay, epsilon and both betas, as the core takes them."""
        return self.lr, 0.0, self.eps, *self.betas
