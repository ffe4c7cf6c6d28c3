"""Check the models of the protocol exhaustively with Spin. See README.md.

usage: check.py [--long] [--only PATTERN...] [--source DIR] [--jobs N] [--record]
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cases import CASES, HOLDS, Case
from orders import MissingAccessError, orders_in

HERE = Path(__file__).resolve().parent
RESULT = HERE / "RESULT.md"
TABLE = ["| states | depth | s | found | case |", "|---:|---:|---:|---|---|"]
# The memory limit for the states of one search, MiB. The largest search took 1.1 GiB.
MEMORY = 6000
LIMIT = 1800  # seconds for one search
INSTALL = "apt-get install --yes --no-install-recommends spin"


@dataclass
class Result:
    found: str
    states: int = 0
    depth: int = 0
    seconds: float = 0.0


def need_spin() -> None:
    """Install Spin from the distribution if it is missing and this process is root."""
    if shutil.which("spin"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Spin is not installed; running {INSTALL}", flush=True)
        subprocess.run(INSTALL.split(), check=False, stdout=subprocess.DEVNULL)
    if not shutil.which("spin"):
        sys.exit(f"The model checker Spin is required: {INSTALL}, or https://spinroot.com")


def run(command: list[str], directory: str) -> str:
    result = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return result.stdout + result.stderr


def search(case: Case, orders: dict[str, str]) -> Result:
    """Build the verifier of a case, and run it to the end or to the first error."""
    given = {define.partition("=")[0] for define in case.defines}
    # Only those that the model uses: Spin has a short buffer for its command line.
    text = "".join((HERE / file).read_text() for file in (f"{case.model}.pml", "event.pml"))
    defines = [
        f"-D{name}={order}"
        for name, order in orders.items()
        if name not in given and re.search(rf"\b{name}\b", text)
    ]
    defines += [f"-D{define}" for define in case.defines]
    with tempfile.TemporaryDirectory() as directory:
        for file in HERE.glob("*.pml"):
            shutil.copy(file, directory)
        log = run(["spin", "-a", *defines, f"{case.model}.pml"], directory)
        options = ["-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=8192", f"-DMEMLIM={MEMORY}"]
        # Only a large search takes longer than the compiler would to optimise it.
        speed = "-O2" if case.long else "-O0"
        log += run(["gcc", speed, *options, "-o", "pan", "pan.c"], directory)
        if not (Path(directory) / "pan").exists():
            return Result(f"does not compile:\n{log}")
        start = time.monotonic()
        output = run(["./pan", "-m200000"], directory)
        return result_of(output, time.monotonic() - start)


def result_of(output: str, seconds: float) -> Result:
    def number(pattern: str) -> int:
        found = re.search(pattern, output)
        return int(found[1]) if found else 0

    error = re.search(r"^pan:1: (assertion violated|invalid end state|.*)", output, re.MULTILINE)
    complete = "errors: 0" in output and not re.search(
        "too small|out of memory|not completed", output
    )
    found = error[1] if error else HOLDS if complete else f"not searched to the end:\n{output}"
    return Result(found, number(r"(\d+) states, stored"), number(r"depth reached (\d+)"), seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the models of the protocol with Spin.")
    parser.add_argument(
        "--long", action="store_true", help="include the large searches, which take some minutes"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="run the cases whose name matches one of these",
    )
    parser.add_argument(
        "--source", type=Path, default=HERE.parent, help="the core whose memory orders are checked"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--record", action="store_true", help="write RESULT.md")
    return parser.parse_args()


def machine() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    compiler = run(["gcc", "--version"], ".").splitlines()[0]
    spin = run(["spin", "-V"], ".").strip()
    return (
        f"{spin}, {compiler}, {names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    )


def write_result(orders: dict[str, str], rows: dict[str, str]) -> None:
    """Write RESULT.md. A test compares its orders with those of the sources.

    Rows of cases that were not run this time stay as they are, unless an order or the machine has
    changed since.
    """
    accesses = [f"| {name} | {order} |" for name, order in orders.items()]
    lines = [
        '# Result of `make model ARGS="--long --record"`',
        machine() + ".",
        "\n".join(["| access | order |", "|---|---|", *accesses]),
    ]
    start = "\n\n".join(lines)
    before = RESULT.read_text() if RESULT.exists() else ""
    if before.startswith(start):
        kept = before.removeprefix(start).splitlines()
        rows = {row[2:-2].split(" | ")[-1]: row for row in kept if row.startswith("|")} | rows
    chosen = [(case, rows[case.name]) for case in CASES if case.name in rows]
    wrong = sum(f"| {case.expected} |" not in row for case, row in chosen)
    table = "\n".join([*TABLE, *(row for _, row in chosen)])
    RESULT.write_text(f"{start}\n\n{table}\n\n{len(chosen)} cases, {wrong} not as expected.\n")


def main() -> None:
    options = parse()
    try:
        orders = orders_in(options.source)
    except MissingAccessError as error:
        sys.exit(str(error))
    need_spin()
    cases = [
        case
        for case in CASES
        if (options.long or not case.long)
        and (not options.only or any(re.search(pattern, case.name) for pattern in options.only))
    ]
    rows = dict[str, str]()
    print("\n".join(TABLE))
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, result in zip(
            cases, pool.map(lambda each: search(each, orders), cases), strict=True
        ):
            good = result.found == case.expected
            wrong += not good
            verdict = result.found if good else f"**{result.found}, expected: {case.expected}**"
            rows[case.name] = (
                f"| {result.states} | {result.depth} | {result.seconds:.1f} | {verdict} "
                f"| {case.name} |"
            )
            print(rows[case.name], flush=True)
    print(f"\n{len(cases)} cases, {wrong} not as expected")
    if options.record:
        write_result(orders, rows)
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
