"""The command `phalanx`: one module per subcommand.

A subcommand's module defines `command`, a function that typer turns into options and help, and,
if it needs them, `SETTINGS` for `typer.Typer.command`. It imports torch, and whatever imports
torch, inside the function, if at all: help, a wrong argument and the records of a job need no
torch, and are answered at once.

`phalanx.system.processes.ExitCode` has the exit codes. Expected errors are printed in one line,
without a stack trace.
"""

import importlib
import io
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.flags import Command, Group
from phalanx.system.processes import ExitCode
from phalanx.system.suggestions import suggest
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS = (
    *("run", "jobs", "explain", "watch", "trace"),
    *("doctor", "test", "bench", "key", "examples"),
)


def make_app(commands: "Sequence[str]" = COMMANDS) -> typer.Typer:
    """Return the command with these subcommands, whose modules this imports."""
    documentation = _describe_documentation()
    app = typer.Typer(
        cls=Group,
        help="Distributed PyTorch in shared memory: start ranks; inspect jobs that run, hang or "
        "have died; check and measure a machine and its network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        epilog=_join(_describe_exit_codes(), documentation),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in commands:
        module: Any = importlib.import_module(f"phalanx.cli.{name}")
        settings: dict[str, Any] = {"cls": Command, **getattr(module, "SETTINGS", {})}
        settings["epilog"] = _join(settings.get("epilog", ""), documentation)
        app.command(name, **settings)(module.command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

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
        name = _find_command(sys.argv[1:])
        if name == "run" and os.environ.get("PHALANX_PRELOAD") and _has_been_rank():
            return
        make_app([name] if name else COMMANDS)(prog_name="phalanx")
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


def _find_command(words: "Sequence[str]") -> str:
    """Return the subcommand that these words call; empty if they begin with an option.

    Raises:
        UsageError: There is no such command.
    """
    word = words[0] if words else ""
    if word in COMMANDS:
        return word
    has_script = os.path.isfile(word) or any(each.endswith(".py") for each in words)
    if has_script and word not in ("-h", "--help", "--version"):
        hint = f"; did you mean `phalanx run {shlex.join(words)}`?"
    elif not word or word.startswith("-"):
        return ""
    else:
        hint = suggest(word, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
    raise UsageError(f"there is no command {word!r}{hint}")


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
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    errors = sys.modules.get("phalanx.errors")  # if it is not loaded, the error is from elsewhere
    is_own = errors is not None and isinstance(error, errors.PhalanxError)
    return ExitCode.FAILURE if is_own else None


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _join(*paragraphs: str) -> str:
    return "\n\n".join(filter(None, paragraphs))


def _describe_documentation() -> str:
    """Return where the documentation is; empty until `project.urls` of pyproject.toml names it."""
    from importlib import metadata

    for entry in metadata.metadata("phalanx").get_all("Project-URL", []):
        label, _, address = entry.partition(", ")
        if label == "Documentation":
            return f"Documentation: {address}"
    return ""


def _describe_exit_codes() -> str:
    """Return the table of exit codes, one paragraph for rich's markup."""
    lines = (f"{code:>7}  {meaning}" for code, meaning in ExitCode.MEANINGS.items())
    return "\n".join(["Exit codes:", *lines])
