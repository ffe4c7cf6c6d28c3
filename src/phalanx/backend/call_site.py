"""Where in the user's code an operation was called."""

from __future__ import annotations

import inspect
import os

import torch
from typing_extensions import deprecated

import phalanx
from phalanx import _native

# Whatever begins so belongs to torch or to Phalanx. (PyTorch wraps functions in `deprecated`, whose
# frame lies between the user's and torch's.)
_native.set_foreign_code(
    [
        *(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, phalanx)),
        inspect.getfile(deprecated),
        "<frozen",
    ]
)


def call_site() -> str:
    """The innermost "file:line" of this thread that belongs neither to torch nor to Phalanx."""
    return brief(_native.call_site_text(_native.call_site()))


def brief(site: str) -> str:
    """A call site without its directories."""
    return site.rpartition("/")[2] or "an unknown place"
