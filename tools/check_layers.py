"""Check with import-linter which modules of the package may import which, on its sources alone.

An editable install has a finder of its own, for which the checkout is one of the package's
directories, as it holds the examples. So import-linter could read `__init__.py` of the checkout in
place of that of the package.
"""

import sys
from pathlib import Path

from importlinter.cli import lint_imports_command

SOURCES = Path(__file__).parents[1] / "src"

if __name__ == "__main__":
    sys.meta_path = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")
    ]
    sys.path.insert(0, str(SOURCES))
    lint_imports_command(["--no-logo"])
