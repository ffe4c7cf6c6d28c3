"""The table of the layouts of PyTorch's objects, compared with the headers that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import torch_layouts, torch_versions
from tools.torch_layouts import compute_layout


@pytest.mark.slow
def test_the_table_is_that_of_the_headers() -> None:
    layout = compute_layout(Path(torch.__file__).parent / "include")
    assert layout == {
        "tensor": torch_versions.TENSOR_LAYOUT,
        "options": torch_layouts.OPTIONS,
    }


def test_every_tested_version_has_a_layout() -> None:
    (major, oldest), (_, newest) = torch_versions.SUPPORTED
    expected = [(major, minor) for minor in range(oldest, newest + 1)]
    assert list(torch_layouts.TENSORS) == expected
