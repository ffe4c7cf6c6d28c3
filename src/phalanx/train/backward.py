"""From a loss to a step of the optimizer: precision, clipping, gradients that aren't finite."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError

__all__ = ["FiniteCheck", "Stepper"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class FiniteCheck:
    """Finds the parameter whose gradient isn't finite on this rank, before gradients are averaged.

    Afterwards the NaN of one rank is on all. So it looks at each gradient as backward has made it,
    by a hook: it is read once, while it is in the cache, and its sum kept. NaN and infinity stay in
    a sum.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: list[tuple[str, Tensor]] = []
        self._handles = [
            parameter.register_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _hook(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            short = gradient.dtype in _DTYPES.values()  # the sum would leave its range
            total = gradient.sum(dtype=torch.float32) if short else gradient.sum()
            self._sums.append((name, total))

        return look

    def found(self) -> str:
        """The parameters of which a gradient isn't finite since the last call; empty if all are."""
        sums, self._sums = self._sums, []
        if not sums:
            return ""
        finite = torch.stack([total.detach().abs().float() for _, total in sums]).isfinite()
        if finite.all():
            return ""
        bad = [name for (name, _), well in zip(sums, finite.tolist(), strict=True) if not well]
        names = sorted(set(bad), key=bad.index)  # in the order of backward: the first is the cause
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


class Stepper:
    """Forward in the precision asked for, backward, and a step of the optimizer.

    Args:
        model: The wrapper, or the plain module.
        optimizer: Of its parameters.
        precision: None, "bfloat16", or "float16", which scales the loss.
        clip: The most that the norm of all gradients may be; None: any.
        device: That of the parameters.

    Raises:
        UsageError: Another precision, or a norm that isn't above 0.
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
        """What the next loss is multiplied by."""
        return self.scaler.get_scale()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> bool:
        """Clip, step, and let the gradients go.

        Returns:
            Whether the optimizer has made the step: the scaler of float16 leaves one out whose
            gradients, averaged over ranks, aren't finite, and makes the scale smaller.
        """
        before = self.scale
        if self._clip is not None:
            self.scaler.unscale_(self.optimizer)
            self._clip_gradients(self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scale >= before

    def _clip_gradients(self, most: float) -> None:
        # A model whose gradients lie on several ranks clips them itself.
        own = getattr(self.model, "clip_grad_norm_", None)
        if own is not None:
            own(most)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
