"""The interpreters of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Where pyenv and uv install interpreters.
INTERPRETER_FOLDERS = (
    Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",
    Path.home() / ".local" / "share" / "uv" / "python",
)


def interpreters(minor: int) -> Iterator[str]:
    """Yield the interpreters of a version of Python, on the PATH, of pyenv and of uv.

    Interpreters that cannot create an environment are skipped.
    """
    name = f"python3.{minor}"
    candidates = [shutil.which(name)]
    for folder in INTERPRETER_FOLDERS:
        candidates += map(str, sorted(folder.glob(f"*/bin/{name}"), reverse=True))
    for candidate in filter(None, candidates):
        # pyenv puts a launcher on the PATH even for inactive versions, and Debian's Python has no
        # ensurepip unless python3-venv is installed.
        works = subprocess.run(
            [candidate, "-c", "import ensurepip"], capture_output=True, check=False
        )
        if works.returncode == 0:
            yield candidate
