"""Pickling of functions by value, which keeps the locations of their source.

cloudpickle replaces the file name of such code by "<dynamic-code>" since version 3.1.3, so that
equal code has equal bytes. Then neither tracebacks nor call sites of a rank would name the user's
file, and no line of it could be shown.
"""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_reducers, *_fallbacks = cloudpickle.Pickler.dispatch_table.maps


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, arguments = _reducers[CodeType](code)
    return _make_code, (code.co_filename, *arguments)


def _make_code(filename: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=filename)


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    """cloudpickle's pickler, except that code keeps its file name."""

    dispatch_table: ClassVar[Any] = ChainMap({**_reducers, CodeType: _reduce_code}, *_fallbacks)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor of a dtype that PyTorch cannot pickle, such as uint16, to its bits."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor:
            from phalanx.torch_versions import can_pickle

            if not can_pickle(obj):
                bits = obj.detach().contiguous().view(getattr(torch, f"int{8 * obj.itemsize}"))
                return _make_tensor, (bits, obj.dtype, obj.requires_grad)
        return super().reducer_override(obj)


def _make_tensor(bits: Any, dtype: Any, requires_grad: bool) -> Any:
    return bits.view(dtype).requires_grad_(requires_grad)


def dumps(value: object) -> bytes:
    """Return a value as bytes for `pickle.loads`, functions and classes of `__main__` included.

    Raises:
        Exception: A part of the value cannot be pickled; of any kind, as its own code may raise it.
    """
    file = io.BytesIO()
    CodePickler(file).dump(value)
    return file.getvalue()
