"""The device of these tests: the CPU, unless `make gpu` chooses another one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks import ranks

__all__ = ["ranks"]


@pytest.fixture(scope="session")
def device() -> str:
    """The type of the device whose tensors are tested, from `PHALANX_TEST_DEVICE`."""
    name = os.environ.get("PHALANX_TEST_DEVICE", "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.fail("PHALANX_TEST_DEVICE is cuda, but torch sees no GPU")
    return name
