"""Average gradients over the ranks, after `loss.backward()` and before `optimizer.step()`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.parallel.sync_batch_norm import SyncBatchNorm

#: The size of the gradients in one all-reduce, in bytes: the default of PyTorch's DDP.
BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def average_gradients(
    parameters: nn.Module | Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each gradient by its average over the ranks of a group; block until it is done.

    Gradients are packed into buckets of one dtype and device, and one all-reduce sums each bucket:
    a small model needs a single one. Every rank scales its gradients before the sum, which avoids
    overflow in half precision and requires only SUM from the backend. The result is as
    deterministic as the backend's all-reduce: on "phalanx" bitwise the same on every rank and run.

    All ranks must call it, with parameters of the same shapes and dtypes in the same order. They
    need not agree on which parameters have a gradient: a parameter without one (`grad is None`)
    counts as zeros and gets the average. If no rank has a gradient for a parameter, its `grad`
    stays None, so that the optimizer skips it, as in a single process. Parameters that do not
    require a gradient are ignored.

    Args:
        parameters: A module, parameters (duplicates count once), or a single parameter.
        group: The group to average over; the default group if None.
        weight: This rank's weight in the average, from 0 to 1; the weights of all ranks must sum
            to 1. For batches of different sizes, pass the rank's batch / the global batch, with a
            loss that is the mean over the rank's batch: the result is the gradient of the mean
            over the global batch. With 0 the gradients of this rank are ignored, even if NaN.
            None: 1 / world size. Either all ranks pass a weight, or none. Modules with
            `SyncBatchNorm` need the weight in the loss instead:
            `(loss * (weight * world_size)).backward()`, then `average_gradients(model)`.
        bucket_bytes: The maximum size of the gradients in one all-reduce, and of the memory for
            packing. A larger gradient is reduced alone, in place if it is contiguous.

    Raises:
        UsageError: There is no process group, this rank is not in it, the weight is outside 0 to
            1 or given for a module with `SyncBatchNorm`, no parameter requires a gradient, a
            gradient is sparse, or no rank has a gradient.
        torch.distributed.DistBackendError: The backend failed: a rank died or did not take part.

    Example:
        >>> for inputs, targets in batches:
        ...     optimizer.zero_grad()
        ...     F.cross_entropy(model(inputs), targets).backward()
        ...     average_gradients(model)
        ...     optimizer.step()
    """
    trainable = _trainable(parameters)
    scale = _scale(group, weight, parameters)
    gradients = [_scaled_gradient(parameter, scale) for parameter in trainable]
    # The presence of gradients is part of the first bucket, one element for each parameter, which
    # saves a message. If that is compressed, it must be exact, and not spoil a block of gradients.
    present = trainable[0].new_tensor([parameter.grad is not None for parameter in trainable])
    target = dist.group.WORLD if group is None else group
    link = getattr(target, "link", None)
    if link is not None and link.compress:
        dist.all_reduce(flags := present.double(), group=group)
        present.copy_(flags)
        buckets = _buckets(gradients, bucket_bytes)
    else:
        buckets = _buckets([present, *gradients], bucket_bytes)
    for bucket in buckets:
        run_packed(dist.all_reduce, bucket, group=group)
    if any(parameter.grad is None for parameter in trainable):
        _set_missing_gradients(trainable, gradients, present.tolist())


@torch.no_grad()
def average_gradients_per_parameter(
    parameters: nn.Module | Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weight: float | None = None,
) -> None:
    """Average gradients by one all-reduce per parameter: the textbook loop, for comparison.

    Arguments, blocking behaviour and errors are those of `average_gradients`, with one difference:
    a parameter without a gradient always gets one, of zeros if no rank has any.

    Example:
        >>> loss.backward()
        >>> average_gradients_per_parameter(model)
    """
    trainable = _trainable(parameters)
    scale = _scale(group, weight, parameters)
    for parameter in trainable:
        gradient = _scaled_gradient(parameter, scale)
        run_packed(dist.all_reduce, [gradient], group=group)
        parameter.grad = gradient


def _trainable(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    candidates = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = {id(parameter): parameter for parameter in candidates if parameter.requires_grad}
    trainable = list(unique.values())
    if not trainable:
        raise UsageError(
            "average_gradients: no parameter that requires a gradient given, expected a module or "
            "its parameters; a generator can be used only once"
        )
    for index, parameter in enumerate(trainable):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"average_gradients: parameter {index} {list(parameter.shape)} has a gradient of "
                f"layout {parameter.grad.layout}, expected a dense one: use sparse=False in "
                "nn.Embedding, or leave the parameter out"
            )
    return trainable


def _scale(
    group: dist.ProcessGroup | None, weight: float | None, parameters: nn.Module | Iterable[Tensor]
) -> float:
    """Check the arguments, and return the factor of this rank's gradients."""
    check_group(group, "average_gradients")
    if weight is None:
        return 1 / dist.get_world_size(group)
    if not 0 <= weight <= 1:
        raise UsageError(
            f"average_gradients: weight {weight} given, expected 0 to 1: "
            "the rank's batch / the global batch"
        )
    if isinstance(parameters, nn.Module) and any(map(_mixes_gradients, parameters.modules())):
        raise UsageError(
            f"average_gradients: weight {weight} given for a module with SyncBatchNorm, whose "
            "backward pass adds the gradients of all ranks before they are weighted: weight the "
            "loss instead, (loss * (weight * world_size)).backward(), and call "
            "average_gradients(model) without weight"
        )
    return weight


def _mixes_gradients(module: nn.Module) -> bool:
    return isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))


def check_group(group: dist.ProcessGroup | None, caller: str) -> None:
    """Check that there is a process group, and that this rank is a member of the given one.

    Raises:
        UsageError: There is none, or this rank is not a member.
    """
    if not dist.is_initialized():
        raise UsageError(
            f"{caller}: no process group: call phalanx.init() or "
            "torch.distributed.init_process_group() first"
        )
    if dist.get_rank(group) < 0:
        raise UsageError(f"{caller}: this rank is not a member of the group given")


def _scaled_gradient(parameter: Tensor, scale: float) -> Tensor:
    """Return the gradient, scaled in place, or zeros if it is None."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    # Not a product: zero times NaN is NaN.
    return gradient.zero_() if scale == 0 else gradient.mul_(scale)


def _buckets(tensors: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, of at most `bucket_bytes` or of one tensor.

    The result depends only on shapes, dtypes and devices, never on values or strides, which may
    differ between ranks.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    bucket_sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if size > bucket_bytes:
            yield [tensor]
            continue
        if bucket_sizes.get(key, 0) + size > bucket_bytes:
            yield open_buckets.pop(key)
            bucket_sizes[key] = 0
        open_buckets.setdefault(key, []).append(tensor)
        bucket_sizes[key] = bucket_sizes.get(key, 0) + size
    yield from open_buckets.values()


def run_packed(collective: Callable[..., object], tensors: list[Tensor], **options: Any) -> None:
    """Run a collective, in place, on tensors of one dtype and device, packed into one tensor."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        collective(tensors[0], **options)
        return
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    collective(packed, **options)
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _set_missing_gradients(
    trainable: list[Tensor], gradients: list[Tensor], present: list[float]
) -> None:
    """Set the gradients that only other ranks had."""
    if not any(present):
        raise UsageError(
            "average_gradients: no rank has a gradient, expected at least one: "
            "call loss.backward() first, and optimizer.zero_grad() after the step"
        )
    for parameter, gradient, ranks in zip(trainable, gradients, present, strict=True):
        if parameter.grad is None and ranks:
            parameter.grad = gradient
