"""The backward pass and the optimizer step: precision, clipping, and the check of gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError

__all__ = ["FiniteCheck", "Stepper"]

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

    @property
    def scale(self) -> float:
        """The factor by which the next loss is multiplied."""
        return self.scaler.get_scale()

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
        previous_scale = self.scale
        if self._clip is not None:
            self.scaler.unscale_(self.optimizer)
            self._clip_gradients(self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scale >= previous_scale

    def _clip_gradients(self, max_norm: float) -> None:
        # A model whose gradients are sharded over ranks clips them itself.
        clip_own = getattr(self.model, "clip_grad_norm_", None)
        if clip_own is not None:
            clip_own(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
