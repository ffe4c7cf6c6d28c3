"""The command `phalanx`: one module per subcommand.

A subcommand's module defines `command`, a function that typer turns into options and help, and,
if it needs them, `SETTINGS` for `typer.Typer.command`. It imports torch, and whatever imports
torch, inside the function, so that `phalanx --help` is fast.

Exit codes: 0, 2 for wrong usage, 130 after Ctrl-C, otherwise the code of the subcommand.
Expected errors are printed in one line, without a stack trace.
"""

import importlib
import io
import os
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS = ("run", "jobs", "explain", "watch", "trace", "doctor", "test", "bench", "key")


def make_app() -> typer.Typer:
    """Return the command with all subcommands, whose modules this imports."""
    app = typer.Typer(
        help="Distributed PyTorch in shared memory: start ranks; inspect jobs that run, hang or "
        "have died; check and measure a machine and its network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in COMMANDS:
        module: Any = importlib.import_module(f"phalanx.cli.{name}")
        app.command(name, **getattr(module, "SETTINGS", {}))(module.command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"phalanx {metadata.version('phalanx')}, torch {metadata.version('torch')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions."),
    ] = False,
) -> None:
    """Declare the options of the command itself."""


def main() -> None:
    """Run the command in `sys.argv` and exit with its code."""
    _escape_unencodable()
    try:
        make_app()(prog_name="phalanx")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"phalanx: error: {error}\n")
        sys.exit(code)
    finally:
        _flush_stdout()


def _escape_unencodable() -> None:
    """Print the code of a character that the encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush_stdout() -> None:
    """Keep Python from failing to flush a closed pipe, for example after `phalanx ... | head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: Exception) -> int | None:
    """Return 2 for a usage error, 1 for another error of Phalanx, None for a bug."""
    errors = sys.modules.get("phalanx.errors")  # if it is not loaded, the error is from elsewhere
    if errors is None:
        return None
    if isinstance(error, errors.UsageError):
        return 2
    return 1 if isinstance(error, errors.PhalanxError) else None
