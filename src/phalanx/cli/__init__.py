"""The command `phalanx`: one module per subcommand.

A subcommand's module defines `command`, a function that typer turns into options and help, and,
if it needs them, `SETTINGS` for `typer.Typer.command`. It imports torch, and whatever imports
torch, inside the function, if at all: help, a wrong argument and the records of a job need no
torch, and are answered at once.

`phalanx.system.processes.ExitCode` has the exit codes. Expected errors are printed in one line,
without a stack trace.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from phalanx.system.processes import ExitCode
from phalanx.system.suggestions import find_similar
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS = (
    *("run", "jobs", "explain", "watch", "trace"),
    *("doctor", "test", "bench", "key", "examples"),
)


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the command with these subcommands, whose modules this imports."""
    import typer

    from phalanx.cli.help import Command, Group, options

    app = typer.Typer(
        cls=Group,
        help="Distributed PyTorch in shared memory: start ranks; inspect jobs that run, hang or "
        "have died; check and measure a machine and its network.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for name in commands:
        module: Any = importlib.import_module(f"phalanx.cli.{name}")
        app.command(name, **{"cls": Command, **getattr(module, "SETTINGS", {})})(module.command)
    return app


def main() -> None:
    """Run the command in `sys.argv` and exit with its code."""
    _escape_unencodable()
    try:
        name = _find_command(sys.argv[1:])
        if name == "run":
            _check_arguments(sys.argv[2:])
            if os.environ.get("PHALANX_PRELOAD") and _has_been_rank():
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


def _find_command(words: Sequence[str]) -> str:
    """Return the subcommand that these words call; empty if they begin with an option.

    Raises:
        UsageError: There is no such command.
    """
    word = words[0] if words else ""
    if word in ("", "-h", "--help", "--version", *COMMANDS):
        return word if word in COMMANDS else ""
    is_option = word.startswith("-")
    has_script = any(each.endswith(".py") for each in words)
    if word.endswith(".py") or os.path.isfile(word) or (is_option and has_script):
        meant = ["run", *words]  # the most frequent command, forgotten
    elif is_option:
        return ""  # typer has an answer
    elif similar := find_similar(word, COMMANDS):
        meant = [similar, *words[1:]]
    else:
        raise UsageError(f"there is no command {word!r}: expected one of {', '.join(COMMANDS)}")
    raise UsageError(f"there is no command {word!r}; did you mean `phalanx {shlex.join(meant)}`?")


def _check_arguments(words: Sequence[str]) -> None:
    """Check the arguments of `phalanx run`, before typer and what is to be preloaded are imported.

    Raises:
        UsageError: An argument is wrong.
    """
    from phalanx.launcher.arguments import HelpRequested, parse_arguments

    with contextlib.suppress(HelpRequested):
        parse_arguments(words)


def _has_been_rank() -> bool:
    """Start the process whose copies become ranks; return True in a rank, when it has ended."""
    from phalanx.cli.run import load_torch_quietly

    replaced = os.environ.pop("PHALANX_REPLACE", None)
    load_torch_quietly()
    if replaced is not None:
        os.environ["PHALANX_REPLACE"] = replaced
    from phalanx._autoload import begin
    from phalanx.launcher import preload

    return preload.start(begin)


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
