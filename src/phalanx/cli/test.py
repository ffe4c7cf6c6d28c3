"""`phalanx test`: does the installation work?"""

import secrets
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Check that Phalanx works on this machine.",
            "Starts ranks, runs every operation at several sizes and compares the results with "
            "numpy's. Prints a line for each and one verdict. The exit code is 0 if all is well, "
            "1 if something is wrong.",
            "[bold]phalanx test[/]\n  two ranks\n[bold]phalanx test --ranks 4[/]\n  four",
        )
    )
}


def command(
    ranks: Annotated[int, typer.Option(help="Processes to start.", min=1, max=64)] = 2,
    timeout: Annotated[
        float, typer.Option(help="Seconds that an operation may take.", min=1)
    ] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the random inputs; a fresh one if not given.", min=0)
    ] = None,
) -> None:
    """Run the self-check and print its verdict."""
    from rich.console import Console

    import phalanx
    from phalanx.launcher.function import launch
    from phalanx.testing.selfcheck import SIZES, check

    console = Console(highlight=False)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"Phalanx {phalanx.__version__}: {ranks} ranks, seed {seed}")
    with console.status("starting ranks and checking"):
        reports = launch(check, ranks, (seed, timeout))
    wrong = 0
    for name in reports[0]:
        faults = [f"rank {r}: {report[name]}" for r, report in enumerate(reports) if report[name]]
        wrong += bool(faults)
        console.print(f"  {'[red]wrong[/]' if faults else '[green]ok[/]':<6} {name}")
        for fault in faults:
            console.print(f"         {fault}")
    sizes = ", ".join(str(size) for size in SIZES)
    if wrong:
        console.print(f"[red]{wrong} of {len(reports[0])} operations are wrong[/]")
        raise typer.Exit(1)
    console.print(
        f"[green]all {len(reports[0])} operations agree with numpy[/] ({sizes} elements each)"
    )
