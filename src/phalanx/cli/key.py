"""`phalanx key`: a new key, for a job on several hosts."""

from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Make a file with a new key for jobs on several hosts.",
            "Copy it to each of them, by a way that nobody else can read, and give it to "
            "`phalanx run --key-file` there. Who doesn't have it can't join the job. Only its user "
            "can read the file; one that exists is left as it is.",
            "[bold]phalanx key ~/.phalanx-key[/]",
        )
    )
}


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The file to make.")],
) -> None:
    """Make the file."""
    from phalanx import key

    key.create_file(path)
