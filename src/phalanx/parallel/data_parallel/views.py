"""Tensors on flat memory, and flat views of tensors, element by element in the same order."""

from torch import Tensor

__all__ = ["flat", "shaped_like"]


def shaped_like(memory: Tensor, like: Tensor) -> Tensor:
    """View flat memory as a tensor with the shape of `like`, and its strides if it is dense."""
    return memory.as_strided(like.shape, _strides(like))


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a tensor in the order in which `shaped_like(memory, like)` has them.

    A view where `tensor` lies in memory as `like` does, else a copy.
    """
    if tensor.stride() != _strides(like):
        tensor = tensor.new_empty_strided(like.shape, _strides(like)).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _strides(like: Tensor) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie one after another, else those of a contiguous one.

    (A channels-last weight stays one.)
    """
    expected = 1
    for stride, extent in sorted(zip(like.stride(), like.shape, strict=True)):
        if extent > 1 and stride != expected:
            return _contiguous(like)
        expected *= extent
    return like.stride()


def _contiguous(like: Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(like.shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    return tuple(strides)
