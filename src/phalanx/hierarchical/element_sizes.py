"""Element sizes of the core's dtypes, in bytes."""

import torch

from phalanx import _native

__all__ = ["BYTES"]

BYTES = {number: getattr(torch, name).itemsize for name, number in _native.DTYPES.items()}
