"""BatchNorm over the batches of all ranks, even on the CPU, which PyTorch's own rejects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.torch_versions import BatchNormBase


class SyncBatchNorm(BatchNormBase):
    """A counterpart of `torch.nn.SyncBatchNorm` that supports CPU tensors, on any backend.

    It is not a subclass of that class, which DDP rejects on the CPU.

    In training, mean and variance are those of the batches of all ranks together. This takes one
    all-gather of `2 * num_features + 1` elements in forward and one all-reduce of
    `2 * num_features` in backward. Batches may differ in size and may be empty on some ranks.
    Results equal those of `BatchNorm` on the whole batch up to rounding: the ranks' means and sums
    of squares are combined in float64 (Chan, Golub and LeVeque 1979). The gradients of weight and
    bias are this rank's part, so that DDP or another wrapper can average them. In evaluation there
    is no communication.

    Arguments are those of `torch.nn.SyncBatchNorm`. As there, `convert_sync_batchnorm` replaces
    every BatchNorm in a module.

    Raises (in forward):
        UsageError: The batches of all ranks together have fewer than two values per channel.
        ValueError: The input has no channels, or another number of channels.

    Example:
        >>> model = phalanx.parallel.SyncBatchNorm.convert_sync_batchnorm(model)
        >>> model = phalanx.parallel.SharedDataParallel(model)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: Any = {"device": device, "dtype": dtype}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: input {list(input.shape)} given, expected [batch, channels, ...]"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `[batch, channels, ...]`; in training all ranks must call it, and it blocks."""
        if not self._needs_communication():
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: input {list(input.shape)} given, expected {self.num_features} "
                "channels in dimension 1"
            )
        group = self.process_group or dist.group.WORLD
        results: tuple[Tensor, ...] = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group
        )
        output, mean, variance, count = results
        self._update_running_stats(mean, variance, int(count))
        return output

    def _needs_communication(self) -> bool:
        group = self.process_group
        return self.training and dist.is_initialized() and dist.get_world_size(group) > 1

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics like BatchNorm."""
        if not self.training or not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        assert self.running_mean is not None
        assert self.running_var is not None
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replace every BatchNorm in a module, or the module itself, by this class.

        Parameters and buffers stay the same objects.

        Returns:
            The module, or its replacement if it is a BatchNorm itself.
        """
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        converted: nn.Module = convert(module, process_group)
        for module_part in converted.modules():
            if type(module_part) is nn.SyncBatchNorm:
                module_part.__class__ = cls  # type: ignore[assignment]
        return converted


class _Normalize(torch.autograd.Function):
    """The normalization, which also returns mean, variance (float64) and count over all ranks."""

    @staticmethod
    def forward(
        context: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _global_statistics(input, group)
        invstd = (variance + epsilon).rsqrt()
        dtype = torch.promote_types(input.dtype, torch.float32)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = invstd if weight is None else invstd * weight.double()
        shift = -mean * scale if bias is None else bias.double() - mean * scale
        output = input * scale.to(dtype).view(shape) + shift.to(dtype).view(shape)
        context.save_for_backward(input, weight, mean, invstd)
        context.count, context.group, context.has_bias = count, group, bias is not None
        context.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, torch.tensor(count, device="cpu")

    @staticmethod
    def backward(context: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = context.saved_tensors
        channels = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        dtype = torch.promote_types(input.dtype, torch.float32)
        normal = (input - mean.to(dtype).view(shape)) * invstd.to(dtype).view(shape)
        grad_output = gradient.to(dtype)
        total = grad_output.sum(channels).double()
        product = (grad_output * normal).sum(channels).double()
        sums = torch.cat([total, product])
        dist.all_reduce(sums, group=context.group)
        mean_grad, mean_product = (sums / context.count).split(len(total))
        scale = invstd if weight is None else invstd * weight.double()
        correction = normal * mean_product.to(dtype).view(shape) + mean_grad.to(dtype).view(shape)
        grad_input = ((grad_output - correction) * scale.to(dtype).view(shape)).to(input.dtype)
        grad_weight = None if weight is None else product.to(weight.dtype)
        grad_bias = total.to(weight.dtype) if weight is not None and context.has_bias else None
        return grad_input, grad_weight, grad_bias, None, None


def _global_statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Return each channel's mean and variance (float64) and number of values, over all ranks."""
    channels = input.shape[1]
    values = input.detach().transpose(0, 1).reshape(channels, -1)
    values = values.to(torch.promote_types(input.dtype, torch.float32))
    local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    count = values.shape[1]
    if count:
        mean = values.mean(1)
        local[:channels] = mean
        local[channels:-1] = (values - mean[:, None]).square().sum(1)
        local[-1] = count
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    stacked = torch.stack(gathered)
    counts = stacked[:, -1:]
    total = int(counts.sum())
    if total < 2:
        raise UsageError(
            f"SyncBatchNorm: {total} values per channel on all ranks together, expected more than "
            f"one in training; this rank's input is {list(input.shape)}"
        )
    means = stacked[:, :channels]
    mean = (means * counts).sum(0) / total
    squares = stacked[:, channels:-1].sum(0) + ((means - mean).square() * counts).sum(0)
    return mean, squares / total, total
