"""Element sizes of the core's dtypes, in bytes."""

import torch

from phalanx import _native

__all__ = ["ELEMENT_SIZES"]

ELEMENT_SIZES = {number: getattr(torch, name).itemsize for name, number in _native.DTYPES.items()}
