"""A torch whose C++ code keeps to itself what isn't an error, in launchers."""

import importlib
import os

__all__ = ["load_torch_quietly"]

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def load_torch_quietly() -> None:
    """Import torch; a second call, or one after `import torch`, does nothing.

    It would print a stack trace where another launcher has ended, and a warning for each address
    without a name. The user's own `TORCH_CPP_LOG_LEVEL` or `LOGLEVEL` counts, and ranks say what
    they always say.
    """
    ours = _LEVEL not in os.environ and "LOGLEVEL" not in os.environ
    if ours:
        os.environ[_LEVEL] = "ERROR"
    importlib.import_module("torch")
    if ours:
        del os.environ[_LEVEL]
