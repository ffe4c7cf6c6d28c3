"""The location in the user's code at which an operation was called."""

from __future__ import annotations

import inspect
import os

import torch
from typing_extensions import deprecated

import phalanx
from phalanx import _native

# Paths with these prefixes are not the user's code. `deprecated` is among them since PyTorch wraps
# functions in it, so that its frame lies between those of the user and of torch.
_native.set_library_code(
    [
        *(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, phalanx)),
        inspect.getfile(deprecated),
        "<frozen",
    ]
)


def call_site() -> str:
    """Return the innermost "file:line" of this thread that is neither in torch nor in Phalanx."""
    return short_site(_native.call_site_text(_native.call_site()))


def short_site(site: str) -> str:
    """Return a call site without its directories."""
    return site.rpartition("/")[2] or "an unknown location"
