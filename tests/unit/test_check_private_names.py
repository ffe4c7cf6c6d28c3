"""The check for private names of PyTorch."""

from __future__ import annotations

import pytest

from tools.check_private_names import find_private_names


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.add(torch._C.x)", [(2, "torch._C")]),
        ("import torch.distributed as dist\ndist._world", [(2, "torch.distributed._world")]),
        ("import torch.distributed\ntorch._foreach_add_()", [(2, "torch._foreach_add_")]),
        ("from torch.utils import _pytree", [(1, "torch.utils._pytree")]),
        ("from torch._C import Future", [(1, "torch._C.Future")]),
        ("from torch import nn\nnn.Linear._load", [(2, "torch.nn.Linear._load")]),
        ("import torch\ntorch.ones(2)._version", []),
        ("import torch\ntorch.__version__", []),
        ("from phalanx import _native\n_native.x", []),
        ("import numpy\nnumpy._core", []),
        ("self._x\nobject()._y", []),
    ],
)
def test_private_names(source: str, expected: list[tuple[int, str]]) -> None:
    assert sorted(find_private_names(source)) == expected
