"""The encoding of a group's messages between hosts in fewer bits, and what it loses.

What an encoding loses is added to the next values of the same tensor (error feedback, Karimireddy
et al., "Error feedback fixes SignSGD", 2019). A tensor is the same while its memory is: a gradient
bucket of DDP, or a buffer of one's own. Of other tensors it is lost.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from phalanx import _native

_logger = logging.getLogger("phalanx")
MIN_BYTES = 64 * 1024
"""The size from which tensors are compressed, in bytes: smaller ones take no time of a link."""
ITEM = 4
"""The size of an element in bytes: only float32 is compressed."""
SLOW = 250e6
"""The bandwidth of a link, in bytes per second, below which int8 takes less time than float32."""
_PADDING = 2**16
"""Elements beyond those of a tensor: the ranks of a host get equally many blocks of a chunk."""
_KINDS = ("all_reduce", "reduce_scatter")
_OPERATORS = {_native.REDUCE_OPS["sum"], _native.REDUCE_OPS["avg"]}
_FLOAT32 = _native.DTYPES["float32"]


def choose_encoding(bandwidth: float) -> str:
    """Return the encoding for links of this bandwidth in bytes per second; empty for none."""
    name = "int8" if bandwidth < SLOW else ""
    _logger.info(
        "compress='auto': the slowest link carries %.0f Mbit/s: %s",
        bandwidth * 8e-6,
        name or "float32",
    )
    return name


class Compression:
    """The encoding of a group's messages between hosts, and what it lost so far.

    Args:
        name: The name of the encoding, one of `_native.ENCODINGS`.
    """

    def __init__(self, name: str) -> None:
        self.encoding = _native.ENCODINGS[name]
        self._residuals: dict[tuple[int, int], Tensor] = {}
        """By the address of a tensor, and the address behind it."""
        self._lock = threading.Lock()
        self._freed: deque[tuple[int, int]] = deque()
        """Bounds of tensors whose memory is freed. Only appended to by finalizers, which run at any
        moment, also in a thread that holds the lock."""

    def applies(self, kind: str, dtype: int, op: int, count: int) -> bool:
        """Return whether an operation on `count` elements is compressed."""
        is_reduction = kind in _KINDS and op in _OPERATORS
        return is_reduction and dtype == _FLOAT32 and count * ITEM >= MIN_BYTES

    def keep_residual(self, tensor: Tensor) -> None:
        """Feed back what is lost of a contiguous tensor from now on, while its memory exists."""
        bounds = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._lock:
            self._drop_freed()
            if (
                tensor.dtype != torch.float32
                or tensor.nbytes < MIN_BYTES
                or bounds in self._residuals
            ):
                return
            self._residuals[bounds] = torch.zeros(
                tensor.numel() + _PADDING, dtype=torch.float32, device="cpu"
            )
        # Not of this object, which would live as long as the tensor.
        weakref.finalize(tensor.untyped_storage(), self._freed.append, bounds)

    def residual(self, address: int, count: int) -> tuple[int, Tensor | None]:
        """Return the address of what was lost of elements so far, 0 if it is not kept.

        It exists as long as the tensor that is returned too.
        """
        end = address + count * ITEM
        with self._lock:
            self._drop_freed()
            for (first, last), residual in self._residuals.items():
                if first <= address < last and end <= last + _PADDING * ITEM:
                    return residual.data_ptr() + address - first, residual
        return 0, None

    def _drop_freed(self) -> None:
        while self._freed:
            self._residuals.pop(self._freed.popleft(), None)
