"""The command `phalanx`: one module per subcommand.

A subcommand's module defines `command`, a function that typer turns into options and help, and,
if it needs them, `SETTINGS` for `typer.Typer.command`. It imports torch, and whatever imports
torch, inside of the function: `phalanx --help` answers at once.

Exit codes: 0, 2 for wrong usage, 130 after Ctrl-C, else what the subcommand says. An error that
Phalanx raises on purpose is printed in a line, without a stack trace.
"""

import importlib
import io
import os
import sys
from typing import Any

import typer

__all__ = ["main"]

_COMMANDS = ("run", "jobs", "explain", "watch", "trace", "doctor", "test", "bench", "key")


def _app() -> typer.Typer:
    app = typer.Typer(
        help="Distributed PyTorch in shared memory: start ranks, look at jobs that run, hang or "
        "have died, check and measure a machine and its network.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in _COMMANDS:
        module: Any = importlib.import_module(f"phalanx.cli.{name}")
        app.command(name, **getattr(module, "SETTINGS", {}))(module.command)
    return app


def main() -> None:
    """Run the command that `sys.argv` says; exits with its code."""
    _print_anything()
    try:
        _app()(prog_name="phalanx")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"phalanx: error: {error}\n")
        sys.exit(code)
    finally:
        _settle_stdout()


def _print_anything() -> None:
    """Where the encoding lacks a character, print its number instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _settle_stdout() -> None:
    """After `phalanx ... | head`, keep Python from failing to flush what nobody reads."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: Exception) -> int | None:
    """2 for a wrong argument, 1 for another error of Phalanx's, None for a bug."""
    errors = sys.modules.get("phalanx.errors")  # if it isn't loaded, the error isn't of its kind
    if errors is None:
        return None
    if isinstance(error, errors.UsageError):
        return 2
    return 1 if isinstance(error, errors.PhalanxError) else None
