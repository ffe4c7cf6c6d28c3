"""The checkout of Phalanx, whose package is in `src/phalanx`, if it is imported as `phalanx`.

Python does so in the directory above a checkout of this name. If the interpreter has the package,
it is imported instead; otherwise the error says what to do, since Python would import the checkout
as an empty package.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_checkout = Path(__file__).resolve().parent


def _load_package() -> None:
    """Put the installed package into the place of this module.

    Raises:
        ImportError: The interpreter does not have the package.
    """
    elsewhere = [each for each in sys.path if Path(each).resolve() != _checkout.parent]
    spec = PathFinder.find_spec("phalanx", elsewhere)
    if spec is None or spec.loader is None:
        raise ImportError(
            f"{_checkout} is the checkout of Phalanx, not the package, which {sys.executable} does "
            f"not have: install it with '{sys.executable} -m pip install {_checkout}', or use the "
            f"interpreter that 'make train' sets up, {_checkout}/.venv/bin/python"
        )
    package = module_from_spec(spec)
    sys.modules["phalanx"] = package
    spec.loader.exec_module(package)


if __name__ == "phalanx":  # a tool such as pytest may import it under another name
    _load_package()
