"""The command `phalanx`: one module per subcommand.

A subcommand's module defines `command`, a function that typer turns into options and help, and,
if it needs them, `SETTINGS` for `typer.Typer.command`. It imports torch, and whatever imports
torch, inside the function, so that `phalanx --help` is fast.

`phalanx.system.processes.ExitCode` has the exit codes. Expected errors are printed in one line,
without a stack trace.
"""

import importlib
import io
import os
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from phalanx.system.processes import ExitCode

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS = (
    *("run", "jobs", "explain", "watch", "trace"),
    *("doctor", "test", "bench", "key", "examples"),
)


def make_app() -> typer.Typer:
    """Return the command with all subcommands, whose modules this imports."""
    documentation = _describe_documentation()
    app = typer.Typer(
        help="Distributed PyTorch in shared memory: start ranks; inspect jobs that run, hang or "
        "have died; check and measure a machine and its network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        epilog=_join(_describe_exit_codes(), documentation),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in COMMANDS:
        module: Any = importlib.import_module(f"phalanx.cli.{name}")
        settings: dict[str, Any] = dict(getattr(module, "SETTINGS", {}))
        settings["epilog"] = _join(settings.get("epilog", ""), documentation)
        app.command(name, **settings)(module.command)
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
        if sys.argv[1:2] == ["run"] and os.environ.get("PHALANX_PRELOAD") and _has_been_rank():
            return
        make_app()(prog_name="phalanx")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"phalanx: error: {_describe_error(error)}\n")
        sys.exit(code)
    finally:
        _flush_stdout()


def _has_been_rank() -> bool:
    """Start the process whose copies become ranks; return True in a rank, when it has ended."""
    from phalanx.cli.run import load_torch_quietly

    replaced = os.environ.pop("PHALANX_REPLACE", None)
    load_torch_quietly()
    if replaced is not None:
        os.environ["PHALANX_REPLACE"] = replaced
    from phalanx._autoload import replace_backends
    from phalanx.launcher import preload

    return preload.start(replace_backends)


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
    """Return the code for an error of the user, of Phalanx or of a file; None for a bug."""
    if isinstance(error, OSError) and error.filename is not None:
        return ExitCode.FAILURE
    errors = sys.modules.get("phalanx.errors")  # if it is not loaded, the error is from elsewhere
    if errors is None:
        return None
    if isinstance(error, errors.UsageError):
        return ExitCode.USAGE
    return ExitCode.FAILURE if isinstance(error, errors.PhalanxError) else None


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _join(*paragraphs: str) -> str:
    return "\n\n".join(filter(None, paragraphs))


def _describe_documentation() -> str:
    """Return where the documentation is; empty until `project.urls` of pyproject.toml names it."""
    for entry in metadata.metadata("phalanx").get_all("Project-URL", []):
        label, _, address = entry.partition(", ")
        if label == "Documentation":
            return f"Documentation: {address}"
    return ""


def _describe_exit_codes() -> str:
    """Return the table of exit codes, one paragraph for rich's markup."""
    lines = (f"{code:>7}  {meaning}" for code, meaning in ExitCode.MEANINGS.items())
    return "\n".join(["Exit codes:", *lines])
