"""`phalanx run`: run a script on several ranks."""
# ruff: noqa: ARG001 - the options are declared for the help; torchrun's parser reads the arguments

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from phalanx.cli.help import Command
from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

# Line ends are kept as they are, so a paragraph is one line.
_HELP = "\n\n".join(
    (
        "Run a Python script on several ranks of one machine or of many.",
        "Each rank is a separate process that finds its rank with phalanx.init() or "
        "torch.distributed.init_process_group(). Its lines of output begin with \\[rank N]. When a "
        "rank fails, the others are stopped, a report on stderr names the rank that failed first "
        "and the reason, and the exit code is that rank's (128 + N for signal N). No process is "
        "left. Below the report, the last operations of every rank are explained. They are also "
        "kept: `phalanx explain` prints them again, and `phalanx jobs` lists the jobs. "
        "OMP_NUM_THREADS is set so that ranks share the cores, unless you set it.",
        "[bold]phalanx run train.py --epochs 3[/]\n"
        "  one rank per GPU or core; --epochs is the script's\n"
        "[bold]phalanx run --nproc-per-node 4 train.py[/]\n"
        "  four ranks\n"
        "[bold]phalanx run --nproc-per-node 2 -m package.main[/]\n"
        "  a module\n"
        "[bold]phalanx run --replace gloo script.py[/]\n"
        '  a script that calls init_process_group("gloo"), on Phalanx\n'
        "[bold]phalanx run --nproc-per-node 4 --elastic --spares 1 train.py[/]\n"
        "  four ranks; one that is lost is replaced, and the others continue\n"
        "[bold]phalanx run --hosts node-a:2,node-b:2 train.py[/]\n"
        "  two ranks on each of two hosts, started from here over ssh\n"
        "[bold]phalanx run --nnodes 2 --node-rank 0 --master-addr node-a train.py[/]\n"
        "  two hosts, each from its own shell; --node-rank 1 on the other",
    )
)


class _UnparsedCommand(Command):
    """A command that leaves its arguments to the function; the options only appear in the help."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Keep all arguments in the context. Only a `--help` that comes first is handled here."""
        if arguments[:1] in (["-h"], ["--help"]):  # without importing torch
            super().parse_args(context, arguments[:1])
        context.args = list(arguments)
        return arguments


SETTINGS: dict[str, Any] = {
    "cls": _UnparsedCommand,
    "help": _HELP,
    "options_metavar": "[OPTIONS] SCRIPT [ARGS]...",
    "epilog": "All other options of torchrun are accepted too. `phalanx --help` lists the exit "
    "codes.",
}

