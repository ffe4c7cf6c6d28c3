"""What becomes of a `DataParallel` that is copied or pickled."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["PlainCopy"]


class PlainCopy(nn.Module):
    """A module in the place of a `DataParallel`: with its names, in memory of its own.

    `copy.deepcopy`, `torch.optim.swa_utils.AveragedModel` and `torch.save` of the whole module make
    it, on any rank by itself. Its parameters are plain ones, its backward pass averages nothing: an
    average of the weights, a teacher, a model to evaluate. To train it, wrap its `module`.
    """

    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **keywords)
