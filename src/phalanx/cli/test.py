"""`phalanx test`: check the installation."""

import secrets
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Check that Phalanx works on this machine.",
            "Starts ranks, runs every operation at several sizes and compares the results with "
            "numpy's. Prints a line for each operation and a summary. The exit code is 0 if all "
            "results are right, 1 otherwise.",
            "[bold]phalanx test[/]\n  two ranks\n"
            "[bold]phalanx test --nproc-per-node 4[/]\n  four ranks",
        )
    )
}


def command(
    nprocs: Annotated[
        int, typer.Option("--nproc-per-node", help="Number of ranks.", min=1, max=64)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(help="Timeout of an operation in seconds.", min=1)
    ] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the inputs; random by default.", min=0)
    ] = None,
) -> None:
    """Run the self-check and print its results."""
    from rich.console import Console

    import phalanx
    from phalanx.launcher.launch import launch
    from phalanx.testing.selfcheck import SIZES, check

    console = Console(highlight=False)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"Phalanx {phalanx.__version__}: {nprocs} ranks, seed {seed}")
    with console.status("starting ranks and checking"):
        reports = launch(check, nprocs, (seed, timeout))
    wrong = 0
    for name in reports[0]:
        failures = [f"rank {r}: {report[name]}" for r, report in enumerate(reports) if report[name]]
        wrong += bool(failures)
        console.print(f"  {'[red]wrong[/]' if failures else '[green]ok[/]':<6} {name}")
        for failure in failures:
            console.print(f"         {failure}")
    sizes = ", ".join(str(size) for size in SIZES)
    if wrong:
        console.print(f"[red]{wrong} of {len(reports[0])} operations are wrong[/]")
        raise typer.Exit(1)
    console.print(
        f"[green]all {len(reports[0])} operations agree with numpy[/] ({sizes} elements each)"
    )
