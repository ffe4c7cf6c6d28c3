"""`phalanx test`: check the installation."""

import secrets
from typing import Annotated, Any

import typer

from phalanx.cli.output import AsJson, Output, check_writable, write_json
from phalanx.system.console import make_console
from phalanx.system.processes import ExitCode

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
        int, typer.Option("--nproc-per-node", help="Number of ranks.", min=2, max=64)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(help="Timeout of an operation in seconds.", min=1)
    ] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the inputs; random by default.", min=0)
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Run the self-check and print its results."""
    import phalanx
    from phalanx.errors import LaunchError, UsageError
    from phalanx.launcher.launch import launch
    from phalanx.testing.selfcheck import SIZES, check

    check_writable(output)
    console = make_console(stderr=as_json)
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"Phalanx {phalanx.__version__}: {nprocs} ranks, seed {seed}")
    with console.status("starting ranks and checking"):
        try:
            reports = launch(check, nprocs, (seed, timeout))
        except LaunchError as error:
            if isinstance(error.__cause__, UsageError):  # a wrong setting needs no stack trace
                raise error.__cause__ from None
            raise
    failures = [
        {"operation": name, "rank": rank, "reason": report[name]}
        for name in reports[0]
        for rank, report in enumerate(reports)
        if report[name]
    ]
    for name in reports[0]:
        found_here = [failure for failure in failures if failure["operation"] == name]
        console.print(f"  {'[red]wrong[/]' if found_here else '[green]ok[/]':<6} {name}")
        for failure in found_here:
            console.print(f"         rank {failure['rank']}: {failure['reason']}")
    wrong = len({failure["operation"] for failure in failures})
    found = {"version": phalanx.__version__, "ranks": nprocs, "seed": seed, "ok": not wrong}
    write_json({**found, "operations": list(reports[0]), "failures": failures}, as_json, output)
    sizes = ", ".join(str(size) for size in SIZES)
    if wrong:
        console.print(f"[red]{wrong} of {len(reports[0])} operations are wrong[/]")
        raise typer.Exit(ExitCode.FAILURE)
    console.print(
        f"[green]all {len(reports[0])} operations agree with numpy[/] ({sizes} elements each)"
    )
