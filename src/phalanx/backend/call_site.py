"""Where in the user's code an operation was called."""

from __future__ import annotations

import inspect
import os
import sys
from typing import TYPE_CHECKING

import torch
from typing_extensions import deprecated

import phalanx

if TYPE_CHECKING:
    from types import FrameType

# PyTorch wraps functions in `deprecated`, whose frame lies between the user's and torch's.
_FOREIGN = (
    *(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, phalanx)),
    inspect.getfile(deprecated),
)


def call_site() -> str:
    """The innermost "file:line" that belongs neither to torch nor to Phalanx."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_FOREIGN) and not path.startswith("<frozen"):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
