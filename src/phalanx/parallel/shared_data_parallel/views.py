"""Views of flat memory as tensors, and flat views of tensors, in the same order of elements."""

from torch import Tensor

__all__ = ["flat", "shaped_like"]


def shaped_like(memory: Tensor, like: Tensor) -> Tensor:
    """View flat memory as a tensor with the shape of `like`, and its strides if it is dense."""
    return memory.as_strided(like.shape, _strides(like))


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor as a 1-D tensor, in the order of `shaped_like(memory, like)`.

    The result is a view if `tensor` has the same strides, otherwise a copy.
    """
    if tensor.stride() != _strides(like):
        tensor = tensor.new_empty_strided(like.shape, _strides(like)).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _strides(like: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps, otherwise those of a contiguous tensor.

    A channels-last weight keeps its strides.
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
