"""The options `--json` and `--output`, which are the same in every command that has results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the JSON to this file, too, and replace it."
    ),
]


def check_writable(path: Path | None, option: str = "--output") -> None:
    """Check that a file can probably be written, before work that takes long.

    Raises:
        UsageError: It is a directory, its directory does not exist, or one of them is read-only.
    """
    if path is None:
        return
    from phalanx.usage_errors import UsageError

    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{option} is {path}, which is a directory: expected a file")
    if not folder.is_dir():
        raise UsageError(f"{option} is {path}, but there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{option} is {path}, which you may not write: choose another file")


def open_output(path: Path, option: str = "--output") -> TextIO:
    """Open a file for text.

    Raises:
        UsageError: It cannot be written.
    """
    from phalanx.usage_errors import UsageError

    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} is {path}, which cannot be written: {error.strerror}") from None


def write_json(value: Any, as_json: bool, output: Path | None) -> None:
    """Print a value as JSON if `as_json`, and write it to `output` unless that is None.

    Raises:
        UsageError: The file cannot be written.
    """
    text = json.dumps(value, indent=2)
    if output is not None:
        with open_output(output) as file:
            file.write(f"{text}\n")
    if as_json:
        print(text)
