"""Synthetic digits in the format of MNIST: each class is a pattern with noise."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

__all__ = ["make"]

_SIDE, _CLASSES = 28, 10
_COUNTS = {"train": 640, "t10k": 128}


def make(folder: Path) -> None:
    """Write the four files of MNIST below a folder."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    patterns = random.integers(0, 128, (_CLASSES, _SIDE, _SIDE))
    for name, count in _COUNTS.items():
        labels = random.integers(0, _CLASSES, count)
        images = patterns[labels] + random.integers(0, 128, (count, _SIDE, _SIDE))
        _write(raw / f"{name}-images-idx3-ubyte", images)
        _write(raw / f"{name}-labels-idx1-ubyte", labels)


def _write(path: Path, values: np.ndarray) -> None:
    unsigned_bytes = 8
    head = struct.pack(f">HBB{values.ndim}I", 0, unsigned_bytes, values.ndim, *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())