_HOSTS = "Several hosts"
_SSH = "Several hosts from one shell, over ssh"
_FAILURE = "When a rank fails"
_OUTPUT = "Output"

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def command(
    context: typer.Context,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|gpu|cpu|MIN:MAX",
            help="Ranks on this host. auto, the default, is one per GPU or, without a GPU, one per "
            "core that this process may use (affinity mask, CPU quota of the container). With "
            "--elastic, the job starts with MAX ranks and continues with MIN.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is any program, started without Python.")
    ] = False,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="gloo,mpi,tcp",
            help="Run Phalanx in place of these backends if SCRIPT names one of them (or none, on "
            "CPU), without changes to SCRIPT. Rank 0 reports the replacement.",
        ),
    ] = None,
    simulate_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Simulate N hosts on this machine: its ranks are distributed over them in order, "
            "and the hosts communicate through a transport.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX", help="Hosts of the job; 1 by default.", rich_help_panel=_HOSTS
        ),
    ] = None,
    node_rank: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Number of this host, with --master-addr.", rich_help_panel=_HOSTS
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address of host 0, the host of the rendezvous.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    master_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="Port on host 0. Default on one host: a free port.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Rendezvous of an elastic job, with --rdzv-backend c10d --rdzv-id ID.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The job's key, the same on all hosts: `phalanx key PATH` creates one. Without a "
            "key, anyone who can reach the rendezvous can join the job.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    key_fd: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="An open descriptor from which to read the job's key, one line.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:N],...|@FILE",
            help="Start N ranks on each of these hosts, in the directory with the same path as "
            "this one, and show their output here. ssh must work without a password. The other "
            "hosts must be able to reach the first one; --master-addr overrides its address.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Pass this environment variable to the ranks, in addition to those whose names "
            "begin with PHALANX_. Can be repeated.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    remote_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python on the hosts; by default the path of this one.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command to use instead of `ssh`, for example 'ssh -p 2222 -i key'.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Restart all ranks after a failure, up to N times; 0 by default. With --elastic, "
            "the number of ranks to replace; 10 by default.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Start a new process in the place of a lost rank, while the other ranks keep "
            "their state. The script must let it join: see phalanx.train.Elastic.",
            rich_help_panel=_FAILURE,
        ),
    ] = False,
    spares: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Keep N processes with their imports made to replace lost ranks sooner; 0 by "
            "default.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    rejoin: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="With --elastic on several hosts: if this host loses host 0, or the connection "
            "to it, stop its ranks, and try for SECONDS to join again; 0 by default.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Time between SIGTERM and SIGKILL for ranks that are stopped; 10 by default.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    local_ranks_filter: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Show only the output of these local ranks.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Directory of the log files, with --tee.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    keep_record: Annotated[
        bool,
        typer.Option(
            "--keep-record",
            help="Keep the record of the job even if it ends well, for `phalanx trace` and "
            "`phalanx explain`. Without this, only failed jobs are kept.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    tee: Annotated[
        str | None,
        typer.Option(
            "--tee",
            "-t",
            metavar="0|1|2|3",
            help="Also write log files: 1 for stdout, 2 for stderr, 3 for both.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Run a Python script on several ranks; the arguments are in `context`."""
    from phalanx.launcher.arguments import HelpRequested, parse_arguments

    try:
        args = parse_arguments(context.args)
    except HelpRequested:
        typer.echo(context.get_help())
        return
    if args.hosts is not None:
        _run_on_hosts(args)
    load_torch_quietly()
    from phalanx.launcher.run import run

    outcome = run(args)
    if outcome.report:
        sys.stderr.write(f"phalanx run: {outcome.report}\n")
    if outcome.is_remote and outcome.job:
        sys.stderr.write(f"To see what the ranks of this host did: phalanx explain {outcome.job}\n")
    elif outcome.job and outcome.code == 0:  # --keep-record
        sys.stderr.write(f"phalanx run: the record is kept: phalanx trace {outcome.job}\n")
    elif outcome.job:
        _explain(outcome.job)
    _note_misplaced_options(args, outcome.code)
    raise typer.Exit(outcome.code)


def _run_on_hosts(args: "Namespace") -> NoReturn:
    from phalanx.launcher.arguments import as_words
    from phalanx.launcher.ssh.plan import make_plan

    plan = make_plan(args, as_words(args))
    load_torch_quietly()
    from phalanx.launcher.ssh.job import run_on_hosts

    outcome = run_on_hosts(plan)
    if outcome.report:
        sys.stderr.write(f"phalanx run: {outcome.report}\n{outcome.explanation}")
    _note_misplaced_options(args, outcome.code)
    raise typer.Exit(outcome.code)


def _note_misplaced_options(args: "Namespace", code: int) -> None:
    """Tell of options after the script, if it ended as argparse ends a program for wrong ones."""
    from phalanx.launcher.arguments import describe_misplaced_options

    if code == ExitCode.USAGE and (note := describe_misplaced_options(args)):
        sys.stderr.write(f"phalanx run: note: {note}\n")


def explanation(job: str, encoding: str, host: str = "", console: "Console | None" = None) -> str:
    """Return the output of `phalanx explain` for a failed job, and the command that repeats it.

    Args:
        job: The name of the job.
        encoding: The encoding of the output stream; the text contains no other characters.
        host: The host on which the command works; empty for this one.
        console: The console on which the text is shown in colours; None for plain text.
    """
    from phalanx.diagnosis.explain import as_text, explain
    from phalanx.diagnosis.job_reader import read_job, read_tracebacks
    from phalanx.system.escape import escape
    from phalanx.usage_errors import UsageError

    try:
        recorded_job = read_job(job)
        if console is None:
            text = as_text(recorded_job, encoding)
        else:
            with console.capture() as captured:
                console.print(explain(recorded_job))
            text = captured.get()
        has_tracebacks = bool(read_tracebacks(job)[1])
    except Exception as error:  # noqa: BLE001 - the job's own exit code matters more
        kind = "" if isinstance(error, OSError | UsageError) else f"{type(error).__name__}: "
        return f"\nphalanx run: can't explain it: {kind}{escape(str(error), 300)}\n"
    location = f", on {host}" if host else ""
    text = f"\n{text}To see this again{location}: phalanx explain {job}\n"
    if has_tracebacks:
        text += f"To see the whole tracebacks{location}: phalanx explain --tracebacks {job}\n"
    return text


def _explain(job: str) -> None:
    from phalanx.system.console import has_styles, make_console

    console = make_console(stderr=True)
    encoding, shown = sys.stderr.encoding or "utf-8", console if has_styles(console) else None
    sys.stderr.write(explanation(job, encoding, console=shown))


def load_torch_quietly() -> None:
    """Import torch with its C++ log level set to errors.

    A second call, or one after `import torch`, has no effect. By default torch prints a stack trace
    when another launcher has ended, and a warning for each address without a name. A
    `TORCH_CPP_LOG_LEVEL` or `LOGLEVEL` of the user takes precedence, and the logging of the ranks
    is unchanged.
    """
    is_default = _LOG_LEVEL not in os.environ and "LOGLEVEL" not in os.environ
    if is_default:
        os.environ[_LOG_LEVEL] = "ERROR"
    importlib.import_module("torch")
    if is_default:
        del os.environ[_LOG_LEVEL]
