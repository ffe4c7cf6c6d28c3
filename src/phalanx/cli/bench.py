"""`phalanx bench`: how fast is this machine, against Gloo?"""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "help": "\n\n".join(
        (
            "Time all-reduces on several backends, side by side in one run.",
            "Every round rewrites the buffers and runs all backends in turn; given are the median "
            "over the rounds, the quartiles, and how many times faster than Gloo Phalanx is.",
            "[bold]phalanx bench[/]\n  two ranks, 4 B to 64 MiB\n"
            "[bold]phalanx bench --ranks 4 --sizes 1KiB,1MiB --json out.json[/]",
        )
    )
}

_DEFAULT_SIZES = "4,64,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_sizes(text: str) -> list[int]:
    """Read "4,1KiB,64MiB" as bytes; float32, so at least 4 each."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", part.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise typer.BadParameter(f"{part!r} given, expected bytes such as 4, 16KiB or 64MiB")
        size = int(match[1]) * _UNITS[match[2]]
        if size < 4 or size % 4:
            raise typer.BadParameter(f"{part!r} given, expected a multiple of 4 bytes (float32)")
        sizes.append(size)
    return sizes


def _on_rank(backends: list[str], sizes: list[int], rounds: int) -> Any:
    from phalanx.bench import report
    from phalanx.bench.collectives import all_reduce

    return all_reduce(
        backends, sizes, rounds, lambda size, timings: print(report.row(size, timings), flush=True)
    )


def command(
    ranks: Annotated[int, typer.Option(help="Processes to start.", min=2, max=64)] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes per rank, separated by commas.")] = (
        _DEFAULT_SIZES
    ),
    backends: Annotated[str, typer.Option(help="Backends, separated by commas.")] = "phalanx,gloo",
    rounds: Annotated[int, typer.Option(help="Rounds per size.", min=2)] = 15,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Run the measurement and print a line for each size as it comes."""
    bytes_each = parse_sizes(sizes)
    names = backends.split(",")
    from torch.distributed import is_backend_available

    from phalanx.bench import report
    from phalanx.launch.function import launch

    for name in names:
        if not is_backend_available(name):
            raise typer.BadParameter(f"backend {name!r} is not available; try phalanx,gloo")
    facts = report.machine()
    print(f"all_reduce, float32 SUM, {ranks} ranks; " + ", ".join(f"{k} {facts[k]}" for k in facts))
    print(report.header(names), flush=True)
    results = launch(_on_rank, ranks, (names, bytes_each, rounds))[0]
    if json is not None:
        report.store(json, shlex.join(["phalanx", *sys.argv[1:]]), ranks, results)
