"""`phalanx key`: create a key for jobs on several hosts."""

from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Create a file with a new key for jobs on several hosts.",
            "Copy it to each host by a secure channel, and pass it to `phalanx run --key-file` "
            "there. Processes without the key can't join the job. Only the current user can read "
            "the file; an existing file is not overwritten.",
            "[bold]phalanx key ~/.phalanx-key[/]",
        )
    )
}


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Path of the new file.")],
) -> None:
    """Create the key file."""
    from phalanx import key

    key.create_file(path)
    print(f"{path}: a new key, which only you can read; copy it to each host")
