"""Images of handwritten digits that come with the package, for examples without a download.

The data set is "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI
Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0): the part of it that
scikit-learn's `load_digits` has too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_FILE = Path(__file__).with_name("digits.npz")
_INK = 16


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of handwritten digits, and the digits.

    Returns:
        The images, float32 [1797, 8, 8] from 0 (paper) to 1 (ink), and the digits, int64 [1797].
        Each call returns new tensors.

    Example:
        >>> images, labels = load_digits()
        >>> images.shape, labels[:4].tolist()
        (torch.Size([1797, 8, 8]), [0, 1, 2, 3])
    """
    with np.load(_FILE) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images).float() / _INK, torch.from_numpy(labels).long()
