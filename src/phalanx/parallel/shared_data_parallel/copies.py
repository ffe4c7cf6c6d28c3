"""The plain module that a copied or pickled `SharedDataParallel` becomes."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["PlainCopy"]


class PlainCopy(nn.Module):
    """A plain module that replaces a `SharedDataParallel`, with the same names and its own memory.

    `copy.deepcopy`, `torch.optim.swa_utils.AveragedModel` and `torch.save` of the whole module make
    it; any rank may do so alone. It has plain parameters, and its backward pass does not average
    gradients. It serves as an average of weights, a teacher or a model to evaluate. To train it,
    wrap its `module`.
    """

    def __init__(self, module: nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **keywords)
