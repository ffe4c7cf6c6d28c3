"""Run PyTorch's published RPC examples on torch.distributed.rpc and on phalanx.rpc, and compare.

The only change is the imports of RPC, in a temporary copy. On both, data sets are synthetic, the
CPU replaces GPUs, and the examples are shortened, so no network is needed. Some need
`pip install torchvision gymnasium`.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.published.cases import CASES, Case
from tests.published.comparison import differences, failures
from tests.published.runner import RunResult, copy, run

_PYTORCH, _PHALANX = "torch.distributed.rpc", "phalanx.rpc"
_PORTS = (29500, 29501)
_SHOWN = 12


def main() -> None:
    options = _options()
    chosen = [case for case in CASES if options.only in case.name]
    if not chosen:
        names = ", ".join(repr(case.name) for case in CASES)
        sys.exit(f"--only {options.only!r}: expected a part of the name of an example: {names}")
    examples = Path(options.examples).expanduser()
    if not (examples / "distributed" / "rpc").is_dir():
        sys.exit(
            f"{examples} has no folder distributed/rpc: expected a checkout of pytorch/examples, "
            "as created by `git clone https://github.com/pytorch/examples`"
        )
    if taken := [port for port in _PORTS if not _is_free(port)]:
        sys.exit(
            f"port {taken[0]} is in use, but the examples need it: end the process that uses it"
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("example", "lines changed", "result", "PyTorch", "Phalanx", "substitutes")
    bad = 0
    for case in chosen:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            bad += _try(case, examples, Path(folder), options, console, table)
    console.print(table)
    sys.exit(1 if bad else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("examples", help="a checkout of pytorch/examples")
    parser.add_argument("--only", default="", help="run only examples with this text in their name")
    parser.add_argument("--full", action="store_true", help="do not shorten the examples")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="time limit of each run in seconds (600)"
    )
    return parser.parse_args()


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def _try(
    case: Case,
    examples: Path,
    folder: Path,
    options: argparse.Namespace,
    console: Console,
    table: Table,
) -> bool:
    """Run an example on both; return whether the runs differ."""
    if missing := [name for name in case.needs if importlib.util.find_spec(name) is None]:
        words = f"not run: pip install {' '.join(missing)}"
        console.print(f"{case.name}: {words}")
        table.add_row(case.name, "", words, "", "", case.substitutes)
        return True
    results: dict[str, RunResult] = {}
    lines = 0
    for system in (_PHALANX,) if case.failure_on_pytorch else (_PYTORCH, _PHALANX):
        console.print(f"{case.name}, on {system} ...")
        (place := folder / system).mkdir()
        lines = copy(examples, case, place, system == _PHALANX)
        results[system] = run(case, place, options.limit, options.full)
    ours, theirs = results[_PHALANX], results.get(_PYTORCH)
    found = differences(case, theirs, ours) if theirs else failures(ours)
    for each in found[:_SHOWN]:
        console.print(f"  {each}", markup=False, highlight=False)
    if len(found) > _SHOWN:
        console.print(f"  and {len(found) - _SHOWN} more")
    seconds = [
        f"{results[system].seconds:.0f} s" if system in results else "-"
        for system in (_PYTORCH, _PHALANX)
    ]
    result = f"{len(found)} differences" if found else _agreement(case, ours)
    table.add_row(case.name, str(lines), result, *seconds, case.substitutes)
    return bool(found)


def _agreement(case: Case, ours: RunResult) -> str:
    count = sum(map(len, ours.losses.values()))
    if case.failure_on_pytorch:
        return f"{count} losses; PyTorch's may fail: {case.failure_on_pytorch}"
    if case.tolerance:
        return f"the last of {count} losses within {case.tolerance:.0%}"
    return f"the same {count} losses" if count else "the same lines"


if __name__ == "__main__":
    main()
