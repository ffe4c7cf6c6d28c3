"""`phalanx examples`: copy the example programs, which are part of the package."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

_PACKAGE = Path(__file__).parents[1]
# An editable installation uses the files of its checkout.
_SOURCES = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Copy the example programs into a new directory.",
            "They are the nine programs of the tutorial, in `tutorial/`, and complete trainings. "
            "An existing directory is not overwritten.",
            "[bold]phalanx examples[/]\n  into the directory `examples`\n"
            "[bold]phalanx run --nproc-per-node 2 examples/train_digits.py[/]\n"
            "  train a ConvNet on real digits with two processes",
        )
    )
}


def command(
    directory: Annotated[Path, typer.Argument(help="The new directory.")] = Path("examples"),
) -> None:
    """Copy the programs."""
    if directory.exists():
        from phalanx.usage_errors import UsageError

        raise UsageError(f"{directory} exists: choose another directory, or remove it first")
    source = next(path for path in _SOURCES if path.is_dir())
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("__pycache__"))
    programs = len(list(directory.rglob("*.py")))
    print(f"{directory}: {programs} programs; next: phalanx run {directory / 'train_digits.py'}")
