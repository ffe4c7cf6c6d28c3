"""`phalanx run`: a script on many ranks."""
# ruff: noqa: ARG001 - the options are handed on to torchrun's parser, from the context

import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

# Line ends are kept as they are, so a paragraph is one line.
_HELP = "\n\n".join(
    (
        "Run a Python script on several ranks of this machine, or of many.",
        "Each rank is a process of its own that finds its place by phalanx.init() or "
        "torch.distributed.init_process_group(). Its lines of output begin with \\[rank N]. When a "
        "rank fails the others are stopped, one report on stderr says which failed first and why, "
        "and the exit code is that rank's (128 + N for signal N). No process is left. "
        "What every rank was doing is explained below that report and kept: `phalanx explain` says "
        "it again, and `phalanx jobs` lists the jobs. "
        "OMP_NUM_THREADS is set so that ranks share the cores, unless you set it.",
        "[bold]phalanx run train.py --epochs 3[/]\n"
        "  one rank per GPU or core; --epochs is the script's\n"
        "[bold]phalanx run --nproc-per-node 4 train.py[/]\n"
        "  four ranks\n"
        "[bold]phalanx run --nproc-per-node 2 -m package.main[/]\n"
        "  a module\n"
        "[bold]phalanx run --replace gloo script.py[/]\n"
        '  a script that says init_process_group("gloo"), on Phalanx\n'
        "[bold]phalanx run --hosts node-a:2,node-b:2 train.py[/]\n"
        "  two ranks on each of two hosts, started from here over ssh\n"
        "[bold]phalanx run --nnodes 2 --node-rank 0 --master-addr node-a train.py[/]\n"
        "  two hosts, each from a shell of its own; --node-rank 1 on the other",
    )
)

SETTINGS: dict[str, Any] = {
    "help": _HELP,
    "context_settings": {
        # What isn't listed is torchrun's or the script's own.
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
    "options_metavar": "[OPTIONS] SCRIPT [ARGS]...",
    "epilog": "All other options of torchrun are taken too, as torchrun takes them.",
}

_HOSTS = "Several hosts"
_SSH = "Several hosts from one shell, over ssh"
_FAILURE = "When a rank fails"
_OUTPUT = "Output"


def command(
    context: typer.Context,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|gpu|cpu",
            help="Ranks on this host. auto, the default, is one per GPU or, without a GPU, one per "
            "core that this process may use (affinity mask, CPU quota of the container).",
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
            help="Run Phalanx in place of these backends, where SCRIPT names one of them (or none, "
            "on CPU), without a change to it. Rank 0 says what was replaced.",
        ),
    ] = None,
    simulate_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Rehearse on this machine: its ranks take themselves for those of N hosts, in "
            "order, and talk between these through a transport.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX", help="Hosts of the job; 1 if not given.", rich_help_panel=_HOSTS
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
            metavar="HOST", help="Address of host 0, where the ranks meet.", rich_help_panel=_HOSTS
        ),
    ] = None,
    master_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="Port on host 0. On one host it needn't be given: a free one is found.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where hosts that may come and go meet, with --rdzv-backend c10d --rdzv-id ID.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The job's key, the same on all hosts: `phalanx key PATH` makes one. Without it "
            "whoever reaches the rendezvous can join the job.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    key_fd: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="An open descriptor to read the job's key from, one line.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:N],...|@FILE",
            help="Start N ranks on each of these hosts, in the directory of the same name as this "
            "one, and show what they write here. ssh must get there without a password. The first "
            "must be reachable for the others; by which address: --master-addr.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Give this environment variable to the ranks, beside those whose names begin with "
            "PHALANX_. May be repeated.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    remote_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python on the hosts; the path of this one if not given.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="In place of `ssh`, as in --ssh 'ssh -p 2222 -i key'.",
            rich_help_panel=_SSH,
        ),
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Start all ranks again, up to N times; 0 if not given.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Time for ranks that are stopped, from SIGTERM to SIGKILL; 10 if not given.",
            rich_help_panel=_FAILURE,
        ),
    ] = None,
    local_ranks_filter: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Show the output of these ranks of this host only.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where log files go, with --tee.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    tee: Annotated[
        str | None,
        typer.Option(
            "--tee",
            "-t",
            metavar="0|1|2|3",
            help="Write log files too: 1 of stdout, 2 of stderr, 3 of both.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Run a Python script on several ranks; the arguments are read from `context`."""
    from phalanx.launcher.torch_import import load_torch_quietly

    load_torch_quietly()
    from phalanx.errors import UsageError

    options = []
    for name, value in context.params.items():
        if hosts is not None and name in ("hosts", "export", "ssh", "remote_python"):
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            if one not in (None, False):
                options += [f"--{name.replace('_', '-')}", *([] if one is True else [one])]
    if not context.args:
        raise UsageError("no script: expected `phalanx run [OPTIONS] SCRIPT [ARGS]...`")
    if hosts is not None:
        _run_on_hosts(context, hosts, options)

    from phalanx.launcher.elastic_agent import run

    ended = run([*options, *context.args])
    if ended.report:
        sys.stderr.write(f"phalanx run: {ended.report}\n")
    if ended.elsewhere and ended.job:
        sys.stderr.write(f"What the ranks of this host did: phalanx explain {ended.job}\n")
    elif ended.job:
        _explain(ended.job)
    raise typer.Exit(ended.code)


def _run_on_hosts(context: typer.Context, hosts: str, options: list[str]) -> NoReturn:
    from phalanx.launcher.ssh.job import run_on_hosts
    from phalanx.launcher.ssh.plan import make_plan

    given = context.params
    plan = make_plan(
        hosts,
        given,
        options,
        context.args,
        export=given["export"] or (),
        ssh=given["ssh"],
        python=given["remote_python"],
    )
    outcome = run_on_hosts(plan)
    if outcome.report:
        sys.stderr.write(f"phalanx run: {outcome.report}\n{outcome.explanation}")
    raise typer.Exit(outcome.code)


def explanation(job: str, encoding: str, host: str = "", console: "Console | None" = None) -> str:
    """Why a job failed, as `phalanx explain` says it, and how to see that again.

    Args:
        job: its name.
        encoding: what the text must fit into.
        host: where it can be seen again, if that isn't here.
        console: where it will be shown in colours, if it will.
    """
    from phalanx.errors import UsageError
    from phalanx.observe.escape import escape
    from phalanx.observe.explain import as_text, explain
    from phalanx.observe.job_reader import read_job

    try:
        found = read_job(job)
        if console is None:
            text = as_text(found, encoding)
        else:
            with console.capture() as captured:
                console.print(explain(found))
            text = captured.get()
    except Exception as error:  # noqa: BLE001 - the job's own exit code matters more
        kind = "" if isinstance(error, OSError | UsageError) else f"{type(error).__name__}: "
        return f"\nphalanx run: can't explain it: {kind}{escape(str(error), 300)}\n"
    where = f", on {host}" if host else ""
    return f"\n{text}To see this again{where}: phalanx explain {job}\n"


def _explain(job: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False) if sys.stderr.isatty() else None
    sys.stderr.write(explanation(job, sys.stderr.encoding or "utf-8", console=console))
