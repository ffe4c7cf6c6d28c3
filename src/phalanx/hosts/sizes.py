"""Bytes of the elements of each dtype of the core."""

import torch

from phalanx import _native

__all__ = ["BYTES"]

BYTES = {number: getattr(torch, name).itemsize for name, number in _native.DTYPES.items()}
