"""Test a training loop against failure: kill a rank at each of its operations, and more.

python examples/fault_injection.py
"""

import argparse

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import FaultRunner, Result, delay, kill, skip, stop


def train(steps: int) -> str:
    """Train in a loop in which no rank hangs or loses its weight when another rank fails."""
    with phalanx.init(timeout=3.0) as session:
        weight = torch.zeros(1)
        for step in range(steps):
            gradient = torch.full((1,), float(session.rank))
            try:
                dist.all_reduce(gradient)
            except phalanx.PhalanxError as error:
                return f"saved {weight.item():g} after {step} steps: {type(error).__name__}"
            weight += gradient
        return f"finished with {weight.item():g}"


def report(fault: str, result: Result) -> None:
    """Print the fault and the results of the other ranks in one line."""
    outcomes = sorted({str(value) for rank, value in result.values.items() if rank != 1})
    print(f"{fault}: the others {' or '.join(outcomes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Let ranks fail in a training loop.")
    parser.add_argument(
        "--nproc-per-node", type=int, default=3, help="ranks to start (3), at least 2"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of the loop (3), at least 2")
    options = parser.parse_args()
    if options.nproc_per_node < 2 or options.steps < 2:
        parser.error(
            f"--nproc-per-node {options.nproc_per_node} --steps {options.steps} given, "
            "expected at least 2 of each"
        )
    with FaultRunner() as runner:

        def run(*faults):  # type: ignore[no-untyped-def]
            return runner.run(train, options.nproc_per_node, (options.steps,), faults=faults)

        baseline = run()
        report("no fault", baseline)
        for nth, operation in enumerate(baseline[1].operations, start=1):
            report(f"rank 1 killed at {operation} {nth}", run(kill(rank=1, nth=nth)))
        report(
            "rank 1 skips its last operation", run(skip(rank=1, nth=len(baseline[1].operations)))
        )
        report("rank 1 late by 0.3 s", run(delay(rank=1, nth=2, seconds=0.3)))
        report("rank 1 stopped for 0.3 s", run(stop(rank=1, nth=2, seconds=0.3)))
        report("rank 1 stopped for good", run(stop(rank=1, nth=2)))


if __name__ == "__main__":
    main()
