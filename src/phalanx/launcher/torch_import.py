"""Import of torch for launchers, with the warnings of its C++ code suppressed."""

import importlib
import os

__all__ = ["load_torch_quietly"]

_LEVEL = "TORCH_CPP_LOG_LEVEL"


def load_torch_quietly() -> None:
    """Import torch with its C++ log level set to errors.

    A second call, or one after `import torch`, has no effect. By default torch prints a stack trace
    when another launcher has ended, and a warning for each address without a name. A
    `TORCH_CPP_LOG_LEVEL` or `LOGLEVEL` of the user takes precedence, and the logging of the ranks
    is unchanged.
    """
    is_default = _LEVEL not in os.environ and "LOGLEVEL" not in os.environ
    if is_default:
        os.environ[_LEVEL] = "ERROR"
    importlib.import_module("torch")
    if is_default:
        del os.environ[_LEVEL]
